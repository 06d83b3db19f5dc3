"""The size of the code a reader has to know, by part: lines with code, without blank lines, comments and docstrings."""

import ast
import io
import tokenize
from pathlib import Path

import pytest

from tests.conftest import ROOT

PARTS = {
    # part: (its files and folders, those of them that are other parts, code lines at most)
    "the training path": (
        ("train.py", "models", "parallelisms", "trainer", "checkpoint"),
        (
            "guards",
            "planning",
            "report",
            "microscope",
            "sampling",
            "proof",
            "export",
            "evaluation",
            "validation.py",
            "prepare.py",
            "preparation.py",
        )
        + ("text.py", "exports.py", "tokenizer.py", "hf_tokenizer.py", "streaming.py", "compare.py", "tensor_stream.py")
        + ("bad_files.py", "hub.py", "inputs.py", "listing.py", "packing.py", "token_writer.py", "announce.py")
        + (
            "prepared_folder.py",
            "shard.py",
            "comparison",
            "details.py",
            "seals.py",
            "exact_reduction.py",
            "exact_numbers.py",
            "backend.py",
            "elastic.py",
            "incarnation.py",
            "takeover.py",
            "kernels",
            "part.py",
        )
        + ("safe_read.py", "verify.py", "pin.py", "room.py", "lock.py", "compute_copies.py")
        + ("float8.py", "symmetric_memory.py"),
        6000,
    ),
    "what protects checkpoints": (
        tuple(f"checkpoint/{name}.py" for name in ("safe_read", "verify", "pin", "room", "lock")),
        (),
        440,
    ),
    "text to token files": (
        (
            *(f"trainer/data/{name}.py" for name in ("bad_files", "hub", "inputs", "listing", "packing")),
            *(f"trainer/data/{name}.py" for name in ("text", "token_writer", "prepare", "prepared_folder", "shard")),
            "trainer/preparation.py",
        ),
        (),
        1450,
    ),
    "what guards a run": (("trainer/guards", "parallelisms/guards"), ("fingerprint.py",), 1615),
    "what a launch tells": (("trainer/announce.py",), (), 105),
    "job files: schema, reading, checks": (("configs",), ("elastic.py", "float8.py"), 2360),
    "sums whose bits no mesh changes": (
        ("parallelisms/exact_reduction.py", "parallelisms/exact_numbers.py"),
        (),
        180,
    ),
    "hosts that are lost and join": (
        ("configs/elastic.py", "checkpoint/incarnation.py", "checkpoint/takeover.py", "trainer/elastic.py"),
        (),
        220,
    ),
    "the kernels of the optimizer": (("trainer/kernels", "parallelisms/part.py"), (), 510),
    "which step trains on what": (("trainer/microscope",), (), 280),
    "replay and proof of a run": (
        ("trainer/proof", "parallelisms/guards/fingerprint.py", "checkpoint/seals.py"),
        (),
        660,
    ),
    "sampling": (("trainer/sampling", "scripts/sample.py"), (), 540),
    "what judges a model": (("trainer/validation.py", "trainer/evaluation", "scripts/evaluate.py"), (), 520),
    "sinks of a run's records": (("trainer/report/sinks",), (), 460),
    "estimates and reports": (
        ("trainer/planning", "trainer/report"),
        ("step_records.py", "wall_clock.py", "sinks", "least_recomputation.py", "float8.py")
        + ("unknown_names.py", "for_validate.py"),
        1825,
    ),
    "the kernels of attention": (("parallelisms/attention/backend.py",), (), 140),
    "matrix products in 8 bits": (
        ("parallelisms/float8.py", "configs/float8.py", "configs/checks/float8.py", "trainer/planning/float8.py"),
        (),
        230,
    ),
    "fast paths of communication": (("parallelisms/symmetric_memory.py",), (), 80),
    "how much is recomputed": (("trainer/planning/least_recomputation.py",), (), 200),
    "copies that a single rank computes with": (("parallelisms/compute_copies.py",), (), 50),
    "names that only the model knows": (
        ("trainer/planning/unknown_names.py", "trainer/planning/for_validate.py"),
        (),
        50,
    ),
    "the records of a run's steps": (("trainer/report/step_records.py", "trainer/report/wall_clock.py"), (), 200),
    "the page of runs": (("scripts/page", "scripts/report.py", "scripts/runs.py"), (), 1250),
    "paired experiments": (("trainer/comparison", "scripts/compare.py", "scripts/score.py"), (), 640),
    "details of a step": (("trainer/details.py", "parallelisms/details.py"), (), 170),
}
NOT_CODE = (
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
)


def code_lines(path: Path) -> int:
    source = path.read_text()
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings |= set(range(node.lineno, (node.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in NOT_CODE for n in range(t.start[0], t.end[0] + 1)}
    return len(lines - docstrings)


@pytest.mark.parametrize("part", PARTS)
def test_a_part_stays_within_its_size(part):
    places, others, most = PARTS[part]
    files = [
        path for place in places for path in ([ROOT / place] if place.endswith(".py") else (ROOT / place).rglob("*.py"))
    ]
    sizes = {path: code_lines(path) for path in files if not set(path.relative_to(ROOT).parts[1:]) & set(others)}
    assert sum(sizes.values()) <= most, {
        str(path.relative_to(ROOT)): n for path, n in sorted(sizes.items(), key=lambda item: -item[1])[:10]
    }
