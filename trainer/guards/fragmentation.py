"""The setting that keeps CUDA's memory from fragmenting; used before torch is imported, which reads it."""

from collections.abc import MutableMapping

_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def let_segments_grow(environment: MutableMapping[str, str]) -> None:
    """Let torch's allocator extend its segments instead of adding new ones, unless the user has configured it."""
    if not any(name in environment for name in _NAMES):
        environment[_NAMES[1]] = "expandable_segments:True"  # the name that torch 2.11 and 2.13 both know
