"""The position in the data of a run that goes on with another mixture, at a stage's border or from a checkpoint.

Each source goes on where it was left, so that an epoch of a source repeats no token and leaves none out; token files
also with windows of another length (see `lengths`), and text (see `text/streaming`). Windows in another order can't go
on from there.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from configs.errors import ConfigError
from configs.reading.toml_text import value_text
from configs.schema import Config, Source
from trainer.data.loader import build_loader
from trainer.data.order import Mixture, Start

# Defaults of a source in [[stages]], which are stored as they were written.
_WEIGHT = Source.model_fields["weight"].default
_SHUFFLE = Source.model_fields["shuffle"].default


def forked_position(data: dict[str, Any], before: dict[str, Any], config: Config) -> dict[str, Any]:
    """The position from which a run with `config` goes on.

    Args:
        data: the position of the checkpoint, as `DataLoader.state_dict` returned it.
        before: the config of the checkpoint, as JSON.
        config: of the new run.

    Raises:
        ConfigError: a source that the first run has read would be read in another order.
        UserError: data is missing or damaged.
    """
    next_sample = data["next_sample"]
    then = data.get("order")
    if then is None:
        raise ConfigError("the checkpoint does not record the order of its samples; it is of an older Keel")
    seq_lens = then["training.seq_len"], config.training.seq_len
    start = Start(**data.get("start", {}))
    sources = before["data"]["sources"]
    names = [source["name"] for source in sources]
    weights = [source.get("weight", _WEIGHT) for source in sources]
    mixture = Mixture(names, weights, before["training"]["seed"], start)
    following = start.following(next_sample, mixture.read_before(next_sample), seq_lens)
    if seq_lens[0] == seq_lens[1]:
        order = _order_at(config, next_sample, start=start)
        if order == then:
            return data
        _require_same_windows(then, sources, order, following, config)
        order = _order_at(config, next_sample, start=following)
    else:  # the windows are others in any case, so the content is compared
        _require_same_windows(then, sources, None, following, config)
        order = _order_at(config, next_sample, start=following, states=data["sources"])
    return {**data, "order": order, "start": following.to_json()}


def _order_at(config: Config, next_sample: int, **position: Any) -> dict[str, Any]:
    """The order of the samples that a job has, opened at a position."""
    with closing(build_loader(config, 0, 1, next_sample, **position)) as loader:
        return loader.state_dict()["order"]


def _require_same_windows(
    then: dict[str, Any], before: Sequence[dict[str, Any]], now: dict[str, Any] | None, start: Start, config: Config
) -> None:
    """Raise ConfigError if the windows of a source that is partly read have changed, or their order.

    Args:
        then, before: the order of the checkpoint's samples, and its sources, as JSON.
        now, config: the new order and its job; None: windows have another length, so that all are others.
        start: where it takes over.
    """
    sources = config.data.sources
    old = _layouts(then, [source["name"] for source in before])
    shuffled = {source["name"]: source.get("shuffle", _SHUFFLE) for source in before}
    new = _layouts(now, [source.name for source in sources]) if now else {}
    seeds = then["training.seed"], config.training.seed
    for source in sources:
        name = source.name
        if source.kind == "synthetic" or not start.read.get(name):
            continue
        reason = ""
        if seeds[0] != seeds[1] and source.shuffle:
            reason = f"training.seed: {seeds[0]} -> {seeds[1]}"
        elif shuffled.get(name, source.shuffle) != source.shuffle:
            reason = f"shuffle: {value_text(shuffled[name])} -> {value_text(source.shuffle)}"
        elif name in old and name in new and old[name] != new[name]:
            reason = f"{old[name]} -> {new[name]}"
        if reason:
            raise ConfigError(
                f"the source {name!r} has been read ({start.read[name]} sequences), and its sequences would now be "
                f"others ({reason}): an epoch would repeat some tokens and leave others out. Change it back, or leave "
                "the source out and add others"
            )


def _layouts(order: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    """How each source is divided into samples, by its name; see `_order_of` in the loader."""
    shares = {name: order[f"data.sources.{index}"].removeprefix(f"{name}, ") for index, name in enumerate(names)}
    return {name: share.partition(" samples, ")[2] for name, share in shares.items()}
