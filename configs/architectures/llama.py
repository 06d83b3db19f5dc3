"""Llama 2 and 3.x, Qwen3; with experts, Mixtral, DeepSeek-V3 and similar models. Modules: `models/llama.py`.

A key of the family is its attribute in `LlamaKeys` (the docstring is its help text), what it changes in the weights
below and in Hugging Face's config.json, and the code of the modules that reads it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from math import ceil, sqrt
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer

from configs.architectures.llama_hf import HF_CLASSES, name_of_experts, name_of_router, name_of_shared
from configs.architectures.parts import HfClass, Start, Weight, head_dim, n_kv_heads, small_size
from configs.only_with import only_with
from configs.own_code import is_import_path
from configs.plan import TensorRole
from configs.table import NonNegativeInt, PositiveFloat, PositiveInt, Table

# --------------------------------------------------------------------------- keys


class RopeScaling(Table):
    """Scaling of the rotary frequencies, for sequences longer than those of the original training."""

    kind: Literal["llama3", "yarn", "linear"] = "llama3"
    """llama3: by wavelength (Llama 3.1); yarn: by turns within the original length (Peng et al. 2023); linear: all."""
    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """Factor by which the low frequencies are divided; with linear, all."""
    low_freq_factor: Annotated[PositiveFloat, only_with("kind", "llama3")] = 1.0
    """Wavelengths above original_seq_len / this are scaled by the whole factor."""
    high_freq_factor: Annotated[PositiveFloat, only_with("kind", "llama3")] = 4.0
    """Wavelengths below original_seq_len / this are unchanged."""
    beta_fast: Annotated[PositiveFloat, only_with("kind", "yarn")] = 32.0
    """Frequencies that turn more often than this within original_seq_len are unchanged."""
    beta_slow: Annotated[PositiveFloat, only_with("kind", "yarn")] = 1.0
    """Frequencies that turn less often than this within original_seq_len are scaled by the whole factor."""
    attention_factor: Annotated[PositiveFloat | None, only_with("kind", "yarn")] = None
    """Factor on the rotated queries and keys; default: 0.1 ln(factor) + 1."""
    original_seq_len: Annotated[PositiveInt, only_with("kind", "llama3", "yarn")] = 8192
    """Sequence length of the original training, in tokens."""


LayerKinds = Annotated[
    tuple[Literal["delta", "full"], ...], Field(min_length=1, strict=False), PlainSerializer(list, list)
]
"""A list in job files; a tuple here, since caches have models as keys."""

_WITH_LOSS = ("auxiliary_loss", "bias_and_auxiliary_loss")
_WITH_BIAS = ("bias", "bias_and_auxiliary_loss")


class Router(Table):
    """How a mixture of experts chooses each token's experts and balances their load."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Expert scores: softmax over all experts (Mixtral), or a sigmoid for each (DeepSeek-V3)."""
    n_groups: Annotated[int, Field(ge=2)] | None = None
    """Number of groups of neighboring experts; a token's experts are all in few of them. Default: no groups."""
    groups_per_token: Annotated[PositiveInt, only_with("n_groups")] = 1
    """Number of groups that a token chooses from: those with the largest sums of their two best experts' scores."""
    renormalize: bool = True
    """Divide the weights of each token's chosen experts by their sum."""
    scaling_factor: PositiveFloat = 1.0
    """Factor on these weights (2.5 in DeepSeek-V3)."""
    load_balance: Literal["auxiliary_loss", "bias", "bias_and_auxiliary_loss", "none"] = "auxiliary_loss"
    """auxiliary_loss: per sequence (Switch; DeepSeek-V3, eq. 17); bias: for the choice only (Wang et al. 2024)."""
    auxiliary_loss_weight: Annotated[PositiveFloat, only_with("load_balance", *_WITH_LOSS)] = 0.01
    """Weight of the auxiliary loss (summed over layers, averaged over sequences) relative to the mean cross-entropy."""
    bias_update_rate: Annotated[PositiveFloat, only_with("load_balance", *_WITH_BIAS)] = 0.001
    """Amount by which an expert's bias changes after each step."""

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether a loss balances the experts' load."""
        return self.load_balance in _WITH_LOSS

    @property
    def has_bias(self) -> bool:
        """Whether the choice of experts has biases."""
        return self.load_balance in _WITH_BIAS


class Latent(Table):
    """Attention through compressed queries, keys and values (DeepSeek-V2, 2024, section 2.1)."""

    query_rank: PositiveInt | None = None
    """Width that queries are compressed to; default: they are not."""
    key_value_rank: PositiveInt = 512
    """Width that keys and values are compressed to, together."""
    rope_head_dim: PositiveInt = 64
    """Number of a head's features that are rotated, its last ones; those of the keys are shared by all heads."""
    value_head_dim: PositiveInt = 128
    """Width of one head of values; at most head_dim."""


