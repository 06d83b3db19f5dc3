"""Continue texts with a trained model: scripts/sample.py MODEL [PROMPT ...]

MODEL is a run folder (its newest checkpoint, or that of --step), a checkpoint saved on any mesh, or a Hugging Face
folder. Without a prompt, texts start as documents do. The texts go to standard output, word by word; everything else
to standard error. The same command prints the same texts.
"""

import argparse
import math
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if not __package__:  # run as a file
    import keel  # noqa: F401 - Keel's packages come first

from checkpoint.find import find_model
from configs.errors import UserError
from configs.files import whole
from configs.untrusted import printable
from scripts.command import (
    add_computing_arguments,
    check_computing_arguments,
    end,
    not_negative,
    number_of,
    parser_of,
    place_argument,
    positive,
    run_command,
)
from trainer.report.console import Console
from trainer.report.units import count

if TYPE_CHECKING:
    from scripts.sampling.load import Trained

SEPARATOR = "\n---\n"
"""Line between two texts."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the sampling; returns the exit code."""
    options = _parser().parse_intermixed_args(arguments)

    def work(console: Console) -> None:
        find_model(options.model, options.step)  # a wrong path costs no import of torch
        check_computing_arguments(options)
        prompts = _prompts(options)
        from scripts.sampling.load import load_trained

        trained = load_trained(options.model, options.step, options.device, options.dtype, options.tokenizer)
        n_parameters = sum(parameter.numel() for parameter in trained.model.parameters())
        dtype = str(trained.dtype).removeprefix("torch.")
        console.line(f"{trained.folder}: {count(n_parameters)} parameters, {dtype}, on {trained.device.type}")
        _sample(trained, prompts, options, console)

    try:
        return run_command(work, "stopped", out=sys.stderr)
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # else the interpreter's last flush fails
        return 0


