"""The size of the code a reader has to know, by room: lines with code, without blank lines, comments and docstrings.

A file belongs to the room that names it, or else the nearest folder above it. What remains of models, techniques,
trainer and checkpoints is the training path: all that computes, feeds and saves a step, on any mesh. `python -m
tests.walk` measures how much of each room a plain job runs.
"""

import ast
import io
import tokenize
from functools import cache
from pathlib import Path

import pytest

from tests.conftest import ROOT

TRAINING_PATH = "the training path"
ROOMS = {  # room: (code lines at most, its folders and files)
    TRAINING_PATH: (6000, "train.py models parallelisms trainer checkpoint"),
    # Every job passes through these, beside its steps.
    "job files: schema, reading, checks": (2365, "configs"),
    "what each process does first": (30, "configs/process.py"),
    "what a job's paths lead to": (75, "configs/paths.py"),
    "what guards a run": (1700, "trainer/guards parallelisms/guards"),
    "what protects checkpoints": (510, "checkpoint/{safe_read,verify,pin,room,lock,bits}.py"),
    "estimates": (985, "trainer/planning"),
    "reports": (1230, "trainer/report trainer/announce.py"),
    "the kernels of the optimizer and of attention": (
        640,
        "trainer/kernels parallelisms/part.py parallelisms/attention/backend.py",
    ),
    # A job asks for these by a key, or a person by a command.
    "text, and token files of it": (1660, "trainer/data/text trainer/data/packing.py trainer/preparation.py"),
    "tokenizers": (340, "trainer/data/{tokenizer,hf_tokenizer}.py"),
    "checkpoints in other formats": (
        1240,
        "checkpoint/export checkpoint/{compare,tensor_stream}.py trainer/{exports,by_products}.py",
    ),
    "what judges a model": (530, "trainer/validation.py trainer/evaluation scripts/evaluate.py"),
    "sampling": (540, "trainer/sampling scripts/sample.py"),
    "details of a step": (170, "trainer/details.py parallelisms/details.py"),
    "sinks of a run's records": (460, "trainer/report/sinks"),
    "how much is recomputed": (200, "trainer/planning/least_recomputation.py"),
    "copies that a single rank computes with": (100, "parallelisms/compute_copies.py"),
    "fast paths of communication": (80, "parallelisms/symmetric_memory.py"),
    "matrix products in 8 bits": (
        230,
        "parallelisms/float8.py configs/float8.py configs/checks/float8.py trainer/planning/float8.py",
    ),
    "sums and updates whose bits no mesh changes": (
        205,
        "parallelisms/{exact_reduction,exact_numbers}.py trainer/kernels/padded.py",
    ),
    "hosts that are lost and join": (270, "{configs,trainer}/elastic.py checkpoint/{incarnation,takeover}.py"),
    "run folders that hosts do not share": (290, "checkpoint/run_folders.py"),
    "copies of the state in memory": (
        490,
        "checkpoint/{memory_copies,exchange}.py configs/checks/elastic.py trainer/planning/memory_copies.py",
    ),
    "replay and proof of a run": (
        660,
        "trainer/proof parallelisms/guards/fingerprint.py checkpoint/seals.py",
    ),
    "which step trains on what": (280, "trainer/microscope"),
    "paired experiments": (640, "trainer/comparison scripts/{compare,score}.py"),
    "the page of runs": (1250, "scripts/page scripts/{report,runs}.py"),
}
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def code_line_numbers(path: Path) -> set[int]:
    """Numbers of the lines with code."""
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {n for t in tokens if t.type not in NOT_CODE for n in range(t.start[0], t.end[0] + 1)} - docstrings


def places(names: str) -> list[str]:
    """Folders and files; "a/{b,c}.py" stands for two."""
    found = []
    for name in names.split():
        before, _, rest = name.partition("{")
        inside, _, after = rest.partition("}")
        found += [f"{before}{each}{after}" for each in inside.split(",")]
    return found


PLACES = {place: room for room, (_, names) in ROOMS.items() for place in places(names)}


def room_of(path: Path) -> str | None:
    """The room of a file; None: it is in none, as the scripts are."""
    name = path.relative_to(ROOT)
    return next((PLACES[str(each)] for each in (name, *name.parents) if str(each) in PLACES), None)


@cache
def sizes() -> dict[str, dict[str, int]]:
    """Code lines of each file, by room."""
    found: dict[str, dict[str, int]] = {room: {} for room in ROOMS}
    for folder in ("configs", "models", "parallelisms", "trainer", "checkpoint", "scripts"):
        for path in (ROOT / folder).rglob("*.py"):
            if (room := room_of(path)) is not None:
                found[room][str(path.relative_to(ROOT))] = len(code_line_numbers(path))
    found[TRAINING_PATH]["train.py"] = len(code_line_numbers(ROOT / "train.py"))
    return found


def test_every_place_is_in_one_room():
    named = [place for _, names in ROOMS.values() for place in places(names)]
    assert sorted(PLACES) == sorted(named)
    assert not [place for place in named if not (ROOT / place).exists()]


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_stays_within_its_size(room):
    largest = sorted(sizes()[room].items(), key=lambda item: -item[1])
    assert sum(sizes()[room].values()) <= ROOMS[room][0], largest[:10]
