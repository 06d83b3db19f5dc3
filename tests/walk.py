"""The code that a plain job runs: python -m tests.walk

Two launches of llama_7b.toml in small, on two ranks on the CPU: FSDP, selective activation checkpointing, compiled
blocks, token files, checkpoints in the background, and a resume from one. Each rank notes the functions that it calls.
What counts is their code lines, and those of their files outside of functions: what someone must read who follows such
a job through all that it does. The table has a line for each folder.
"""

import ast
import json
import os
import runpy
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

from tests.code_lines import ROOT, code_line_numbers

SMALL = (
    "--model.dim 64 --model.n_layers 2 --model.n_heads 4 --model.ffn_dim 128 --model.vocab_size 500 --job.device cpu"
    " --training.seq_len 32 --training.global_batch_size 8 --training.micro_batch_size 2 --checkpoint.interval 2"
    " --metrics.interval 1"
)
Function = tuple[str, int]
"""A file, and the line of a `def` or of its first decorator; 0: outside of functions."""


def note_calls(output: Path) -> None:
    """Run train.py as the main program, with the command line's other words; write the functions called to `output`."""
    called: set[Function] = set()

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(f"{ROOT}/"):
            called.add((code.co_filename, code.co_firstlineno if code.co_flags & 2 else 0))

    os._exit = sys.exit  # type: ignore[assignment]  # which train.py calls at its end
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
    finally:
        sys.setprofile(None)
        output.with_suffix(f".{os.environ['RANK']}").write_text(json.dumps(sorted(called)))


def walked_lines(path: Path, called: set[int]) -> int:
    """Code lines of a file in the functions that begin on the lines `called`, and outside of functions."""
    owner: dict[int, int] = {}

    def visit(node: ast.AST, function: int) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            function = min([node.lineno, *(each.lineno for each in node.decorator_list)])
        if isinstance(node, ast.stmt):
            owner.update(dict.fromkeys(range(node.lineno, (node.end_lineno or 0) + 1), function))
        for child in ast.iter_child_nodes(node):
            visit(child, function)

    visit(ast.parse(path.read_text()), 0)
    return sum(owner.get(line, 0) in called | {0} for line in code_line_numbers(path))


def launch(folder: Path, words: str) -> set[Function]:
    """Train on two ranks; returns the functions that they called."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m"]
    command += ["tests.walk", str(folder / "called"), "--config", "llama_7b.toml", *SMALL.split(), *words.split()]
    # What is compiled is not called; with Dynamo off, Keel does the same, and the functions run as they are.
    environment = os.environ | {"OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    subprocess.run(command, check=True, cwd=ROOT, stdout=sys.stderr, env=environment)
    return {(file, line) for rank in "01" for file, line in json.loads((folder / f"called.{rank}").read_text())}


def write_data(folder: Path) -> str:
    """Make a tokenizer and a token file; returns the keys that name them."""
    from trainer.data.text.token_writer import TokenFileWriter
    from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

    text = (ROOT / "README.md").read_text().splitlines()
    train_sentencepiece(iter(text), folder / "own.model", 500)
    (folder / "tokens").mkdir()
    with TokenFileWriter(folder / "tokens" / "00000.tokens", 500, load_tokenizer(folder / "own.model").hash) as file:
        file.append([number % 500 for number in range(100_000)])
    source = f'[{{name="text",kind="tokens",path="{folder}/tokens"}}]'
    return f"--tokenizer.path {folder}/own.model --data.sources {source} --job.output_dir {folder}/run"


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name:
        words = write_data(Path(name))
        called = launch(Path(name), f"{words} --training.steps 4")
        called |= launch(Path(name), f"{words} --training.steps 6")
    by_file: dict[Path, set[int]] = {}
    for file, line in called:
        by_file.setdefault(Path(file), set()).add(line)
    walked, files = Counter[str](), Counter[str]()
    for path, lines in by_file.items():
        folder = "/".join(path.relative_to(ROOT).parts[:-1][:2]) or path.name
        walked[folder] += walked_lines(path, lines)
        files[folder] += 1
    print("| folder | files | code lines that the job runs |\n|---|---|---|")
    for folder, n in walked.most_common():
        print(f"| {folder} | {files[folder]} | {n:,} |")
    print(f"| in all | {files.total()} | {walked.total():,} |")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        output = Path(sys.argv.pop(1))
        note_calls(output)
    else:
        main()
