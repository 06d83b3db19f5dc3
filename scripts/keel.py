"""The command `keel`: the first word chooses a command, which parses the other words."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from secrets import token_hex
from typing import NoReturn

if not __package__:  # run as a file, or by another script that is
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    import scripts.silent_interrupts  # noqa: F401 - until `end` takes it back

from configs.secret import SECRET
from scripts.command import end, positive, without_overrides
from scripts.launcher import run_ranks, torchrun_line
from trainer.lifecycle import LAUNCHER

VERSION = "0.1.0"

_SCRIPTS = {
    "tokenizer": ("train_tokenizer", "train a SentencePiece tokenizer"),
    "prepare": ("prepare_data", "turn text into token files"),
    "plan": ("plan", "check whether a job fits before requesting machines"),
    "runs": ("runs", "list runs: state, step, loss, speed"),
    "report": ("report", "show runs as one page: curves, samples, and what they say in words"),
    "sample": ("sample", "continue texts with a trained model"),
    "evaluate": ("evaluate", "run tasks of lm-eval on a trained model"),
    "score": ("score", "compute the loss of each validation sequence"),
    "compare": ("compare", "train two configs or more with the same seeds, and compare them"),
    "coordinates": ("coordinates", "show whether a learning rate holds at other widths, with muP and without"),
    "ladder": ("ladder", "predict a job's loss from smaller runs"),
    "fork": ("fork", "begin another run at a checkpoint of a run, with other keys or data"),
    "data": ("data", "show what a step trains on, and which steps train on a text"),
    "replay": ("replay", "compute steps again, and compare them with what the run recorded"),
    "reproduce": ("reproduce", "let others compute steps of a run again, from one small file"),
    "checkpoint": ("checkpoint", "inspect, verify, compare and prune checkpoints"),
    "export": ("export_hf", "export a checkpoint's model to Hugging Face format, or its optimizer state"),
    "import": ("import_hf", "import a Hugging Face model as a checkpoint"),
    "benchmark": ("benchmark", "measure speed"),
    "prove": ("prove", "prove that each parallelism computes what one process computes, for a job's model"),
    "parity": ("parity", "compare a table of meshes with one process"),
}
"""The module in scripts/ of each command, and what it does."""
_QUESTIONS = {"--help", "-h", "--validate", "--print-config"}
"""Words of `keel train` that start no ranks."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    name, *words = [*(sys.argv[1:] if arguments is None else arguments)] or ["--help"]
    if name == "help" and words:
        name = words[0]
        words = ["--help"]
    if name in ("-h", "--help", "help"):
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
    command: Callable[[], int] = import_module(f"scripts.{_SCRIPTS[name][0]}").main
    return command()


def _help() -> str:
    summaries = {"train": "train a model: keel train JOB [--ranks N]"}
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


def _nodes(text: str) -> str:
    """A number of hosts, or the fewest and the most of an elastic job: "4", "1:4"."""
    numbers = [positive(part) for part in text.split(":")]
    if len(numbers) > 2 or numbers != sorted(numbers):
        raise argparse.ArgumentTypeError(f'expected a number of hosts (4) or a range (1:4), got "{text}"')
    return text


def _train(words: list[str]) -> NoReturn:
    """Train like train.py: in this process, or on several ranks of this host."""
    import train

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--ranks", type=positive)
    parser.add_argument("--nodes", type=_nodes)
    options, words = parser.parse_known_args(words)
    own, overrides = without_overrides(words)
    if own and not own[0].startswith("-"):
        words = ["--config", *own, *overrides]
    is_question = bool(_QUESTIONS & set(words))
    if options.nodes and options.ranks is None:
        parser.error("--nodes N needs --ranks R, the number of ranks on each of the N hosts")
    if options.nodes and not is_question:
        print(torchrun_line(train.__file__, words, options.ranks, options.nodes))
        elastic = "RENDEZVOUS_HOST runs scripts/launch/rendezvous.py (docs/stopping.md)."
        where = elastic if ":" in options.nodes else "FIRST_HOST is the name of one of them."
        print(f"# Start this on each host, with the same JOB_ID; {where}", file=sys.stderr)
        print(f"# Before it, on each host: export {SECRET}={token_hex(32)} (docs/stopping.md)", file=sys.stderr)
        train.end_process(0)
    os.environ.setdefault(LAUNCHER, "keel train")
    if options.ranks and options.ranks > 1 and not is_question:
        train.end_process(run_ranks(train.__file__, words, options.ranks))
    if options.ranks:
        most_hosts = int((options.nodes or "1").split(":")[-1])
        os.environ["WORLD_SIZE"] = str(options.ranks * most_hosts)
    sys.argv[1:] = words
    train.end_process(train.main())


def run() -> NoReturn:
    """Run the command line to its end as this process: the entry point of the installed command."""
    end(main)


if __name__ == "__main__":
    run()
