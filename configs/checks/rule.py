"""What a rule of a job is."""

from collections.abc import Callable, Iterator

from configs.schema import Config

Problem = tuple[str, str]
"""Dotted key to blame, message."""
Rule = Callable[[Config, int | None], Iterator[Problem]]
"""What must hold between keys, of a config, and of the world size where it is known.

It reads keys as plain attributes. Of a job that has mistakes of their own kinds, keys are missing: to read one raises
`MissingKey`, by which `check` leaves the rule out.
"""
