"""Folders that this process may not read: not by chmod, which does not stop root."""

import errno
import os
from pathlib import Path


def refuse_to_list(folder, monkeypatch):
    """Fail to list a folder, as if its permissions did not allow it."""
    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, _refusing(getattr(os, name), lambda path: Path(path) == folder))


def refuse_in(folder, method, monkeypatch):
    """Fail in a method of the paths in a folder, as if it might not be entered."""
    monkeypatch.setattr(Path, method, _refusing(getattr(Path, method), lambda path: path.parent == folder))


def _refusing(real, is_forbidden):
    def call(path):
        if is_forbidden(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path)

    return call
