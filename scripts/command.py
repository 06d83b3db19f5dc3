"""The shared part of the scripts' command lines: help from the module's docstring, and how a command ends."""

import argparse
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from checkpoint.bucket_files import Put, put_folder, room_for
from checkpoint.bucket_storage import local_copy, with_tensors
from checkpoint.find import find_checkpoint
from configs.errors import ConfigError, KeelError, UserError, files_that_fail
from configs.files import FULL, is_file, is_folder, whole
from configs.own_code import admit
from configs.places import is_url
from configs.process import cannot_print, prepare_streams, require_current_folder, silence_stdout
from configs.reading.overrides import is_override, split_flags
from trainer.guards.fragmentation import let_segments_grow
from trainer.lifecycle import EXIT_PREEMPTED, handling_stops
from trainer.report.console import Console

EXIT_PIPE_CLOSED = 141
"""The exit code by which a shell reports a program that SIGPIPE ends."""
OF_SIGNAL = 128
"""A shell reports a program that a signal ends by this plus the signal's number."""
EXIT_INTERRUPTED = OF_SIGNAL + signal.SIGINT
"""The same of Ctrl-C; `end` makes it that of the signal that has come."""


def parser_of(docstring: str | None, keeps_lines: bool = False) -> argparse.ArgumentParser:
    """Make a parser with help from a module's docstring: a summary, a colon and the usage, then the details."""
    summary, _, details = (docstring or "").partition("\n\n")
    form = argparse.RawDescriptionHelpFormatter if keeps_lines else argparse.HelpFormatter
    return argparse.ArgumentParser(description=summary.partition(":")[0] + ".", epilog=details, formatter_class=form)


def add_text_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say where documents are and how they are read."""
    add = parser.add_argument
    inputs = "file, folder, glob pattern, hub:NAME[:CONFIG][@REVISION][#SPLIT], or python_stdlib"
    add("inputs", nargs="+", metavar="INPUT", help=inputs)
    add(
        "--max-bad-files",
        type=not_negative,
        default=0,
        metavar="N",
        help="unreadable files and lines to allow (default: 0)",
    )
    add(
        "--text-key",
        default="text",
        metavar="K",
        help="field or column that holds the text in files of records (default: %(default)s)",
    )
    add(
        "--separator",
        type=separator,
        default="",
        metavar="S",
        help=r"cut .txt files into documents at each S; \n is a line end, \t a tab",
    )


def add_computing_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that say how a trained model is used: device, dtype and tokenizer."""
    add = parser.add_argument
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: cuda if available")
    add(
        "--dtype",
        choices=("float32", "bfloat16", "float64"),
        help="type of weights and computation (default: the run's training.compute_dtype, or the folder's own)",
    )
    add("--tokenizer", type=Path, metavar="FILE", help="replaces the job's tokenizer.path")
    add(
        "--model.architecture",
        dest="architecture",
        metavar="MODULE:CLASS",
        help="the class of a model of your own, since Keel runs no code that a run folder names",
    )


def check_computing_arguments(options: argparse.Namespace) -> None:
    """Check the tokenizer's file, and import the class of a model of the user's own, if the command line names them.

    Raises:
        UserError: there is no such file, or the class can't be imported.
    """
    if options.tokenizer is not None and not is_file(options.tokenizer):
        raise UserError(f"--tokenizer {options.tokenizer}: no such file: {whole(options.tokenizer)}")
    if options.architecture is not None:
        admit(options.architecture, "--model.architecture")


def separator(text: str) -> str:
    """Parse a separator from a command line, where line ends and tabs are hard to type."""
    return text.replace("\\n", "\n").replace("\\t", "\t")


