"""Places in object storage: names such as s3://bucket/run, and the folders on this host that stand for them."""

import re
from pathlib import Path

SCHEMES = ("s3", "gs", "az")
COPIES = Path("runs/copies")
"""Where commands keep their copies of what is in object storage."""
_URL = re.compile(rf"({'|'.join(SCHEMES)})://([A-Za-z0-9][A-Za-z0-9._-]*)((?:/[A-Za-z0-9._=+,-]+)*)/?")


def is_url(name: str | Path | None) -> bool:
    """Whether a name is of a place in object storage, well-formed or not."""
    return re.match(r"[A-Za-z][A-Za-z0-9+.-]*://", str(name or "")) is not None


def url_fault(name: str) -> str | None:
    """What is wrong with the name of a place in object storage; None if nothing is."""
    found = _URL.fullmatch(name)
    if "@" in name or "?" in name:
        return "a name holds no credentials and no options; they come from the environment (docs/buckets.md)"
    if not found or any(part in (".", "..") for part in found[3].split("/")):
        return f"a place in object storage is {' or '.join(f'{scheme}://' for scheme in SCHEMES)} with BUCKET/NAME"
    return None if found[3] else "it names a whole bucket; add a name in it, as in s3://bucket/run"


def standing_for(name: str | Path) -> Path:
    """The path on this host of what a config or a command names; of a place in object storage, where its copy is.

    Raises:
        ValueError: as in `local_folder`.
    """
    return COPIES.joinpath(*local_folder(str(name)).parts[1:]) if is_url(name) else Path(name)


def local_folder(url: str) -> Path:
    """The folder on this host that stands for a place in object storage: runs/s3/bucket/run for s3://bucket/run.

    Raises:
        ValueError: the name is no such place.
    """
    if not (found := _URL.fullmatch(url)):
        raise ValueError(url_fault(url))
    return Path("runs", found[1], found[2], *found[3].strip("/").split("/"))
