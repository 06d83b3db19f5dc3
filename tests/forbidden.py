"""Folders that this process may not read: not by chmod, which does not stop root."""

import errno
import os
from pathlib import Path


def refuse_to_list(folder, monkeypatch):
    """Fail to list a folder, as if its permissions did not allow it."""
    for name in ("scandir", "listdir"):
        monkeypatch.setattr(os, name, _refusing(getattr(os, name), lambda path: Path(path) == folder))


def refuse_in(folder, monkeypatch):
    """Fail to look at the paths in a folder, as if it might not be entered."""
    monkeypatch.setattr(os, "stat", _refusing(os.stat, lambda path: Path(path).parent == folder))


def _refusing(real, is_forbidden):
    def call(path, **options):
        if not isinstance(path, int) and is_forbidden(path):
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(path, **options)

    return call
