"""Checks that what must be the same on all ranks is the same, before anything depends on it.

Ranks that disagree either train to the end and silently learn something else (another learning rate, another seed,
another version of the code), or wait for each other in collectives that never match (another number of steps). So all
ranks compare facts at the start. Each rank sends one hash to all, a few bytes at any number of ranks; only if hashes
differ do they exchange the facts themselves, from one rank of each kind.

There are two comparisons. The first comes right after the process group is formed, since the mesh already depends on
the config. The second, of the data, has to wait until rank 0 has prepared them.
"""

import json
import platform
import socket
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
import xxhash

from checkpoint.bucket_files import local_file
from checkpoint.reproducibility import CODE
from configs.errors import ConfigError, KeelError, UserError, listed
from configs.layout import used_sources
from configs.load import LoadedConfig
from configs.reading.keys import flat
from configs.reading.toml_text import NOT_SET, text_or_not_set
from configs.schema import Config, Source
from configs.secret import SECRET, keyed_hash
from parallelisms.ranks import gather
from trainer.data.text.documents import pieces
from trainer.data.text.streaming import text_fingerprint
from trainer.data.token_file import folder_fingerprint
from trainer.guards.environment import THREADS, code_hashes, environment, threads

Facts = Mapping[str, str]
Result = TypeVar("Result")
_SHOWN_RANKS = 4


def compare_launches(job: LoadedConfig, device: torch.device) -> None:
    """Raise an error on all ranks unless they have the same config, code, packages and kind of machine.

    Raises:
        ConfigError: the configs differ.
        UserError: anything else differs.
    """
    config = job.config.model_dump(mode="json")
    settings = {name: text_or_not_set(value) for name, value in flat(config).items()}
    machine = environment(device, job.config.fsdp.cpu_offload) | {THREADS: threads()}
    del machine[CODE]  # compared file by file instead
    code = {f"the code in {path}": digest for path, digest in code_hashes().items()}
    libraries = {"torch": torch.__version__, "python": platform.python_version()}
    libraries[f"the hash of {SECRET}"] = keyed_hash("", "").decode()[:8]
    differing = _differences({**settings, **machine, **libraries, **code})
    if differing:
        kind = ConfigError if settings.keys() & differing.keys() else UserError
        raise kind(_message("give all of them the same command, job file, Keel, packages and machines", differing))


def compare_data(config: Config) -> None:
    """Raise UserError on all ranks unless they find the same tokenizer and the same data.

    For token files only the headers are compared, which hold the hashes of the rest. What no rank can read is left for
    its reader to report.
    """
    facts = {}
    tokenizer = ""
    if config.tokenizer.path:
        tokenizer = _fact(lambda: xxhash.xxh3_128_hexdigest(local_file(str(config.tokenizer.path)).read_bytes()))
        facts[f"the content of tokenizer.path ({config.tokenizer.path})"] = tokenizer
    for key, source in used_sources(config):
        if source.kind in ("tokens", "text"):
            facts[f"the content of {key} ({source.path})"] = _fact(partial(_fingerprint, config, source, tokenizer))
    differing = _differences(facts)
    if differing:
        raise UserError(_message("the data must be in a place where all of them see the same files", differing))


def on_all_ranks(action: Callable[[], Result], group: dist.ProcessGroup | None = None) -> list[Result]:
    """Run `action` on each rank of `group` (None: all ranks), and return all results, which are JSON, on each.

    Raises:
        UserError: `action` failed somewhere. All ranks raise it, naming the first such rank; but a rank
            whose error is no KeelError raises that.
    """
    outcome: list[Any] = [None, None]
    unforeseen: Exception | None = None
    try:
        outcome[0] = action()
    except Exception as error:
        outcome[1] = f"rank {dist.get_rank()} ({socket.gethostname()}): {error}"
        unforeseen = None if isinstance(error, KeelError) else error
    outcomes = gather(outcome, group)  # after any error: otherwise the others would wait
    if unforeseen is not None:
        raise unforeseen
    for _, problem in outcomes:
        if problem:
            raise UserError(problem)
    return [cast(Result, result) for result, _ in outcomes]


def _fingerprint(config: Config, source: Source, tokenizer_hash: str) -> str:
    assert source.path is not None  # configs.checks ensures it
    if source.kind == "tokens":
        return folder_fingerprint(source.path, config.data)
    return text_fingerprint(pieces(source.path), tokenizer_hash)


def _fact(read: Callable[[], str]) -> str:
    """The return value of `read`, or why it failed."""
    try:
        return read()
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    except UserError as error:
        return str(error)


def _differences(facts: Facts) -> dict[str, list[tuple[str, list[str]]]]:
    """The facts in which ranks differ: each value with the ranks that have it, the most common value first.

    The result is the same on all ranks.
    """
    digest = xxhash.xxh3_128_digest(json.dumps(dict(facts), sort_keys=True).encode())
    mine = torch.frombuffer(bytearray(digest), dtype=torch.int64)
    gathered = torch.empty(dist.get_world_size() * len(mine), dtype=torch.int64)
    dist.all_gather(list(gathered.split(len(mine))), mine)
    kinds = list(map(tuple, gathered.view(-1, len(mine)).tolist()))
    if len(set(kinds)) == 1:
        return {}
    rank = dist.get_rank()
    speaks = kinds.index(kinds[rank]) == rank  # one rank of each kind
    told: list[Any] = gather((socket.gethostname(), dict(facts) if speaks else None))
    hosts = [host for host, _ in told]
    by_rank: list[Facts] = [told[kinds.index(kind)][1] for kind in kinds]
    names = dict.fromkeys(name for facts in by_rank for name in facts)
    found = {}
    for name in names:
        values = _ranks_by_value([facts.get(name, NOT_SET) for facts in by_rank])
        if len(values) > 1:
            found[name] = [(value, _named(ranks, hosts)) for value, ranks in values]
    return found


def _named(ranks: Iterable[int], hosts: Sequence[str]) -> list[str]:
    return [f"rank {rank} ({hosts[rank]})" for rank in ranks]


def _ranks_by_value(values: list[str]) -> list[tuple[str, list[int]]]:
    ranks: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(value, []).append(rank)
    return sorted(ranks.items(), key=lambda item: -len(item[1]))  # stable: of equals, the lowest rank's value first


def _message(remedy: str, differing: Mapping[str, list[tuple[str, list[str]]]]) -> str:
    lines = [
        f"{name} is {value} on {_shown(ranks)}, but {usual} on {_shown(usual_ranks)}"
        for name, [(usual, usual_ranks), *others] in differing.items()
        for value, ranks in others
    ]
    return f"the ranks of this launch do not agree ({remedy}):\n  {listed(lines)}"


def _shown(ranks: list[str]) -> str:
    return listed(ranks, ", ", _SHOWN_RANKS)