class MultiToken(Table):
    """Modules that predict further tokens while the model is trained (DeepSeek-V3, 2024, section 2.2)."""

    depth: Annotated[int, Field(gt=0, le=16)] | None = None
    """Number of modules, each a block that predicts one token further than the one before; default: none."""
    loss_weight: Annotated[PositiveFloat, only_with("depth")] = 0.3
    """Weight of the mean of the modules' losses (eq. 25; DeepSeek-V3: 0.3, later 0.1) relative to the main loss."""


class Delta(Table):
    """Gated DeltaNet, whose state has one size whatever the length (Yang et al. 2024, arXiv:2412.06464)."""

    key_heads: PositiveInt = 16
    """Number of heads of queries and keys."""
    value_heads: PositiveInt = 32
    """Number of heads of values; each key head serves as many of them."""
    key_head_dim: PositiveInt = 128
    """Width of one head of queries and keys."""
    value_head_dim: PositiveInt = 128
    """Width of one head of values."""
    conv_kernel: PositiveInt = 4
    """Number of last tokens, a token itself among them, that the convolution before it takes."""

    @property
    def keys(self) -> int:
        """Features of all keys, and of all queries."""
        return self.key_heads * self.key_head_dim

    @property
    def values(self) -> int:
        """Features of all values, and of their gates."""
        return self.value_heads * self.value_head_dim


class LlamaKeys(Table):
    """The keys of [model]."""

    architecture: Literal["llama"] = "llama"
    """llama: Llama 2 and 3.x; with the keys below Qwen, Mistral, OLMo, SmolLM3, Gemma 3, Mixtral, DeepSeek-V3."""
    dim: PositiveInt
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(gt=0, le=4096)]
    """Number of transformer blocks."""
    n_heads: PositiveInt
    """Number of query heads."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); default: n_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head (of latent attention: of its queries and keys, rotated features included); default: dim /
    n_heads."""
    attention: Literal["grouped", "latent"] = "grouped"
    """grouped: queries share heads of keys and values; latent: keys and values are compressed (DeepSeek-V3)."""
    latent: Annotated[Latent, only_with("attention", "latent")] = Latent()
    """Widths of latent attention."""
    layers: LayerKinds = ("full",)
    """Kinds of the layers, repeated: full has attention, delta has Gated DeltaNet in its place (Qwen3-Next)."""
    delta: Delta = Delta()
    """Widths of the layers of kind delta."""
    qk_norm: Annotated[Literal["none", "head", "full"], only_with("attention", "grouped")] = "none"
    """RMSNorms of queries and keys. head: of each, with one weight for all (Qwen3); full: over all heads (OLMo 2)."""
    attention_bias: Annotated[bool, only_with("attention", "grouped")] = False
    """Add biases to queries, keys and values (Qwen 2)."""
    attention_gate: Annotated[bool, only_with("attention", "grouped")] = False
    """Multiply each head's output by the sigmoid of one more projection (Qiu et al. 2025; Qwen3-Next)."""
    query_scale: PositiveFloat | None = None
    """Number by whose square root the scores of attention are divided; default: head_dim."""
    norm_position: Literal["before", "after", "both"] = "before"
    """Norms of attention and feed-forward: before their input, after their output (OLMo 2), or both (Gemma 3)."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight, and their weights start at 0 (Gemma)."""
    ffn_dim: PositiveInt
    """Inner width of the feed-forward."""
    activation: Literal["swiglu", "geglu", "relu_squared"] = "swiglu"
    """silu(gate) * up; gelu(gate) * up with gelu in tanh's form (Gemma); or the square of relu(up), without a gate."""
    embedding_scale: PositiveFloat | Literal["sqrt_dim"] = 1.0
    """Factor on the embeddings; "sqrt_dim": the square root of dim (Gemma)."""
    n_experts: Annotated[int, Field(ge=2)] | None = None
    """Number of routed experts per layer, each a feed-forward; default: dense feed-forwards."""
    experts_per_token: Annotated[PositiveInt, only_with("n_experts")] = 2
    """Number of experts that each token is routed to."""
    n_shared_experts: Annotated[NonNegativeInt, only_with("n_experts")] = 0
    """Number of additional experts per layer that process every token (DeepSeekMoE)."""
    shared_expert_gate: Annotated[bool, only_with("n_shared_experts", reason="so no output would be multiplied")] = (
        False
    )
    """Multiply the shared experts' output by the sigmoid of one more projection (Qwen3-Next)."""
    expert_dim: Annotated[PositiveInt | None, only_with("n_experts")] = None
    """Inner width of an expert; default: ffn_dim, which otherwise applies to the dense layers only."""
    n_dense_layers: Annotated[NonNegativeInt, only_with("n_experts")] = 0
    """Number of leading layers with a dense feed-forward instead of experts."""
    router: Annotated[Router, only_with("n_experts")] = Router()
    """Routing and load balancing of the experts."""
    multi_token: MultiToken = MultiToken()
    """Prediction of further tokens, as a second loss."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Number of tokens in the vocabulary; at least the tokenizer's. Further rows are padding, and stand for no text."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies (10,000 in Llama 2, 500,000 in Llama 3, 1,000,000 in Qwen3)."""
    rope_scaling: RopeScaling | None = None
    """Scaling of the rotary frequencies, for longer sequences."""
    rope_fraction: Annotated[float, Field(gt=0, le=1), only_with("attention", "grouped")] = 1.0
    """Share of each head's features that are rotated, its first ones."""
    no_rope_every: Annotated[int, Field(ge=2)] | None = None
    """Every n-th layer has no rotary embedding (4 in SmolLM3); default: all have."""
    window: PositiveInt | None = None
    """Number of last tokens that attention sees, a token itself among them; default: all earlier ones."""
    window_pattern: Annotated[NonNegativeInt, only_with("window")] = 0
    """Every n-th layer sees all earlier tokens all the same (6 in Gemma 3, 4 in OLMo 3); 0: none does."""
    window_rope_theta: Annotated[PositiveFloat | None, only_with("window")] = None
    """rope_theta of the layers with a window, which then have no rope_scaling (Gemma 3); default: as in all layers."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the RMS norms."""
    tie_embeddings: bool = False
    """Share one matrix between the embedding and the output head."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights, before scaling by depth."""
    mup_base_dim: PositiveInt | None = None
    """Width (dim) of the model for which lr and init_std were tuned, which muP makes right for this dim, too
    (docs/optimizers.md); default: no muP."""
    mup_base_head_dim: Annotated[PositiveInt | None, only_with("mup_base_dim")] = None
    """Width of one head of that model; default: head_dim, so that wider models have more heads."""


