"""Changes to a job that take less memory, and which of them would make it fit; none changes what is learned."""

from collections.abc import Callable, Iterator, Sequence

from configs.checks import check
from configs.errors import ConfigError
from configs.layout import mesh_sizes, micro_batch_size, zero_stage
from configs.reading.keys import flat
from configs.reading.toml_text import value_text
from configs.schema import ActivationCheckpoint, Config
from configs.table import with_keys
from parallelisms.mesh import Mesh
from parallelisms.sums import sums_of
from trainer.planning.by_memory import freeing_copies
from trainer.planning.memory import estimate_memory
from trainer.report.units import size

CONTEXT_BYTES = 2**30
"""Memory of a GPU used by CUDA itself, outside of torch's tensors and NCCL's communicators: half a GiB to one."""
_MOST_RANKS = 2**16


def takes_less(config: Config, on_gpu: bool) -> list[str]:
    """The changes that are not made already, cheapest first."""
    made = [list(make(config)) for make in _CHANGES if on_gpu or make is not _offload]
    return [
        *(_changes(config, steps[-1]) for steps in made if steps),
        "more ranks, or mesh.tp, mesh.cp and mesh.pp: each rank holds a smaller part",
    ]


def does_not_fit(config: Config, ranks: int, device_bytes: int, mesh: Mesh | None = None, what: str = "the job") -> str:
    """The warning if the estimate of a job, or of `what` of it, exceeds a GPU's memory, with what would make it fit.

    "" if it fits.
    """

    def needed(changed: Config, n_ranks: int) -> int:
        sizes = mesh_sizes(changed, n_ranks)
        job = freeing_copies(changed, sizes)  # as is done where they do not fit
        estimate = estimate_memory(job, sizes, "cuda", mesh)
        return estimate.device + estimate.communicators + CONTEXT_BYTES

    memory = f"each GPU's memory ({size(CONTEXT_BYTES)} of it for CUDA itself; NCCL's communicators are counted)"
    return _does_not_fit(config, ranks, memory, device_bytes, needed, _CHANGES, what)


def host_does_not_fit(
    config: Config, ranks: int, ranks_here: int, device_type: str, free_bytes: int, mesh: Mesh | None = None
) -> str:
    """The warning if the job's estimate exceeds the free memory of this host; "" if it fits.

    On a CPU that is everything that the host's ranks allocate, on GPUs the states that `fsdp.cpu_offload` keeps there.
    """

    def needed(changed: Config, n_ranks: int) -> int:
        estimate = estimate_memory(changed, mesh_sizes(changed, n_ranks), device_type, mesh)
        return ranks_here * (estimate.device if device_type == "cpu" else estimate.states * estimate.offloaded)

    memory = f"this host's memory for its {ranks_here} rank{'s' * (ranks_here > 1)}"
    changes = [make for make in _CHANGES if make is not _offload]
    return _does_not_fit(config, ranks, memory, free_bytes, needed, changes)


_Needed = Callable[[Config, int], int]
"""Bytes that a job needs on so many ranks."""


def _does_not_fit(
    config: Config,
    ranks: int,
    memory: str,
    free: int,
    needed: _Needed,
    changes: Sequence["_Change"],
    what: str = "the job",
) -> str:
    if (too_much := _estimated(needed, config, ranks)) <= free:
        return ""
    advice = "No change that Keel knows of makes it fit, not even with more ranks"
    for changed, n_ranks in _candidates(config, ranks, changes):
        if not check(changed, n_ranks) and (less := _estimated(needed, changed, n_ranks)) <= free:
            words = [_changes(config, changed)] if changed != config else []
            words += [f"{n_ranks:,} ranks (now {ranks:,})"] if n_ranks != ranks else []
            advice = f"With {' and '.join(words)} it would take about {size(less)}"
            break
    return (
        f"{what} needs about {size(too_much)} of {memory}, and there are {size(free)} free: it will most likely run "
        f"out of memory. {advice}"
    )


def _candidates(config: Config, ranks: int, changes: Sequence["_Change"]) -> Iterator[tuple[Config, int]]:
    """Jobs that learn the same with less memory: each change alone, then with all before it, then on more ranks."""
    combined = config
    for make in changes:
        for changed in make(config):
            yield changed, ranks
        for changed in make(combined):
            yield changed, ranks
            if not check(changed, ranks):
                combined = changed
        if make is _checkpoint_fully:
            yield from ((each, n) for each in (config, combined) for n in _more(ranks))
    yield from ((combined, n) for n in _more(ranks))


def _more(ranks: int) -> Iterator[int]:
    while (ranks := 2 * ranks) <= _MOST_RANKS:
        yield ranks


def _estimated(needed: _Needed, config: Config, ranks: int) -> int:
    """Bytes needed, as far as they can be estimated."""
    try:
        return needed(config, ranks)
    except ConfigError:  # the ranks do not form the mesh
        return 2**63


# --------------------------------------------------------------------------- the changes


def _smaller_micro_batch(config: Config) -> Iterator[Config]:
    micro_batch = micro_batch_size(config.training)
    if not sums_of(config.training).mesh_changes_bits:  # another one would be another run
        return
    for smaller in range(micro_batch // 2, 0, -1):
        if micro_batch % smaller == 0:
            yield with_keys(config, training={"micro_batch_size": smaller})


def _checkpoint_selectively(config: Config) -> Iterator[Config]:
    table = config.activation_checkpoint
    if table.mode == "none" and not table.memory_limit_gib:
        yield with_keys(config, activation_checkpoint={"mode": "selective"})


def _checkpoint_fully(config: Config) -> Iterator[Config]:
    full = ActivationCheckpoint(mode="full")
    if config.activation_checkpoint != full:
        yield config.model_copy(update={"activation_checkpoint": full})


def _reshard(config: Config) -> Iterator[Config]:
    if zero_stage(config.fsdp) < 3 or config.fsdp.reshard_after_forward == "never":
        yield with_keys(config, fsdp={"zero_stage": 3, "reshard_after_forward": "always"})


def _no_replicas(config: Config) -> Iterator[Config]:
    if config.mesh.dp_replicate > 1 and config.fsdp.partition == "rows":
        yield with_keys(config, mesh={"dp_replicate": 1, "dp_shard": -1})


def _offload(config: Config) -> Iterator[Config]:
    if not config.fsdp.cpu_offload:
        yield with_keys(config, fsdp={"cpu_offload": True})


_Change = Callable[[Config], Iterator[Config]]
"""Yields changed jobs, the smallest change first; nothing if the change is already made."""
_CHANGES: tuple[_Change, ...] = (
    _smaller_micro_batch,
    _checkpoint_selectively,
    _checkpoint_fully,
    _reshard,
    _no_replicas,
    _offload,
)
"""Cheapest first."""


def _changes(before: Config, after: Config) -> str:
    """The keys that differ: "training.micro_batch_size = 1 (now 8), ..."."""
    was = flat(before.model_dump())
    becomes = flat(after.model_dump())
    differing = [key for key, value in becomes.items() if value != was[key]]
    return ", ".join(f"{key} = {value_text(becomes[key])} (now {value_text(was[key])})" for key in differing)
