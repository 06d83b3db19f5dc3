"""Keyed hashes for the values that decide something and reach ranks and hosts through a store on the network.

torch's store accepts values from anyone who reaches its port. Each value that Keel writes there therefore has a hash
whose key is KEEL_SECRET. The launch files make or ask for the secret, and all hosts have it (docs/stopping.md, "The
network"). Without KEEL_SECRET the key is empty: a host that has one and a host that has none do not accept each other's
values.
"""

import hmac
import os

from configs.errors import UserError

SECRET = "KEEL_SECRET"


class Forged(UserError):
    """A value in a store that was not written with this process's KEEL_SECRET."""


def keyed_hash(name: str, value: str) -> bytes:
    """HMAC-SHA256 of a value, with KEEL_SECRET as its key. A value that is moved to another name has a wrong hash."""
    key = os.environ.get(SECRET, "").encode()
    return hmac.new(key, f"{name}\0{value}".encode(), "sha256").hexdigest().encode()


def signed(name: str, value: str) -> str:
    """The text to write under `name` into a store: the hash, then the value; the same text for the same value."""
    return f"{keyed_hash(name, value).decode()} {value}"


def verified(name: str, content: bytes) -> str:
    """The value that was `signed`, given what a store has under `name`.

    Raises:
        Forged: its hash is wrong.
    """
    given, _, value = content.partition(b" ")
    text = value.decode(errors="replace")
    if not hmac.compare_digest(given, keyed_hash(name, text)):
        raise Forged(
            f"the store has a value with a wrong keyed hash under {name}, which is refused: {SECRET} is not the same "
            "on all hosts, or somebody else has reached the store's port (docs/stopping.md)"
        )
    return text