def n_further(model: object) -> int:
    """Number of modules that predict further tokens; 0 for a `[model]` without these keys."""
    return model.multi_token.depth or 0 if isinstance(model, LlamaKeys) else 0


def expert_dim(model: LlamaKeys) -> int:
    """Inner width of one expert."""
    return model.expert_dim or model.ffn_dim


def is_mixture(model: LlamaKeys, layer: int) -> bool:
    """Whether a layer has experts instead of a dense feed-forward."""
    return model.n_experts is not None and layer >= model.n_dense_layers


def window_of(model: LlamaKeys, layer: int) -> int | None:
    """Number of last tokens that a layer's attention sees; None: all."""
    is_whole = model.window_pattern > 0 and (layer + 1) % model.window_pattern == 0
    return None if is_whole else model.window


def delta_of(model: object, layer: int) -> Delta | None:
    """The widths of a layer's Gated DeltaNet; None if it has attention."""
    return model.delta if isinstance(model, LlamaKeys) and is_delta(model, layer) else None


def is_delta(model: object, layer: int) -> bool:
    """Whether a layer has Gated DeltaNet in place of attention; modules that predict further tokens have attention."""
    return isinstance(model, LlamaKeys) and layer < model.n_layers and _kind(model, layer) == "delta"


def _kind(model: LlamaKeys, layer: int) -> str:
    return model.layers[layer % len(model.layers)]


def is_rotated(model: LlamaKeys, layer: int) -> bool:
    """Whether a layer has a rotary embedding."""
    return model.no_rope_every is None or (layer + 1) % model.no_rope_every > 0


def embedding_scale(model: LlamaKeys) -> float:
    """Factor on the embeddings."""
    return sqrt(model.dim) if model.embedding_scale == "sqrt_dim" else model.embedding_scale


def rope_dim(model: LlamaKeys) -> int:
    """Number of a head's features that are rotated."""
    latent = latent_of(model)
    return latent.rope_head_dim if latent else round(head_dim(model) * model.rope_fraction)


def latent_of(model: LlamaKeys) -> Latent | None:
    """The widths of latent attention; None if attention is another."""
    return model.latent if model.attention == "latent" else None


def shape(model: LlamaKeys) -> str:
    """The sizes, for people; further lines are about layers of kind delta and experts."""
    heads = f"{model.n_heads} heads of {head_dim(model)}"
    if n_kv_heads(model) != model.n_heads:
        heads += f", {n_kv_heads(model)} of keys and values"
    if model.attention == "latent":
        heads += f", through {model.latent.key_value_rank} features of keys and values"
    further = f", {n_further(model)} further tokens" if n_further(model) else ""
    tied = ", tied" if model.tie_embeddings else ""
    window = f", window {model.window:,}" if model.window else ""
    return (
        f"{model.n_layers} layers, dim {model.dim}, {heads}{window}, ffn_dim {model.ffn_dim}, "
        f"vocabulary {model.vocab_size:,}{tied}{further}{_shape_of_delta(model)}{_shape_of_experts(model)}"
    )


def _shape_of_delta(model: LlamaKeys) -> str:
    """A line about the layers of kind delta; empty if there are none."""
    if "delta" not in model.layers:
        return ""
    delta = model.delta
    n_layers = sum(is_delta(model, layer) for layer in range(model.n_layers))
    return (
        f"\n{n_layers} layers with Gated DeltaNet: {delta.key_heads} heads of {delta.key_head_dim}, "
        f"{delta.value_heads} of values of {delta.value_head_dim}"
    )


