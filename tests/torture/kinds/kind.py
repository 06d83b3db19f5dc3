"""A kind of file that Keel reads: a real one, how to forge it, and how a run or a script reads it."""

import os
import random
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.lock import LOCK_NAME

ROOT = Path(__file__).parents[3]
TEXT = (ROOT / "README.md").read_text() * 3
SPECIAL = 0.02
"""Share of the mutations that put something in the file's place which is none, or has no end."""
SPARSE_BYTES = 100 << 20
"""Of a text that takes no room on the disk; other files are made so large that they must be refused by their size."""
RESEALED = 0.8
"""Share in which sizes, hashes and seals say the truth about what was forged."""

Mutate = Callable[[bytes, random.Random], bytes]


@dataclass
class Kind:
    """A kind of file."""

    name: str
    make: Callable[[Path], Path]
    """Writes a real one to a folder, with what belongs to it; returns its path."""
    mutate_bytes: Mutate
    read_file: Callable[[Path], str]
    """Reads it as Keel does; returns what is shown of it. Raises: KeelError."""
    after: Callable[[Path], None] = lambda path: None
    """Makes hashes elsewhere fit."""
    path: Path = Path()
    originals: dict[Path, bytes] = field(default_factory=dict)

    def prepare(self, folder: Path) -> None:
        """Make the real one, and see that it is read; in another process, for threads do not survive a fork."""
        child = os.fork()
        if child == 0:
            try:
                path = self.make(folder)
                if self.name != LOCK_NAME:
                    self.read_file(path)
                (folder / "path").write_text(str(path))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        self.path = Path((folder / "path").read_text())
        self.originals = {path: path.read_bytes() for path in self.path.parent.iterdir() if path.is_file()}

    def mutate(self, dice: random.Random) -> int:
        """Put a forged one there; returns its size."""
        self._restore()
        if dice.random() < SPECIAL:
            dice.choice((_fifo, _folder, _device, _sparse, _missing))(self.path)
            return SPARSE_BYTES if self.path.suffix in (".jsonl", ".txt") else 0
        content = self.mutate_bytes(self.originals[self.path], dice)
        self.path.write_bytes(content)
        if dice.random() < RESEALED:
            self.after(self.path)
        return len(content)

    def read(self) -> str:
        """What is shown of it."""
        return self.read_file(self.path)

    def _restore(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            self.path.rmdir()
        else:
            self.path.unlink(missing_ok=True)
        for path, content in self.originals.items():
            path.write_bytes(content)


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def _sparse(path: Path) -> None:
    os.truncate(path, SPARSE_BYTES if path.suffix in (".jsonl", ".txt") else 40 << 30)


def _missing(path: Path) -> None:
    path.unlink()