def _sample(trained: "Trained", prompts: list[str], options: argparse.Namespace, console: Console) -> None:
    from scripts.sampling.cache import CachedModel
    from scripts.sampling.draw import Distribution, generators
    from scripts.sampling.generate import generate
    from scripts.sampling.text import prompt_tokens
    from trainer.data.text.fill_in import fim_tokens

    if options.suffix is not None:
        fim_tokens(trained.tokenizer, "leave out --suffix, since a model fills in only what it was trained with")
    tokens = []
    for number, prompt in enumerate(prompts, 1):
        try:
            encoded = prompt_tokens(trained.tokenizer, prompt, options.suffix)
        except UserError as error:
            raise UserError(f"prompt {number} {error}") from None
        room = trained.seq_len
        kept = encoded
        if len(encoded) >= room and options.suffix is not None:
            raise UserError(
                f"prompt {number} has {len(encoded)} tokens with the suffix, and the model's seq_len is {room}; give "
                "less text around the gap"
            )
        if len(encoded) >= room:
            kept = encoded[-max(room - options.max_tokens, room // 2) :]
            console.warning(
                f"prompt {number} has {len(encoded)} tokens, and the model's seq_len is {room}; it reads the last "
                f"{len(kept)}, so that there is room to continue"
            )
        tokens.append(kept)
    n_tokens = trained.tokenizer.vocab_size
    distribution = Distribution(options.temperature, options.top_k, options.top_p, n_tokens)
    randomness = generators(options.seed, len(prompts))
    model = CachedModel(trained.model, trained.device)
    texts = _Texts(trained, prompts, tokens, options.suffix)
    started = time.perf_counter()
    for first in range(0, len(prompts), options.batch_size):
        batch = slice(first, first + options.batch_size)
        steps = generate(
            model,
            tokens[batch],
            options.max_tokens,
            trained.seq_len,
            distribution,
            randomness[batch],
            trained.tokenizer.eos_id,
        )
        for step in steps:
            texts.push(first, step)
        texts.end(first, len(tokens[batch]))
    seconds = time.perf_counter() - started
    n_full = sum(len(each) == trained.seq_len for each in texts.tokens)
    if n_full:
        of = f"{n_full} of {len(prompts)} texts" if len(prompts) > 1 else "the text"
        console.line(f"{of} ended at the model's seq_len, {trained.seq_len} tokens")
    speed = f"{texts.n_new / seconds:,.0f} tokens/s"
    console.line(f"{texts.n_new:,} tokens in {seconds:.2f} s, prompts included: {speed}")


class _Texts:
    """Prints texts in the order of their prompts, each as it grows: the first unfinished one; later ones wait."""

    def __init__(self, trained: "Trained", prompts: list[str], tokens: list[list[int]], suffix: str | None) -> None:
        from scripts.sampling.text import TextStream

        is_gap = suffix is not None  # what fills it was encoded as a text of its own, so it is decoded as one
        self.tokens = [list(each) for each in tokens]
        """Tokens of each text, the prompt's included."""
        self.n_new = 0
        self._streams = [TextStream(trained.tokenizer, [] if is_gap else each) for each in tokens]
        self._waiting = list(prompts)
        """The part of each text that was not printed yet."""
        self._ended = [False] * len(prompts)
        self._suffix = suffix or ""
        self._current = 0
        self._eos_id = trained.tokenizer.eos_id
        self._is_terminal = sys.stdout.isatty()

    def push(self, first: int, step: Sequence[int | None]) -> None:
        """Add a token to each text from `first` on; None to one that has ended."""
        for number, token in enumerate(step, first):
            if token is None:
                continue
            self.n_new += 1
            self.tokens[number].append(token)
            self._waiting[number] += self._streams[number].push(token)
            if token == self._eos_id:
                self._end(number)
        self._print()

    def end(self, first: int, n: int) -> None:
        """End the `n` texts from `first` on."""
        for number in range(first, first + n):
            self._end(number)
        self._print()

    def _end(self, number: int) -> None:
        if not self._ended[number]:
            self._ended[number] = True
            self._waiting[number] += self._streams[number].end() + self._suffix

    def _print(self) -> None:
        while self._current < len(self._waiting):
            text = self._waiting[self._current]
            self._waiting[self._current] = ""
            sys.stdout.write(printable(text) if self._is_terminal else text)
            if not self._ended[self._current]:
                break
            self._current += 1
            sys.stdout.write(SEPARATOR if self._current < len(self._waiting) else "\n")
        sys.stdout.flush()


def _prompts(options: argparse.Namespace) -> list[str]:
    """The prompts of the command line and of --file.

    Raises:
        UserError: the file can't be read.
    """
    prompts = list(options.prompt)
    if options.file is not None:
        is_input = str(options.file) == "-"
        name = "standard input" if is_input else str(options.file)
        try:
            text = (sys.stdin.buffer.read() if is_input else options.file.read_bytes()).decode()
        except OSError as error:
            raise UserError(f"{name if is_input else whole(name)} can't be read: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise UserError(f"{name} is not valid UTF-8 (at byte {error.start}); convert it") from None
        lines = text.split("\n")
        prompts += lines[:-1] if lines[-1] == "" else lines
        if not lines[:-1] and not text:
            raise UserError(f"{name} is empty; give a prompt on each line")
    return prompts or [""]


def _parser() -> argparse.ArgumentParser:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("model", type=place_argument, metavar="MODEL", help="run folder, checkpoint or Hugging Face folder")
    add("prompt", nargs="*", default=[], metavar="PROMPT", help="text to continue; several are computed as a batch")
    add("--file", type=Path, metavar="FILE", help="also continue each line of this file; -: of standard input")
    add("--suffix", metavar="TEXT", help="write what stands between a prompt and this text (fill in the middle)")
    add("--step", type=int, metavar="N", help="the run's checkpoint of this step (default: the newest)")
    add("--max-tokens", type=positive, default=200, metavar="N", help="new tokens per text (default: %(default)s)")
    add(
        "--temperature",
        type=number_of(lambda t: 0 <= t < math.inf, "a number of at least 0"),
        default=0.8,
        metavar="T",
        help="0: always the most likely token; 1: the model's own distribution (default: %(default)s)",
    )
    add("--top-k", type=positive, metavar="K", help="draw from the K most likely tokens only (default: all)")
    add(
        "--top-p",
        type=number_of(lambda p: 0 < p <= 1, "above 0 and at most 1"),
        default=1.0,
        metavar="P",
        help="draw from the fewest tokens with this share of the probability (default: %(default)s, all)",
    )
    add("--seed", type=not_negative, default=0, metavar="N", help="another seed draws other texts (default: 0)")
    add("--batch-size", type=positive, default=16, metavar="N", help="texts computed at once (default: %(default)s)")
    add_computing_arguments(parser)
    return parser


if __name__ == "__main__":
    end(main)
