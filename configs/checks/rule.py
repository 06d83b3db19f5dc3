"""The type of a rule between keys."""

from collections.abc import Callable, Iterator

from configs.schema import Config

Problem = tuple[str, str]
"""Dotted key to blame, message."""
Rule = Callable[[Config, int | None], Iterator[Problem]]
"""Yields what is wrong with a config, given the world size or None where it is not known.

A rule reads keys as plain attributes. Keys whose values are invalid are missing from the config; reading one raises
`MissingKey`, and `check` skips the rule.
"""
