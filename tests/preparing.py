"""Preparations of text by their choices, as tests write them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from trainer.data.text import prepare as module
from trainer.data.text.prepare import Call, settings_of
from trainer.data.text.workers import Progress


def call_of(
    inputs: Sequence[str],
    output: Path,
    tokenizer: Path,
    processes: int = 1,
    max_bad_files: int = 0,
    progress: Progress = Call.progress,
    **choices: Any,
) -> Call:
    """A call whose further arguments are fields of `Settings`."""
    settings = settings_of(inputs, output, tokenizer, **choices)
    return Call(settings, output, tokenizer, processes, max_bad_files, progress)


def prepare(
    inputs: Sequence[str],
    output: Path,
    tokenizer: Path,
    say: Callable[[str], None] = lambda message: None,
    **options: Any,
) -> dict[str, Any]:
    """Prepare in this process; further arguments as of `call_of`."""
    return module.prepare(call_of(inputs, output, tokenizer, **options), say)
