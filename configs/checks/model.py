"""Rules for the model: each architecture has its own."""

from collections.abc import Iterator

from configs.architectures import family_of
from configs.checks.rule import Problem, Rule
from configs.layout import parameter_count
from configs.schema import Config, is_described

_MOST_PARAMETERS = 2**60


def _size(config: Config, _: int | None) -> Iterator[Problem]:
    if is_described(config.model) and (parameters := parameter_count(config.model)) >= _MOST_PARAMETERS:
        yield "model.dim", f"the model would have {parameters:.3g} parameters, more than 64 bits can count in bytes"


def _architecture(config: Config, _: int | None) -> Iterator[Problem]:
    yield from family_of(config.model).rules(config)


RULES: tuple[Rule, ...] = (_size, _architecture)
