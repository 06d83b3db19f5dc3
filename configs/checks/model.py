"""Rules for the sizes of the model."""

from collections.abc import Iterator

from configs.architectures.llama import expert_dim, head_dim, n_kv_heads
from configs.checks.rule import Problem, Rule
from configs.layout import parameter_count
from configs.schema import Config

_MOST_PARAMETERS = 2**60


def _head_width(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.head_dim is None and model.dim % model.n_heads:
        yield (
            "model.dim",
            f"dim {model.dim} is not divisible by n_heads {model.n_heads} ({model.dim} / {model.n_heads} = "
            f"{model.dim / model.n_heads:.2f}); change one of them, or set head_dim",
        )
    elif head_dim(model) % 2:
        width = "" if model.head_dim else f" = dim {model.dim} / n_heads {model.n_heads}"
        key = "model.head_dim" if model.head_dim else "model.dim"
        yield (
            key,
            f"head_dim {head_dim(model)}{width} is odd; rotary embeddings rotate pairs of features, so it must be even",
        )


def _kv_heads(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.n_heads % n_kv_heads(model):
        yield (
            "model.n_kv_heads",
            f"n_heads {model.n_heads} is not divisible by n_kv_heads {model.n_kv_heads} ({model.n_heads} / "
            f"{model.n_kv_heads} = {model.n_heads / n_kv_heads(model):.2f}); change one of them",
        )


def _experts(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    if model.n_experts is None:
        return
    if model.experts_per_token > model.n_experts:
        yield (
            "model.experts_per_token",
            f"experts_per_token {model.experts_per_token} is above n_experts {model.n_experts}; change one of them",
        )
    if model.n_dense_layers >= model.n_layers:
        yield (
            "model.n_dense_layers",
            f"n_dense_layers {model.n_dense_layers} of n_layers {model.n_layers} leaves no layer with experts",
        )
    if model.n_dense_layers == 0 and expert_dim(model) != model.ffn_dim:
        yield (
            "model.expert_dim",
            f"ffn_dim {model.ffn_dim} applies to no layer, because n_dense_layers is 0; set ffn_dim = "
            f"{model.expert_dim} and leave expert_dim out, or set n_dense_layers",
        )


def _router(config: Config, _: int | None) -> Iterator[Problem]:
    model = config.model
    router = config.model.router
    if model.n_experts is not None and model.experts_per_token == 1 and router.renormalize:
        yield (
            "model.router.renormalize",
            "renormalize makes every weight 1 with experts_per_token = 1, so the router would learn nothing; set "
            "renormalize = false",
        )


def _rope_scaling(config: Config, _: int | None) -> Iterator[Problem]:
    scaling = config.model.rope_scaling
    if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            "model.rope_scaling.high_freq_factor",
            f"high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor {scaling.low_freq_factor}",
        )


def _size(config: Config, _: int | None) -> Iterator[Problem]:
    if (parameters := parameter_count(config.model)) >= _MOST_PARAMETERS:
        yield "model.dim", f"the model would have {parameters:.3g} parameters, more than 64 bits can count in bytes"


RULES: tuple[Rule, ...] = (_size, _head_width, _kv_heads, _experts, _router, _rope_scaling)