def _shape_of_experts(model: LlamaKeys) -> str:
    """A line about the experts; empty for a dense model."""
    if model.n_experts is None:
        return ""
    shared = f" and {model.n_shared_experts} shared" if model.n_shared_experts else ""
    dense = f", the first {model.n_dense_layers} dense" if model.n_dense_layers else ""
    balance = model.router.load_balance.replace("_", " ")
    return (
        f"\n{model.experts_per_token} of {model.n_experts} experts{shared} of width {expert_dim(model)}{dense}; "
        f"load balance: {balance}"
    )


def split_sizes(model: LlamaKeys) -> dict[str, int]:
    """The sizes that tensor parallelism splits, by key."""
    optional = {"model.n_kv_heads": model.n_kv_heads, "model.expert_dim": model.expert_dim}
    if "delta" in model.layers:
        optional["model.delta.key_heads"] = model.delta.key_heads
    return {
        "model.n_heads": model.n_heads,
        **{key: size for key, size in optional.items() if size is not None},
        "model.ffn_dim": model.ffn_dim,
        "model.vocab_size": model.vocab_size,
    }


_NOT_COMPUTED = {"init_std", "router.auxiliary_loss_weight", "router.bias_update_rate"}
"""Keys that matter while the model is trained, not for what it computes from given weights."""


_BASE = {"mup_base_dim": "dim", "mup_base_head_dim": "head_dim"}
"""Keys of a width of muP's base, and of the same width of the model."""


def computed(model: LlamaKeys) -> dict[str, Any]:
    """The keys that decide the model's output for given weights, with the values that apply."""
    values = model.model_dump()
    experts = values.pop("router") if model.n_experts else {}
    values.pop("multi_token")  # whose modules take no part in the main model's output
    values |= {"head_dim": head_dim(model), "n_kv_heads": n_kv_heads(model), "expert_dim": expert_dim(model)}
    values |= {key: None for key, size in _BASE.items() if values[key] == values[size]}  # the base computes as without
    values |= {f"router.{key}": value for key, value in experts.items()}
    return {key: value for key, value in values.items() if key not in _NOT_COMPUTED}


# --------------------------------------------------------------------------- rules between the keys


def rules(config: Any) -> Iterator[tuple[str, str]]:
    """What is wrong between the keys: the key to blame, and a message."""
    for rule in (_head_width, _kv_heads, _latent, _experts_fit, _router, _groups, _rope, _norms, _window, _delta):
        yield from rule(config.model)
    yield from _delta_and_context(config)
    yield from _window_and_machine(config)
    yield from _further_and_length(config)
    yield from _mup(config)


