"""Debian's packages of real servers, unpacked once into the user's cache folder; nothing is installed."""

import fcntl
import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

RELEASE = "bookworm"
"""Debian 12; the names of programs and settings differ in others."""
TIMEOUT_SECONDS = 300


class Unavailable(Exception):
    """Why this machine can't have a server."""


def unpacked(server: str, *wanted: str) -> Path:
    """The folder with `usr/` of the packages that a server is in, and of what they need.

    Args:
        server: names the folder.
        wanted: the packages.

    Raises:
        Unavailable: no Debian 12, or its archive is not reached.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise Unavailable(f"no {tool}: {server} is taken from Debian's packages")
    if _release() != RELEASE:
        raise Unavailable(f"not Debian {RELEASE}, whose {server} the tests know")
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "keel"
    folder = cache / f"{server}-{RELEASE}-{platform.machine()}"
    with _alone(cache / f"{server}.lock"):
        if not (folder / "complete").exists():
            shutil.rmtree(folder, ignore_errors=True)  # of an attempt that was interrupted
            _download(folder, wanted)
            (folder / "complete").touch()
    return folder


def _release() -> str:
    """The name of this machine's Debian."""
    if not Path("/etc/os-release").exists():
        return "unknown"
    for line in Path("/etc/os-release").read_text().splitlines():
        name, _, value = line.partition("=")
        if name == "VERSION_CODENAME":
            return value.strip('"')
    return "unknown"


@contextmanager
def _alone(lock: Path) -> Iterator[None]:
    """Only one process at a time, of several that test on one machine."""
    lock.parent.mkdir(parents=True, exist_ok=True)
    with lock.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(folder: Path, wanted: tuple[str, ...]) -> None:
    """apt's lists and archives are kept in folders of our own, so that the machine's are as they were."""
    downloads = folder / "downloads"
    for place in ("lists/partial", "cache/archives/partial"):
        (folder / place).mkdir(parents=True)
    downloads.mkdir()
    own = [f"Dir::State::Lists={folder / 'lists'}", f"Dir::Cache={folder / 'cache'}", "APT::Sandbox::User="]
    apt = ["apt-get", "-qq"]
    for option in own:
        apt += ["-o", option]
    _output([*apt, "update"], folder)
    listed = _output([*apt, "install", "--print-uris", "--no-install-recommends", *wanted], folder)
    # One line a package: 'URI' FILE SIZE HASH; a file is named PACKAGE_VERSION_ARCHITECTURE.deb.
    names = [line.split()[1].partition("_")[0] for line in listed.splitlines() if ".deb" in line]
    if not names:
        raise Unavailable(f"{wanted[0]} is installed here, and the tests unpack one of their own")
    _output([*apt, "download", *names], downloads)
    for package in sorted(downloads.glob("*.deb")):
        _output(["dpkg-deb", "-x", str(package), str(folder)], folder)
    for place in ("lists", "cache", "downloads"):
        shutil.rmtree(folder / place)


def _output(command: list[str], folder: Path) -> str:
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=TIMEOUT_SECONDS)
    except subprocess.TimeoutExpired:
        raise Unavailable(f"{' '.join(command[:1])} took more than {TIMEOUT_SECONDS} s") from None
    if done.returncode != 0:
        raise Unavailable(f"{command[0]} can't get packages: {done.stderr.strip()[-300:]}")
    return done.stdout
