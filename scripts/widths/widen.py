"""A job at another width: everything inside a block grows with `dim`, as muP takes it."""

from collections.abc import Iterator, Sequence
from fractions import Fraction

from configs.architectures.parts import head_dim
from configs.errors import ConfigError
from configs.load import LoadedConfig, load
from configs.reading.overrides import words
from configs.schema import AnyModel, Model, is_described

_COMPUTED_PLAINLY = ("--compile.enable", "false", "--activation_checkpoint.mode", "none", "--elastic.enable", "false")
"""Hooks see what blocks compute, which neither is compiled nor runs twice."""


def widened(job: str, overrides: Sequence[str], dim: int, with_mup: bool) -> LoadedConfig:
    """A job at another width, in one process, whose blocks hooks can look into.

    Raises:
        ConfigError: the job is not valid at this width, or its model has no keys for it.
    """
    plainly = (*overrides, *_COMPUTED_PLAINLY)
    return load(job, (*plainly, *words(width_keys(load(job, plainly, 1).config.model, dim, with_mup))), 1)


def width_keys(model: AnyModel, dim: int, with_mup: bool) -> dict[str, object]:
    """The keys that make a job's model another width, with their values.

    With muP its base is the job's own, or else the job's `dim`; without, all widths have the same initial standard
    deviation and learning rate.

    Raises:
        ConfigError: a size would not be a whole number, or the model has no keys for it.
    """
    if not is_described(model):
        raise ConfigError(f'which widths grow in architecture "{model.architecture}" is not known; muP needs "llama"')
    sizes: dict[str, object] = {f"model.{key}": size for key, size in _sizes(model, dim)}
    if with_mup:
        return sizes | {"model.mup_base_dim": model.mup_base_dim or model.dim}
    return sizes | {"model.mup_base_dim": "none", "model.mup_base_head_dim": "none"}


def _sizes(model: Model, dim: int) -> Iterator[tuple[str, int]]:
    """The keys of [model] that grow with `dim`: wider heads where the base has narrower ones, otherwise more heads."""
    times = Fraction(dim, model.dim)
    yield "dim", dim
    if model.mup_base_head_dim:
        yield "mup_base_head_dim", model.mup_base_head_dim
        yield "head_dim", _times(model, "head_dim", head_dim(model), times)
    else:
        yield "head_dim", head_dim(model)
        yield "n_heads", _times(model, "n_heads", model.n_heads, times)
        if model.n_kv_heads:
            yield "n_kv_heads", _times(model, "n_kv_heads", model.n_kv_heads, times)
    yield "ffn_dim", _times(model, "ffn_dim", model.ffn_dim, times)
    if model.expert_dim:
        yield "expert_dim", _times(model, "expert_dim", model.expert_dim, times)
    if "delta" in model.layers:
        yield "delta.key_heads", _times(model, "delta.key_heads", model.delta.key_heads, times)
        yield "delta.value_heads", _times(model, "delta.value_heads", model.delta.value_heads, times)
    if model.attention == "latent":
        yield "latent.key_value_rank", _times(model, "latent.key_value_rank", model.latent.key_value_rank, times)
        if model.latent.query_rank:
            yield "latent.query_rank", _times(model, "latent.query_rank", model.latent.query_rank, times)


def _times(model: Model, key: str, size: int, times: Fraction) -> int:
    found = size * times
    if found.denominator > 1:
        raise ConfigError(
            f"--dims: at dim {int(model.dim * times)}, {times} of the job's {model.dim}, model.{key} {size} would be "
            f"{float(found):.2f}; take other widths, or set model.{key} to a number that {times.denominator} divides"
        )
    return int(found)
