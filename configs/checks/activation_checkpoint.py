"""Rules for activation checkpointing."""

from collections.abc import Iterator

from configs.checks.rule import Problem, Rule
from configs.errors import ConfigError
from configs.layout import layer_numbers
from configs.schema import Config


def _activation_checkpoint(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.activation_checkpoint
    if table.mode == "budget" and not config.compile.enable:
        yield "activation_checkpoint.mode", 'mode "budget" is done by torch.compile; set compile.enable = true'


def _checkpointed_layers(config: Config, _: int | None) -> Iterator[Problem]:
    table = config.activation_checkpoint
    n_layers = config.model.n_layers
    if table.mode not in ("full", "selective"):
        return
    try:
        layers = layer_numbers(table.layers, n_layers) if table.layers is not None else range(n_layers)
    except ConfigError as error:
        yield "activation_checkpoint.layers", str(error)
        return
    if table.every_nth_layer > len(layers):
        yield (
            "activation_checkpoint.every_nth_layer",
            f"every_nth_layer {table.every_nth_layer} selects none of {len(layers)} layers; set it lower",
        )


RULES: tuple[Rule, ...] = (_activation_checkpoint, _checkpointed_layers)