def _head_width(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    if model.head_dim is None and model.dim % model.n_heads:
        yield (
            "model.dim",
            f"dim {model.dim} is not divisible by n_heads {model.n_heads} ({model.dim} / {model.n_heads} = "
            f"{model.dim / model.n_heads:.2f}); change one of them, or set head_dim",
        )
    elif rope_dim(model) % 2 and model.rope_fraction < 1:
        yield (
            "model.rope_fraction",
            f"rope_fraction {model.rope_fraction:g} of head_dim {head_dim(model)} is {rope_dim(model)} features; "
            "rotary embeddings rotate pairs of features, so it must be an even number",
        )
    elif model.attention == "grouped" and model.rope_fraction == 1 and head_dim(model) % 2:
        width = "" if model.head_dim else f" = dim {model.dim} / n_heads {model.n_heads}"
        key = "model.head_dim" if model.head_dim else "model.dim"
        yield (
            key,
            f"head_dim {head_dim(model)}{width} is odd; rotary embeddings rotate pairs of features, so it must be even",
        )


def _kv_heads(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    if model.n_heads % n_kv_heads(model):
        yield (
            "model.n_kv_heads",
            f"n_heads {model.n_heads} is not divisible by n_kv_heads {model.n_kv_heads} ({model.n_heads} / "
            f"{model.n_kv_heads} = {model.n_heads / n_kv_heads(model):.2f}); change one of them",
        )


def _latent(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    if model.attention == "grouped":
        return
    if n_kv_heads(model) != model.n_heads:
        yield (
            "model.n_kv_heads",
            f"n_kv_heads {model.n_kv_heads} with latent attention, which has keys and values for each of n_heads "
            f"{model.n_heads}; leave n_kv_heads out",
        )
    if model.latent.rope_head_dim % 2:
        yield (
            "model.latent.rope_head_dim",
            f"rope_head_dim {model.latent.rope_head_dim} is odd; rotary embeddings rotate pairs of features",
        )
    for key in ("rope_head_dim", "value_head_dim"):
        if getattr(model.latent, key) > head_dim(model):
            yield (
                f"model.latent.{key}",
                f"{key} {getattr(model.latent, key)} is above head_dim {head_dim(model)}, the width of queries and "
                "keys, rotated features included; set model.head_dim",
            )


def _experts_fit(model: LlamaKeys) -> Iterator[tuple[str, str]]:
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


def _router(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    router = model.router
    if model.n_experts is not None and model.experts_per_token == 1 and router.renormalize:
        yield (
            "model.router.renormalize",
            "renormalize makes every weight 1 with experts_per_token = 1, so the router would learn nothing; set "
            "renormalize = false",
        )


def _groups(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    groups = model.router.n_groups
    chosen = model.router.groups_per_token
    if model.n_experts is None or groups is None:
        return
    if model.n_experts % groups or model.n_experts < 2 * groups:
        yield (
            "model.router.n_groups",
            f"n_experts {model.n_experts} make no {groups} groups of two experts or more ({model.n_experts} / {groups} "
            f"= {model.n_experts / groups:.2f}); change one of them",
        )
    elif chosen > groups:
        yield "model.router.groups_per_token", f"groups_per_token {chosen} is above n_groups {groups}"
    elif model.experts_per_token > chosen * (model.n_experts // groups):
        yield (
            "model.experts_per_token",
            f"experts_per_token {model.experts_per_token} is above the {chosen * (model.n_experts // groups)} experts "
            f"in groups_per_token {chosen} groups; change one of them",
        )


def _rope(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    scaling = model.rope_scaling
    if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            "model.rope_scaling.high_freq_factor",
            f"high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor {scaling.low_freq_factor}",
        )
    if scaling and scaling.beta_slow >= scaling.beta_fast:
        yield (
            "model.rope_scaling.beta_fast",
            f"beta_fast {scaling.beta_fast} must be above beta_slow {scaling.beta_slow}",
        )
    if rope_dim(model) == 0:
        yield (
            "model.rope_fraction",
            f"rope_fraction {model.rope_fraction:g} of head_dim {head_dim(model)} is less than one feature",
        )


def _norms(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    if model.norm_offset and model.qk_norm == "full":
        yield (
            "model.norm_offset",
            'qk_norm = "full" with norm_offset: no published model has both; set qk_norm = "head", or leave '
            "norm_offset out",
        )


def _window(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    if model.window and model.window_pattern == 1:
        yield "model.window_pattern", "window_pattern 1 leaves no layer with a window; leave model.window out"


def _delta(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    delta = model.delta
    if len(model.layers) > model.n_layers:
        yield (
            "model.layers",
            f"layers names the kinds of {len(model.layers)} layers, and n_layers is {model.n_layers}; shorten the list",
        )
    if "delta" not in model.layers and delta != Delta():
        yield "model.delta", f'no layer is of kind "delta" in model.layers {list(model.layers)}; leave delta out'
    elif delta.value_heads % delta.key_heads:
        yield (
            "model.delta.value_heads",
            f"value_heads {delta.value_heads} is not divisible by key_heads {delta.key_heads} ({delta.value_heads} / "
            f"{delta.key_heads} = {delta.value_heads / delta.key_heads:.2f}); change one of them",
        )


def _delta_and_context(config: Any) -> Iterator[tuple[str, str]]:
    """Context parallelism gives each rank some of the heads of whole sequences."""
    cp = config.mesh.cp
    tp = config.mesh.tp
    heads = config.model.delta.key_heads
    if cp > 1 and "delta" in config.model.layers and heads % (cp * tp) and heads % tp == 0:
        ranks = f"cp {cp} x tp {tp} = {cp * tp}" if tp > 1 else f"cp {cp}"
        yield (
            "mesh.cp",
            f"{ranks} does not divide model.delta.key_heads {heads} ({heads} / {cp * tp} = {heads / (cp * tp):.2f}), "
            "whatever the context.method, since layers of kind delta exchange whole sequences for some of the heads; "
            "change one of them",
        )


def _further_and_length(config: Any) -> Iterator[tuple[str, str]]:
    depth = n_further(config.model)
    if depth >= config.training.seq_len:
        yield (
            "model.multi_token.depth",
            f"depth {depth} looks {depth + 1} tokens ahead, and sequences have {config.training.seq_len}; lower it",
        )


def _mup(config: Any) -> Iterator[tuple[str, str]]:
    model = config.model
    if model.mup_base_dim is None:
        return
    if "delta" in model.layers:
        yield (
            "model.mup_base_dim",
            'no published muP has layers of kind "delta" (model.layers), to check one by; leave it out',
        )
    if model.embedding_scale == "sqrt_dim":
        yield (
            "model.embedding_scale",
            "sqrt_dim grows with dim, and muP (model.mup_base_dim) keeps the embeddings' scale; set the base's, "
            f"embedding_scale = {sqrt(model.mup_base_dim):.6g}",
        )
    if is_import_path(config.optimizer.name):
        yield (
            "model.mup_base_dim",
            f"muP must know how updates grow with the width, which Keel does not know of {config.optimizer.name}; take "
            "another optimizer, or leave mup_base_dim out and scale the learning rates by optimizer.groups",
        )


def _window_and_machine(config: Any) -> Iterator[tuple[str, str]]:
    """What cannot compute a window."""
    if config.model.window is None:
        return
    if config.mesh.cp > 1 and config.context.method == "ring":
        yield (
            "context.method",
            "a ring passes all keys to all ranks, of which a window (model.window) needs the nearest; set "
            'context.method = "gather" or "all_to_all"',
        )
    if config.attention.backend not in ("auto", "flash2"):
        yield (
            "attention.backend",
            f'{config.attention.backend} computes no window (model.window); set "auto" or "flash2"',
        )


# --------------------------------------------------------------------------- weights

ATTENTION = "self_attn"
"""A block's module that mixes tokens, in a layer of kind full."""
DELTA = "linear_attn"
"""The same in a layer of kind delta."""
SHARED_KEYS = "shared_keys"
"""The module of latent attention that all rotated keys pass."""


def before_blocks(model: LlamaKeys) -> list[Weight]:
    """The weights before the first block."""
    embedding = (model.vocab_size, model.dim)
    return [Weight("embed_tokens.weight", embedding, "embedding", hf="model.embed_tokens.weight")]


def block(model: LlamaKeys, layer: int) -> tuple[Weight, ...]:
    """The weights of a block, in the order of the forward pass."""
    return _block(model, is_mixture(model, layer), is_delta(model, layer))


def mixer(model: LlamaKeys, layer: int) -> str:
    """A block's module that mixes tokens."""
    return DELTA if is_delta(model, layer) else ATTENTION


@cache
def _block(model: LlamaKeys, mixture: bool, delta: bool) -> tuple[Weight, ...]:
    mixer = _delta_net if delta else _latent_attention if model.attention == "latent" else _attention
    before_attention, after_attention, before_mlp, after_mlp = (_norm(model, name) for name in block_norms(model))
    return (
        *before_attention,
        *mixer(model),
        *after_attention,
        *before_mlp,
        *(_experts(model) if mixture else _feed_forward(model, "mlp", model.ffn_dim)),
        *after_mlp,
    )


def block_norms(model: LlamaKeys) -> tuple[str, str, str, str]:
    """Names of a block's norms before attention, after it, before the feed-forward, and after it; "": there is none."""
    if model.norm_position == "before":
        return "input_layernorm", "", "post_attention_layernorm", ""
    if model.norm_position == "after":
        return "", "post_attention_layernorm", "", "post_feedforward_layernorm"
    return "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"


def _norm(model: LlamaKeys, name: str, width: int = 0, role: TensorRole = "norm", hf: str = "") -> list[Weight]:
    """A norm's weight; none without a name."""
    start: Start = "zeros" if model.norm_offset else "ones"
    return [Weight(f"{name}.weight", (width or model.dim,), role, start, hf)] if name else []


def _attention(model: LlamaKeys) -> Iterator[Weight]:
    query = model.n_heads * head_dim(model)
    kv = n_kv_heads(model) * head_dim(model)
    for name, width in (("q_proj", query), ("k_proj", kv), ("v_proj", kv)):
        joined = model.n_heads if model.attention_gate and name == "q_proj" else 0
        yield Weight(f"self_attn.{name}.weight", (width, model.dim), "column", joined=joined)
        if model.attention_bias:
            yield Weight(f"self_attn.{name}.bias", (width,), "column", "zeros")
    if model.attention_gate:
        shape = (query, model.dim)
        yield Weight("self_attn.gate_proj.weight", shape, "column", hf="self_attn.q_proj.weight", joined=model.n_heads)
    # With "head", a tensor-parallel rank uses the whole weight for its heads only.
    for name, width in (("q_norm", query), ("k_norm", kv)):
        if model.qk_norm == "head":
            yield from _norm(model, f"self_attn.{name}", head_dim(model), "replicated_partial_grad")
        elif model.qk_norm == "full":
            yield from _norm(model, f"self_attn.{name}", width, "norm_of_parts")
    yield Weight("self_attn.o_proj.weight", (model.dim, query), "row", "residual")


def _latent_attention(model: LlamaKeys) -> Iterator[Weight]:
    """A tensor-parallel rank compresses its slice of the sequence, and has some of the heads of the whole sequence."""
    latent = model.latent
    query = model.n_heads * head_dim(model)
    key_value = model.n_heads * (head_dim(model) - latent.rope_head_dim + latent.value_head_dim)
    compressed = latent.key_value_rank + latent.rope_head_dim
    if latent.query_rank:
        yield Weight("self_attn.q_a_proj.weight", (latent.query_rank, model.dim), "replicated_partial_grad")
    yield Weight("self_attn.kv_a_proj_with_mqa.weight", (compressed, model.dim), "replicated_partial_grad")
    if latent.query_rank:
        yield from _norm(model, "self_attn.q_a_layernorm", latent.query_rank)
    yield from _norm(model, "self_attn.kv_a_layernorm", latent.key_value_rank)
    name = "q_b_proj" if latent.query_rank else "q_proj"
    yield Weight(f"self_attn.{name}.weight", (query, latent.query_rank or model.dim), "gather_column")
    yield Weight("self_attn.kv_b_proj.weight", (key_value, latent.key_value_rank), "gather_column")
    yield Weight("self_attn.o_proj.weight", (model.dim, model.n_heads * latent.value_head_dim), "row", "residual")


def _delta_net(model: LlamaKeys) -> Iterator[Weight]:
    """The rows of a matrix are of one key head and its value heads after the other, so that ranks have some of each."""
    delta = model.delta
    for name, width in (("q_conv", delta.keys), ("k_conv", delta.keys), ("v_conv", delta.values)):
        filters = (width, delta.conv_kernel)
        yield Weight(f"{DELTA}.{name}", filters, "part_column", hf=f"{DELTA}.conv1d.weight", joined=1, is_filter=True)
    yield Weight(f"{DELTA}.A_log", (delta.value_heads,), "part_vector", "log_of_uniform")
    yield Weight(f"{DELTA}.dt_bias", (delta.value_heads,), "part_vector", "ones")
    yield Weight(f"{DELTA}.in_proj_qkvz.weight", (2 * delta.keys + 2 * delta.values, model.dim), "column")
    yield Weight(f"{DELTA}.in_proj_ba.weight", (2 * delta.value_heads, model.dim), "column")
    yield Weight(f"{DELTA}.norm.weight", (delta.value_head_dim,), "replicated_partial_grad", "ones")
    yield Weight(f"{DELTA}.out_proj.weight", (model.dim, delta.values), "row", "residual")


def _feed_forward(
    model: LlamaKeys, module: str, inner: int, roles: Sequence[TensorRole] = ("column", "row")
) -> Iterator[Weight]:
    into, out_of = roles
    if has_gate(model):
        yield Weight(f"{module}.gate_proj.weight", (inner, model.dim), into)
    yield Weight(f"{module}.up_proj.weight", (inner, model.dim), into)
    yield Weight(f"{module}.down_proj.weight", (model.dim, inner), out_of, "residual")


def has_gate(model: LlamaKeys) -> bool:
    """Whether a feed-forward has a matrix of gates."""
    return model.activation != "relu_squared"


def _experts(model: LlamaKeys) -> Iterator[Weight]:
    """A router and its experts; then the shared experts, side by side in one feed-forward."""
    n = model.n_experts or 0
    kind = hf_class(model)
    router = name_of_router(kind)
    yield Weight("mlp.router.weight", (n, model.dim), "replicated_partial_grad", hf=router, has_fixed_rows=True)
    for matrix in _feed_forward(model, "mlp.experts", expert_dim(model), ("part_column", "part_row")):
        name = matrix.name.removesuffix(".weight")
        yield replace(
            matrix,
            name=name,
            shape=(n, *matrix.shape),
            hf=name_of_experts(kind, name.rpartition(".")[2]),
            used=model.experts_per_token,
        )
    if model.n_shared_experts:
        width = model.n_shared_experts * expert_dim(model)
        for matrix in _feed_forward(model, "mlp.shared_experts", width, ("part_column", "part_row")):
            yield replace(matrix, hf=name_of_shared(kind, matrix.name))
    if model.shared_expert_gate:
        yield Weight("mlp.shared_expert_gate.weight", (1, model.dim), "replicated_partial_grad", has_fixed_rows=True)


def around(model: LlamaKeys, layer: int) -> dict[str, TensorRole]:
    """Roles of the modules in a block that have no weights of their own."""
    mlp: TensorRole = "parts" if is_mixture(model, layer) else "gather"
    if model.attention == "latent" and not is_delta(model, layer):
        return {f"{ATTENTION}.{SHARED_KEYS}": "gather_parts", "mlp": mlp}
    return {mixer(model, layer): "gather", "mlp": mlp}


def buffers(model: LlamaKeys, layer: int) -> list[Weight]:
    """The buffers of a block that checkpoints have."""
    if not (is_mixture(model, layer) and model.router.has_bias):
        return []
    shape = (model.n_experts or 0,)
    hf = "mlp.gate.e_score_correction_bias"
    return [Weight("mlp.router.bias", shape, "replicated_partial_grad", "zeros", hf, is_buffer=True)]


def after_blocks(model: LlamaKeys) -> list[Weight]:
    """The weights after the last block."""
    tied = "embed_tokens.weight" if model.tie_embeddings else ""
    return [
        *_norm(model, "norm", hf="model.norm.weight"),
        Weight("lm_head.weight", (model.vocab_size, model.dim), "head", tied_to=tied),
        *chain.from_iterable(_further(model, depth) for depth in range(n_further(model))),
    ]


FURTHER = "multi_token."
"""Beginning of the names of the modules that predict further tokens."""


def further_block(depth: int) -> str:
    """Name of the block of a module that predicts further tokens; depth counts from 0."""
    return f"{FURTHER}{depth}.block"


def _further(model: LlamaKeys, depth: int) -> Iterator[Weight]:
    """The weights of a module that predicts further tokens, which the published weights number as one more layer."""
    layer = model.n_layers + depth
    module = f"{FURTHER}{depth}"
    published = f"model.layers.{layer}"
    yield from _norm(model, f"{module}.enorm", hf=f"{published}.enorm.weight")
    yield from _norm(model, f"{module}.hnorm", hf=f"{published}.hnorm.weight")
    joined = f"{module}.eh_proj.weight"
    yield Weight(joined, (model.dim, 2 * model.dim), "replicated_partial_grad", hf=f"{published}.eh_proj.weight")
    for weight in block(model, layer):
        yield replace(weight.inside(further_block(depth)), hf=f"{published}.{weight.hf or weight.name}")
    yield from _norm(model, f"{module}.norm", hf=f"{published}.shared_head.norm.weight")


# --------------------------------------------------------------------------- small

_SMALL_HEAD = 8
_SMALL_WINDOW = 5


def small(model: LlamaKeys, ranks: int) -> dict[str, object]:
    """The keys to change for a small model of the same structure (`Family.small`): at most four layers, short rows.

    Heads keep whether they share keys and values; a token goes to one expert, or to two of a few. Initial weights grow
    as rows get shorter, so that the values inside are about as large as in the whole model.
    """
    dim = small_size(model.dim, 32, ranks)
    n_layers = min(model.n_layers, 4)
    kv_heads = small_size(n_kv_heads(model), 1, ranks)
    sharing = model.n_heads // n_kv_heads(model)
    keys: dict[str, object] = {
        "dim": dim,
        "n_layers": n_layers,
        "n_heads": kv_heads * min(sharing, 3),
        "n_kv_heads": kv_heads,
        "head_dim": _SMALL_HEAD,
        "ffn_dim": small_size(model.ffn_dim, 32, ranks),
        "vocab_size": small_size(model.vocab_size, 64, ranks),
        "init_std": round(model.init_std * sqrt(model.dim / dim), 4),
    }
    if model.attention == "latent":
        keys["latent"] = _small_latent(model.latent)
        keys["head_dim"] = 2 * _SMALL_HEAD
    if "delta" in model.layers:
        keys["layers"] = list(model.layers if len(model.layers) <= n_layers else dict.fromkeys(model.layers))
        keys["delta"] = _small_delta(model.delta, ranks)
    if model.mup_base_dim:
        keys["mup_base_dim"] = ceil(model.mup_base_dim * dim / model.dim)
    if model.mup_base_head_dim:
        keys["mup_base_head_dim"] = ceil(model.mup_base_head_dim * _SMALL_HEAD / head_dim(model))
    if model.window:
        keys["window"] = min(model.window, _SMALL_WINDOW)
        keys["window_pattern"] = min(model.window_pattern, max(2, n_layers))
    if n_further(model):
        keys["multi_token"] = model.multi_token.model_dump() | {"depth": min(n_further(model), 2)}
    if model.rope_fraction < 1:
        keys["rope_fraction"] = 0.5
    if model.no_rope_every:
        keys["no_rope_every"] = min(model.no_rope_every, max(2, n_layers))
    return keys | (_small_experts(model, ranks, n_layers) if model.n_experts else {})


def _small_latent(latent: Latent) -> dict[str, object]:
    """Widths for heads of twice the usual width, of which half is rotated."""
    small = {"key_value_rank": 12, "rope_head_dim": _SMALL_HEAD, "value_head_dim": _SMALL_HEAD}
    return {**small, "query_rank": 24} if latent.query_rank else {**small}


def _small_delta(delta: Delta, ranks: int) -> dict[str, int]:
    heads = small_size(delta.key_heads, 1, ranks)
    sharing = min(delta.value_heads // delta.key_heads, 2)
    widths = {"key_head_dim": _SMALL_HEAD, "value_head_dim": _SMALL_HEAD, "conv_kernel": delta.conv_kernel}
    return {"key_heads": heads, "value_heads": heads * sharing, **widths}


def _small_experts(model: LlamaKeys, ranks: int, n_layers: int) -> dict[str, object]:
    chosen = min(model.experts_per_token, 2)
    groups = model.router.n_groups or 1
    dense = 1 if 0 < model.n_dense_layers < model.n_layers else min(model.n_dense_layers, n_layers)
    keys: dict[str, object] = {
        "n_experts": small_size(model.n_experts or 0, 2 * max(chosen, groups), ranks, step=groups),
        "experts_per_token": chosen,
        "n_shared_experts": min(model.n_shared_experts, 2),
        "n_dense_layers": dense,
    }
    return keys | ({"expert_dim": small_size(model.expert_dim, 16, ranks)} if model.expert_dim else {})


def hf_class(model: LlamaKeys) -> HfClass:
    """The class that computes the model, or else the one from which the fewest keys differ."""
    is_dense = model.n_experts is None

    def distance(kind: HfClass) -> tuple[bool, bool, int]:
        differences = len(kind.differences(model))
        return differences > 0, ("n_experts" in kind.keys) != is_dense, differences

    return min(HF_CLASSES, key=distance)
