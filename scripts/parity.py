"""Prove that the mesh does not change the run: every combination against one process in eager mode.

    python scripts/parity.py [--config parity.toml] [--rows PATTERN] [--dtype float64|float32|bfloat16] [--list]

A row (`parity_rows.py`) is a number of ranks and a set of overrides of the config. It passes if the loss, the gradient
norm, the first step's gradient of every parameter, and the final weights agree with the reference
(`parity_reference.py`) over all steps. A combination that cannot work is a row as well: the config must refuse it.
"""

import argparse
import logging
import math
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.tensor import DTensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.errors import ConfigError, KeelError
from configs.layout import mesh_sizes
from configs.load import load
from configs.schema import Config
from parallelisms.mesh import build_mesh
from parallelisms.ranks import gather
from scripts.parity_reference import Trajectory, batches, reference
from scripts.parity_rows import REFUSED, Row, table, words
from scripts.rank_pool import RankPool
from trainer.lr_schedule import learning_rate
from trainer.step import build_learner

BOUNDS = {
    "float64": (1e-10, 1e-10, 1e-10, 1e-10),
    "float32": (1e-5, 1e-5, 1e-4, math.inf),
    "bfloat16": (1e-3, 2e-2, 1e-1, math.inf),
}
"""Largest relative difference of loss, norm, first-step gradients and weights. float32 weights are not compared:
Adam amplifies round-off where a gradient is near zero (5e-4 after three steps). bfloat16 means the mixed precision of
the job files for GPUs, against a reference in float32."""


@dataclass(frozen=True)
class Difference:
    """Largest relative differences of a row from the reference."""

    loss: float
    norm: float
    gradient: float
    weight: float

    def passes(self, dtype: str) -> bool:
        """Whether all are within the bounds of the type; a NaN is not."""
        values = (self.loss, self.norm, self.gradient, self.weight)
        return all(value <= bound for value, bound in zip(values, BOUNDS[dtype], strict=True))


def compare(config_name: str, overrides: tuple[str, ...], path: str) -> Difference | None:
    """Train as the trainer does, on this rank of the mesh; rank 0 returns the difference from the reference."""
    with attention_that_compiles():
        found = _train(load(config_name, overrides, world_size=dist.get_world_size()).config)
    if dist.get_rank() > 0:
        return None
    expected = Trajectory(**torch.load(path))
    return Difference(
        loss=_largest_ratio(found.losses, expected.losses),
        norm=_largest_ratio(found.norms, expected.norms),
        gradient=_largest(found.gradients, expected.gradients),
        weight=_largest(found.weights, expected.weights),
    )


@contextmanager
def attention_that_compiles() -> Iterator[None]:
    """Attention written out, on torch 2.11: what it compiles of its CPU kernel in float64 fails in backward.

    The logsumexp of float64 is float64, and torch 2.11 says float32 of it while it traces. What it has compiled and
    keeps on the disk does not tell one kernel from the other.
    """
    with FakeTensorMode():
        q = torch.empty(1, 1, 8, 8, dtype=torch.float64)
        _, logsumexp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, q, q)
    if logsumexp.dtype == q.dtype:
        yield
    else:
        with sdpa_kernel(SDPBackend.MATH), torch._functorch.config.patch(enable_autograd_cache=False):
            yield


def _train(config: Config) -> Trajectory:
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    found = Trajectory()

    def keep_first_gradients(*_: object) -> None:
        if not found.losses:
            found.gradients = {name: whole(p.grad) for name, p in learner.parameters.items() if p.grad is not None}

    learner.optimizer.register_step_pre_hook(keep_first_gradients)
    for step, micro_batches in enumerate(batches(config, mesh.dp_rank, mesh.sizes.dp)):
        learner.freeze(step)
        result = learner.step(micro_batches, learning_rate(config.lr_schedule, config.optimizer.lr, step))
        found.losses.append(result.loss)
        found.norms.append(result.grad_norm)
    learner.finish_update()
    found.weights = {name: whole(p) for name, p in learner.parameters.items()}
    found.gradients, found.weights = _of_all_stages(found.gradients), _of_all_stages(found.weights)
    return found


