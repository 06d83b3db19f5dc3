"""The position in the data of a run that goes on from another's checkpoint with another mixture.

Each source goes on where the first run has left it, so that over both runs an epoch of a source repeats no sample and
leaves none out. Windows of another length, or in another order, can't go on from there.
"""

from collections.abc import Sequence
from contextlib import closing
from typing import Any

from configs.errors import ConfigError
from configs.schema import Config
from trainer.data.loader import build_loader
from trainer.data.order import Mixture, Start

_OF_ALL = ("training.seq_len", "training.seed")


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
    with closing(build_loader(config, 0, 1, next_sample)) as loader:
        order = loader.state_dict()["order"]
    then = data.get("order")
    if then is None:
        raise ConfigError("the checkpoint does not record the order of its samples; it is of an older Keel")
    if order == then:
        return data
    sources = before["data"]["sources"]
    names = [source["name"] for source in sources]
    start = Start(**data.get("start", {}))
    mixture = Mixture(names, [source["weight"] for source in sources], before["training"]["seed"], start)
    read = mixture.read_before(next_sample)
    _require_same_windows(then, names, order, read, config)
    return {**data, "order": order, "start": Start(next_sample, read).to_json()}


def _require_same_windows(
    then: dict[str, Any], names: Sequence[str], now: dict[str, Any], read: dict[str, int], config: Config
) -> None:
    """Raise ConfigError if the windows of a source that is partly read have changed, or their order.

    Args:
        then, names: the order of the checkpoint's samples, and its sources.
        now, config: the new order and its job.
        read: how many samples of each source were read.
    """
    sources = config.data.sources
    old = _layouts(then, names)
    new = _layouts(now, [source.name for source in sources])
    changed = [f"{key}: {then[key]} -> {now[key]}" for key in _OF_ALL if then[key] != now[key]]
    for name in [source.name for source in sources if source.kind != "synthetic"]:
        if not read.get(name):
            continue
        reasons = changed
        if not reasons and name in old and old[name] != new[name]:
            reasons = [f"{old[name]} -> {new[name]}"]
        if reasons:
            raise ConfigError(
                f"the source {name!r} has been read ({read[name]} sequences), and its sequences would now be others "
                f"({', '.join(reasons)}): an epoch would repeat some tokens and leave others out. Change it back, or "
                f"leave the source out (--without {name}) and add others"
            )


def _layouts(order: dict[str, Any], names: Sequence[str]) -> dict[str, str]:
    """How each source is divided into samples, by its name; see `_order_of` in the loader."""
    shares = {name: order[f"data.sources.{index}"].removeprefix(f"{name}, ") for index, name in enumerate(names)}
    return {name: share.partition(" samples, ")[2] for name, share in shares.items()}
