"""What ranks tell each other: JSON that arrives as it was, errors by type, and no pickle anywhere."""

import ast
import errno
import json
import math
from pathlib import Path
from urllib.error import HTTPError

import pytest
import torch.distributed as dist

from checkpoint.bucket import BucketError
from checkpoint.manifest import Damaged
from configs.errors import ConfigError
from parallelisms.ranks import error_as_json, error_of, gather, on_rank_zero
from tests.conftest import ROOT

HARMLESS = {
    "checkpoint/index.py": "writes the index of torch's format",
    "parallelisms/torch_internals.py": "reads this process's own memory: torch's flight recorder returns a pickle",
    "scripts/proving/equal.py": "runs inside of other trainers, without Keel's packages",
}
"""Files of the product that may name pickle, and why."""
PICKLING = {
    "all_gather_object",
    "broadcast_object_list",
    "gather_object",
    "recv_object_list",
    "scatter_object_list",
    "send_object_list",
}
MODULES = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}
VALUES = [
    [0.1 + 0.2, 5e-324, -0.0, math.inf, -math.inf, 2**63 + 1, -(2**64)],
    {"naïve \U0001f680 \udcff": ["\x00\n", None, True, ""], "": {}},
    list(range(40_000)),
    None,
]


def pickles_in(path: Path) -> set[str]:
    """Modules and functions that pickle, which a file names."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names} & MODULES
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.module or "").split(".")[0]} & MODULES
            found |= {alias.name for alias in node.names} & PICKLING
        elif isinstance(node, ast.Attribute):
            found |= {node.attr} & PICKLING
    return found


@pytest.mark.slow
def test_nothing_pickles_but_the_files_that_say_why():
    folders = ("checkpoint", "configs", "models", "parallelisms", "scripts", "trainer")
    files = [ROOT / "train.py", *(path for folder in folders for path in (ROOT / folder).rglob("*.py"))]
    found = {path.relative_to(ROOT).as_posix(): names for path in files if (names := pickles_in(path))}
    assert found.keys() == HARMLESS.keys()
    assert found.pop("scripts/proving/equal.py") == {"all_gather_object"}
    assert all(names == {"pickle"} for names in found.values())


def gathered():
    told = gather(VALUES[dist.get_rank()])
    of_first = on_rank_zero(None, lambda: VALUES[0])
    nans = gather(math.nan)
    return told, of_first, [math.isnan(x) for x in nans], [math.copysign(1, x[2]) for x in told[:1]]


@pytest.mark.slow
def test_values_of_all_sizes_arrive_as_they_were(ranks):
    assert ranks(4, gathered) == [(VALUES, VALUES[0], [True] * 4, [-1.0])] * 4


def failing(kind: str):
    def action():
        if kind == "set":
            return {1, 2}  # what is not JSON ends all ranks, and leaves none waiting
        if kind == "missing":
            return (Path("/nowhere") / "file").read_text()
        raise {"damaged": Damaged("a file is short"), "division": ZeroDivisionError("division by zero")}[kind]

    try:
        on_rank_zero(None, action)
    except Exception as error:
        return type(error).__name__, str(error), getattr(error, "errno", None)
    return None


@pytest.mark.parametrize(
    ("kind", "first", "other", "said"),
    [
        ("damaged", "Damaged", "Damaged", "a file is short"),
        ("missing", "FileNotFoundError", "FileNotFoundError", "/nowhere/file"),
        ("division", "ZeroDivisionError", "RuntimeError", "division by zero"),
        ("set", "TypeError", "RuntimeError", "not JSON serializable"),
    ],
)
def test_an_error_of_one_rank_is_raised_on_all(ranks, kind, first, other, said):
    told = ranks(2, failing, kind)
    assert [name for name, *_ in told] == [first, other]
    assert all(said in text for _, text, _ in told)
    assert {number for *_, number in told} == {errno.ENOENT if kind == "missing" else None}


@pytest.mark.parametrize(
    "error",
    [
        BucketError(errno.EACCES, "the server refuses the access key", "s3://runs/debug"),
        PermissionError(errno.EACCES, "Permission denied", "/runs/debug"),
        OSError("no number"),
    ],
)
def test_an_error_of_the_system_arrives_with_its_type_and_text(error):
    told = error_of(json.loads(json.dumps(error_as_json(error))))
    assert (type(told), told.errno, told.filename) == (type(error), error.errno, error.filename)
    assert str(error) in str(told)


def test_an_error_of_the_system_that_is_made_in_another_way_arrives_as_one():
    told = error_of(error_as_json(HTTPError("http://host", 404, "not found", {}, None)))
    assert type(told) is OSError
    assert "404" in str(told)


def test_only_errors_of_keel_and_of_the_system_are_made_from_what_was_told():
    assert type(error_of(error_as_json(ConfigError("x")))) is ConfigError
    assert type(error_of(["SystemExit", "1"])) is RuntimeError
    assert str(error_of(["eval", "1+1"])) == "eval: 1+1"