def without_overrides(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Divide a command line into its own words and those that set a job's keys, `--table.key VALUE`."""
    own: list[str] = []
    overrides: list[str] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        flag, equals, _ = word.partition("=")
        is_key = is_override(flag)
        (overrides if is_key else own).append(word)
        if is_key and not equals and rest and not rest[0].startswith("--"):
            overrides.append(rest.pop(0))
    return own, overrides


def parsed(parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """A command's options, and the words that set a job's keys; `arguments` None: those of this process."""
    own, overrides = without_overrides(sys.argv[1:] if arguments is None else arguments)
    return parser.parse_args(own), overrides


def refuse_keys(overrides: Sequence[str], keys: Iterable[str], reason: str) -> None:
    """Refuse keys that have no effect in a command.

    Args:
        overrides: the words that set a job's keys.
        keys: dotted keys, and tables.
        reason: why they have none, and what to do.

    Raises:
        ConfigError: one of the keys is set.
    """
    beginnings = tuple(f"--{key}." for key in keys)
    refused = [flag for flag, _ in split_flags(overrides) if f"{flag}.".startswith(beginnings)]
    if refused:
        raise ConfigError(f"{', '.join(refused)}: {reason}")


def add_job_argument(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the job, by position or as --config; `job_of` reads it."""
    otherwise = f" (default: {default})" if default else ""
    parser.add_argument("job", nargs="?", metavar="JOB", help=f"job file, or its name in configs/{otherwise}")
    parser.add_argument("--config", metavar="JOB", help="the same, as train.py has it")
    parser.set_defaults(default_job=default)


def job_of(options: argparse.Namespace) -> str:
    """The job that a command line names.

    Raises:
        ConfigError: it names two, or none where one is needed.
    """
    if options.job and options.config:
        raise ConfigError(f"the job is given twice: {options.job} and --config {options.config}; leave one out")
    job: str | None = options.job or options.config or options.default_job
    if job is None:
        raise ConfigError("the job is missing; name a job file, or one of configs/ such as debug.toml")
    return job


def place(text: str) -> Path:
    """The folder that a word of a command line names; of a place in object storage, a local copy that is made now.

    Raises:
        UserError: as in `local_copy`.
    """
    return local_copy(text) if is_url(text) else Path(text)


def place_argument(text: str) -> Path:
    """`place` as the type of an argument."""
    try:
        return place(text)
    except UserError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def folder_argument(text: str) -> Path:
    """A folder on a disk, where a command writes, as the type of an argument."""
    if is_url(text):
        raise argparse.ArgumentTypeError(f"{text}: this command writes into folders of this host's disks only")
    return Path(text)


@contextmanager
def folder_for(output: str, manifest: str, console: Console, put: Put | None = None) -> Iterator[Path]:
    """The folder for a command to create; if `output` is in object storage, its files are put there at the end.

    Args:
        output: a folder or a place.
        manifest: the name of the file that is put last.
        console: shows how far it is.
        put: how each file is put.

    Raises:
        UserError: something is there, or the bucket refuses.
    """
    if not is_url(output):
        yield Path(output)
        return
    folder = room_for(output)
    try:
        yield folder
        with console.progress(f"Putting {output}", in_bytes=True) as report:
            put_folder(folder, output, manifest, report, put)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def require_places(files: Mapping[str, Path | None]) -> None:
    """Check that the files that options name can be written, before minutes of work.

    Raises:
        ConfigError: a file's folder does not exist, or it is a folder itself.
    """
    for flag, file in files.items():
        if file is not None and not is_folder(file.parent):
            raise ConfigError(f"{flag} {file}: there is no folder {whole(file.parent)}; create it, or name another")
        if file is not None and is_folder(file):
            raise ConfigError(f"{flag} {file} is a folder; name a file")


def checkpoint_in(source: Path, console: Console) -> Path:
    """The checkpoint that a command line names, or the newest of the run that it names, which is then printed.

    Raises:
        UserError: there is none.
    """
    found = with_tensors(find_checkpoint(source))
    if found != source:
        console.line(f"taking {found}, the newest checkpoint of {source}")
    return found


def end(main: Callable[[], int]) -> NoReturn:
    """Run a command to its end as this process; a reader that closes its pipe, as `head` does, is no error."""
    prepare_streams()
    stop = _Stop()
    signal.signal(signal.SIGTERM, stop)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # as in the background
        signal.signal(signal.SIGINT, stop)
    let_segments_grow(os.environ)  # a benchmark measures the allocator that training has
    code = EXIT_PIPE_CLOSED
    try:
        require_current_folder()
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        silence_stdout()
    except KeyboardInterrupt:  # before the command's own work: imports take up to a second
        print("error: stopped", file=sys.stderr)
        code = EXIT_INTERRUPTED
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except OSError as error:
        if error.filename is not None or error.errno not in FULL:
            raise
        silence_stdout()
        unwritten = cannot_print(error)
        print(f"error: {unwritten}", file=sys.stderr)
        code = unwritten.exit_code
    except Exception:
        if not stop.first:
            raise
        print("error: stopped", file=sys.stderr)  # in an import, of which a library has made an error of its own
        code = EXIT_INTERRUPTED
    sys.exit(OF_SIGNAL + stop.first if code == EXIT_INTERRUPTED and stop.first else code)


class _Stop:
    """Handles SIGTERM as Ctrl-C, so that a command's processes and temporary files go with it."""

    first = 0
    """The number of the first signal that has come; 0: none has."""

    def __call__(self, number: int, _frame: FrameType | None) -> None:
        if not self.first:
            self.first = number
            self._last_ignored = time.monotonic() + _CLEANING_SECONDS
            raise KeyboardInterrupt
        if time.monotonic() > self._last_ignored:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)


_CLEANING_SECONDS = 1.0
"""How long further signals do not disturb a command that stops, since one may come twice: from a launcher, too."""
_MOST = 10**15 - 1
"""Beyond all steps, bytes and pieces that there can be."""


def positive(text: str) -> int:
    """Parse an integer above 0, as an argument's type.

    Raises:
        argparse.ArgumentTypeError: it is not an integer, or out of range.
    """
    return _whole_number(text, at_least=1)


def not_negative(text: str) -> int:
    """Parse an integer of at least 0, as an argument's type.

    Raises:
        argparse.ArgumentTypeError: it is not an integer, or out of range.
    """
    return _whole_number(text, at_least=0)


def _whole_number(text: str, at_least: int) -> int:
    if text.isdecimal() and len(text.lstrip("0")) > len(str(_MOST)):
        raise argparse.ArgumentTypeError(f"{text} is more than {_MOST:,}")
    if not text.isdecimal() or int(text) < at_least:
        raise argparse.ArgumentTypeError(f"{text} is not a whole number of at least {at_least}")
    return int(text)


def number_of(is_valid: Callable[[float], bool], what: str) -> Callable[[str], float]:
    """The type of an argument that is a number; `what` says which are valid, in the message about others."""

    def parse(text: str) -> float:
        if not is_valid(value := float(text)):
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    parse.__name__ = "float"  # argparse shows it if the text is no number
    return parse


def list_of(kind: Callable[[str], Any], what: str, at_least: int = 2) -> Callable[[str], list[Any]]:
    """The type of an argument that is a list of different values, which it sorts; `what` says which."""

    def parse(text: str) -> list[Any]:
        try:
            values = sorted({kind(part) for part in text.split(",")})
        except (ValueError, argparse.ArgumentTypeError):
            values = []
        if len(values) < at_least:
            raise argparse.ArgumentTypeError(f'expected {at_least} or more {what}; got "{text}"')
        return values

    return parse


def stopping_at_once(remedy: str) -> AbstractContextManager[None]:
    """A context in which a signal to stop ends this process; the message says what to do then.

    An exception could be lost while torch is imported, or in a collective.
    """

    def stop(number: int, _frame: FrameType | None) -> NoReturn:
        if os.environ.get("RANK", "0") == "0":
            print(f"error: stopped by {signal.Signals(number).name}; {remedy}", file=sys.stderr, flush=True)
        os._exit(EXIT_PREEMPTED)

    return handling_stops(stop)


def run_command(
    work: Callable[[Console], int | None], if_stopped: str | Callable[[], str], out: TextIO | None = None
) -> int:
    """Run a script's work with a console; returns the exit code.

    Args:
        work: may return an exit code (None: 0); raises KeelError for what the user can fix.
        if_stopped: message after Ctrl-C, or what gives it then.
        out: where the console prints (default: standard output).
    """
    with Console(out=out) as console:
        try:
            with files_that_fail():
                code = work(console) or 0
            lost = console.output_error
            if isinstance(lost, OSError) and lost.errno in FULL:
                raise cannot_print(lost)
            return code
        except KeelError as error:
            console.error(str(error))
            return error.exit_code
        except KeyboardInterrupt:
            console.error(if_stopped if isinstance(if_stopped, str) else if_stopped())
            return EXIT_INTERRUPTED
