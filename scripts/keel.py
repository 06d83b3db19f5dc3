"""The command `keel`: the first word chooses a command, which parses the other words."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from typing import NoReturn

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

VERSION = "0.1.0"

_SCRIPTS = {
    "plan": ("plan", "check whether a job fits before requesting machines"),
    "tokenizer": ("train_tokenizer", "train a SentencePiece tokenizer"),
    "prepare": ("prepare_data", "turn text into token files"),
    "data": ("data", "show what a step trains on, and which steps train on a text"),
    "sample": ("sample", "continue texts with a trained model"),
    "checkpoint": ("checkpoint", "inspect, verify, compare and prune checkpoints"),
    "export-hf": ("export_hf", "export a checkpoint's model to Hugging Face format"),
    "import-hf": ("import_hf", "import a Hugging Face model as a checkpoint"),
    "export-optimizer": ("export_optimizer", "export a checkpoint's optimizer state for plain torch"),
    "import-optimizer": ("import_optimizer", "import a plain torch optimizer's state into a checkpoint"),
    "benchmark": ("benchmark", "measure speed"),
    "parity": ("parity", "prove that the mesh does not change the run"),
}
"""The module in scripts/ of each command, and what it does."""
_QUESTIONS = {"--help", "-h", "--validate", "--print-config"}
"""Words of `keel train` that start no ranks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"keel {VERSION}")
        return 0
    if name != "train" and name not in _SCRIPTS:
        near = get_close_matches(name, ["train", *_SCRIPTS], 1)
        advice = f"did you mean keel {near[0]}?" if near else "keel --help lists all commands"
        print(f"keel {name}: no such command; {advice}", file=sys.stderr)
        return 2
    sys.argv = [f"keel {name}", *words]
    if name == "train":
        _train(words)
    run: Callable[[], int] = import_module(f"scripts.{_SCRIPTS[name][0]}").main
    return run()


def _help() -> str:
    summaries = {"train": "train a model in one process, or in N with --ranks N"}
    summaries |= {name: summary for name, (_, summary) in _SCRIPTS.items()}
    return "\n".join(
        [
            "usage: keel COMMAND ...   (keel COMMAND --help describes a command)",
            "",
            *(f"  {name:18s}{summary}" for name, summary in summaries.items()),
            "",
            "  --version         print Keel's version",
        ]
    )


def _train(words: list[str]) -> NoReturn:
    """Train like train.py: in this process, or under torchrun with the given number of ranks."""
    import train

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks", type=int)
    options, words = parser.parse_known_args(words)
    ranks = options.ranks
    if ranks is not None and ranks < 1:
        parser.error(f"argument --ranks: {ranks} is not at least 1")
    if words and not words[0].startswith("-"):
        words = ["--config", *words]
    if ranks is not None and not _QUESTIONS & set(words):
        program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks), train.__file__]
        os.execv(sys.executable, [*program, *words])
    if ranks is not None:
        os.environ["WORLD_SIZE"] = str(ranks)
    sys.argv[1:] = words
    train.end_process(train.main())


if __name__ == "__main__":
    sys.exit(main())
