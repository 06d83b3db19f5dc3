"""A forked job whose data takes rank 0 ten minutes to prepare; `begun` says that it is at it."""

import time
from pathlib import Path
from typing import Any

from tests.end_to_end import forked
from trainer import opening


def prepare(*_: Any) -> None:
    """In the place of trainer.preparation's."""
    Path("begun").touch()
    time.sleep(600)


if __name__ == "__main__":
    opening.prepare_data = prepare
    forked.main()
