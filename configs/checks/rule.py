"""The type of a rule between keys."""

from collections.abc import Callable, Iterator

from configs.schema import Config

Problem = tuple[str, str]
"""Dotted key to blame, message."""
Rule = Callable[[Config, int | None], Iterator[Problem]]
"""Yields what is wrong with a config, given the world size or None where it is not known."""
