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

_WEIGHT = Source.model_fields["weight"].default  # of a source in [[stages]], which are stored as they were written


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
        _require_same_windows(data, names, order, following, config)
        order = _order_at(config, next_sample, start=following)
    else:  # the windows are others in any case, so the content is compared
        _require_same_windows(data, names, None, following, config)
        order = _order_at(config, next_sample, start=following, states=data["sources"])
    return {**data, "order": order, "start": following.to_json()}


def _order_at(config: Config, next_sample: int, **position: Any) -> dict[str, Any]:
    """The order of the samples that a job has, opened at a position."""
    with closing(build_loader(config, 0, 1, next_sample, **position)) as loader:
        return loader.state_dict()["order"]


def _require_same_windows(
    data: dict[str, Any], names: Sequence[str], now: dict[str, Any] | None, start: Start, config: Config
) -> None:
    """Raise ConfigError if the windows of a source that is partly read have changed, or their order.

    Args:
        data, names: the position of the checkpoint, and the sources of its mixture.
        now, config: the new order and its job; None: windows have another length, so that all are others.
        start: where it takes over.
    """
    sources = config.data.sources
    old = _layouts(data["order"], names)
    new = _layouts(now, [source.name for source in sources]) if now else {}
    for source in sources:
        name = source.name
        if source.kind == "synthetic" or not start.read.get(name):
            continue
        # Token files record their seed, also those that only an earlier mixture has read, under another one.
        before = data["sources"].get(name, {}).get("order_seed", data["order"]["training.seed"])
        after = config.training.seed if source.shuffle else None
        reason = ""
        if None in (before, after) and before != after:
            reason = f"shuffle: {value_text(before is not None)} -> {value_text(source.shuffle)}"
        elif before != after:
            reason = f"training.seed: {before} -> {after}"
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
