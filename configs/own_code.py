"""Code of the user's own, which a job names by an import path such as "my_package.my_model:MyModel".

It enters through one door: `configs.load.load` calls `admit` for each import path in a job file or on the command line.
All that uses such code asks `code_of`, which imports nothing. So a name in a checkpoint's or a run folder's stored
config runs no code.
"""

import os
import re
import sys
import traceback
from collections.abc import Iterable
from importlib import import_module
from inspect import signature
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from configs.errors import ConfigError, UserError

EXAMPLE = "module:Class"
_PATTERN = r"^[\w.]+:\w+$"
ImportPath = Annotated[str, Field(pattern=_PATTERN, examples=[EXAMPLE])]
"""A module and what it has, of the user's own."""

_admitted: dict[str, Any] = {}


def is_import_path(name: object) -> bool:
    """Whether the value of a key names the user's own code, and nothing of Keel's."""
    return isinstance(name, str) and re.match(_PATTERN, name) is not None


def look_in(folders: Iterable[Path]) -> None:
    """Let imports look into these folders, too, after all others."""
    for folder in map(os.path.abspath, folders):
        if folder not in sys.path:
            sys.path.append(folder)


def admit(path: str, key: str) -> Any:
    """Import what a job's key names.

    Raises:
        UserError: the module can't be imported, or has no such function or class.
    """
    module, _, attribute = path.partition(":")
    look_in([Path.cwd()])
    try:
        found = getattr(import_module(module), attribute, None)
    except (Exception, SystemExit) as error:
        raise UserError(
            f'{key} is "{path}", and {module} can\'t be imported ({reason_of(error)}); Keel looks for it on PYTHONPATH '
            "and beside the job file, in the current folder and among installed packages, and its own packages, such "
            "as models, come first"
        ) from None
    if not callable(found):
        what = "function or class" if attribute[:1].islower() else "class"
        raise UserError(f'{key} is "{path}", but {module} has no {what} {attribute}')
    _admitted[path] = found
    return found


def is_admitted(path: str) -> bool:
    """Whether a job of this process named this code."""
    return path in _admitted


def code_of(path: str) -> Any:
    """What an import path names, which a job of this process has named, too.

    Raises:
        ConfigError: none has.
    """
    if path not in _admitted:
        raise ConfigError(
            f'"{path}" is code of a job\'s own, and Keel runs no code that a checkpoint or a run folder names; name it '
            "yourself: in the job file, or on the command line by the key that has it, as in --model.architecture "
            f"{EXAMPLE}"
        )
    return _admitted[path]


def takes(path: str, parameter: str) -> bool:
    """Whether the class or function that an import path names has this parameter; raises as `code_of`."""
    return parameter in signature(code_of(path)).parameters


def reason_of(error: BaseException) -> str:
    """What the user's code raised, and in which of its lines."""
    frames = [each for each in traceback.extract_tb(error.__traceback__) if _is_users(each.filename)]
    where = f" in {frames[-1].filename}:{frames[-1].lineno}" if frames else ""
    return f"{type(error).__name__}: {error}".partition("\n")[0] + where


_LIBRARIES = (str(Path(__file__).resolve().parents[1]), sys.prefix, sys.base_prefix, "<")


def _is_users(file: str) -> bool:
    return not file.startswith(_LIBRARIES) and "site-packages" not in file