def _of_all_stages(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of all ranks: a pipeline's rank has those of its own stages only."""
    return dict(item for of_rank in gather(tensors) for item in of_rank.items())


def whole(tensor: Tensor) -> Tensor:
    # Gathering FSDP x TP shards takes two collectives, of which torch warns; speed does not matter here.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def _largest_ratio(found: list[float], expected: list[float]) -> float:
    return max(abs(f - e) / abs(e) for f, e in zip(found, expected, strict=True))


def _largest(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert found.keys() == expected.keys(), found.keys() ^ expected.keys()
    return max(_relative(found[name], expected[name]) for name in expected)


def _relative(found: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((found - expected).abs().max() / expected.abs().max()).item()


def run_rows(
    pool: RankPool, config_name: str, rows: Iterable[Row], overrides: tuple[str, ...] = ()
) -> Iterator[tuple[Row, Difference]]:
    """Compute the reference once for each run, then each row, and yield its difference."""
    references: dict[tuple[str, ...], str] = {}
    with tempfile.TemporaryDirectory() as folder:
        for row in rows:
            run = overrides + row.run_overrides
            if run not in references:
                references[run] = str(Path(folder) / f"reference-{len(references)}.pt")
                pool.run(1, reference, config_name, run, references[run])
            yield row, pool.run(row.ranks, compare, config_name, run + row.overrides, references[run])[0]


def dtype_overrides(dtype: str) -> tuple[str, ...]:
    """Overrides that set all three types; bfloat16 computes in it and keeps float32 for parameters and reductions."""
    state = "float32" if dtype == "bfloat16" else dtype
    return words({"training.dtype": state, "training.compute_dtype": dtype, "training.reduce_dtype": state})


def refusals(config_name: str, rows: Mapping[str, tuple[int, dict[str, object], str]]) -> Iterator[tuple[str, str]]:
    """For each combination that cannot work, its name and the reason that the config gives; "" if it gives none."""
    for name, (ranks, overrides, part) in rows.items():
        try:
            load(config_name, words(overrides), world_size=ranks)
            yield name, ""
        except ConfigError as error:
            reason = " ".join(str(error).split())
            yield name, reason if part in reason else ""


def main() -> int:
    """Run the rows asked for, print a line for each and return the number that failed (at most 1)."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument(
        "--config", default="parity.toml", help="job file: small, data synthetic (default: %(default)s)"
    )
    parser.add_argument("--rows", default="*", help='shell pattern of row names, e.g. "TP 2*compiled*"')
    parser.add_argument("--dtype", choices=BOUNDS, default="float64", help="type to compute in (default: %(default)s)")
    parser.add_argument("--list", action="store_true", help="print the rows and what they would take, and exit")
    arguments = parser.parse_args()
    rows = [row for row in table() if fnmatchcase(row.name, arguments.rows)]
    refused = {name: row for name, row in REFUSED.items() if fnmatchcase(name, arguments.rows)}
    if arguments.list or not (rows or refused):
        lines = [f"{row.name} ({row.ranks} ranks)" for row in rows] + [f"{name} (refused)" for name in refused]
        print("\n".join(lines) or f"no row matches {arguments.rows!r}")
        return 0 if lines else 1
    failed = _print_table(rows, arguments.config, arguments.dtype) if rows else 0
    return max(failed, _print_refusals(arguments.config, refused))


def _print_table(rows: list[Row], config_name: str, dtype: str) -> int:
    pool = RankPool(size=max(row.ranks for row in rows))
    failed = 0
    started = time.perf_counter()
    print(f"Largest relative difference from one process in eager mode, {dtype}")
    print(f"{'':52s} {'loss':>8s} {'norm':>8s} {'gradient':>8s} {'weights':>8s}")
    try:
        for row, difference in run_rows(pool, config_name, rows, dtype_overrides(dtype)):
            passes = difference.passes(dtype)
            failed += not passes
            figures = " ".join(f"{value:8.1e}" for value in vars(difference).values())
            print(f"{row.name:52s} {figures}  {'ok' if passes else 'FAILS'}", flush=True)
    except KeelError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        pool.close()
    bounds = ", ".join(f"{bound:.0e}" for bound in BOUNDS[dtype])
    print(f"{len(rows) - failed} of {len(rows)} rows within {bounds}; {time.perf_counter() - started:.0f} s")
    return min(failed, 1)


def _print_refusals(config_name: str, rows: Mapping[str, tuple[int, dict[str, object], str]]) -> int:
    failed = 0
    for name, reason in refusals(config_name, rows):
        failed += not reason
        print(f"{name:52s} {'refused: ' + reason if reason else 'NOT REFUSED'}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
