"""Llama 2 and 3.x, Qwen3; with experts, Mixtral, DeepSeekMoE and similar models. Modules: `models/llama.py`.

A key of the family is its attribute in `LlamaKeys` (the docstring is its help text), what it changes in the weights
below and in Hugging Face's config.json, and the code of the modules that reads it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from math import sqrt
from typing import Annotated, Any, Literal

from pydantic import Field

from configs.architectures.parts import HfClass, Weight, head_dim, n_kv_heads, small_size
from configs.only_with import only_with
from configs.plan import TensorRole
from configs.table import NonNegativeInt, PositiveFloat, PositiveInt, Table

# --------------------------------------------------------------------------- keys


class RopeScaling(Table):
    """Llama 3.1's scaling of the rotary frequencies, for sequences longer than those of the original training."""

    factor: Annotated[float, Field(ge=1, allow_inf_nan=False)]
    """Factor by which the low frequencies are divided."""
    low_freq_factor: PositiveFloat = 1.0
    """Wavelengths above original_seq_len / this are scaled by the whole factor."""
    high_freq_factor: PositiveFloat = 4.0
    """Wavelengths below original_seq_len / this are unchanged."""
    original_seq_len: PositiveInt = 8192
    """Sequence length of the original training, in tokens."""


class Router(Table):
    """How a mixture of experts chooses each token's experts and balances their load."""

    scoring: Literal["softmax", "sigmoid"] = "softmax"
    """Expert scores: softmax over all experts (Mixtral), or a sigmoid for each (DeepSeek-V3)."""
    renormalize: bool = True
    """Divide the weights of each token's chosen experts by their sum."""
    load_balance: Literal["auxiliary_loss", "bias", "none"] = "auxiliary_loss"
    """auxiliary_loss: per sequence (Switch; DeepSeek-V3, eq. 17); bias: for the choice only (Wang et al. 2024)."""
    auxiliary_loss_weight: Annotated[PositiveFloat, only_with("load_balance", "auxiliary_loss")] = 0.01
    """Weight of the auxiliary loss (summed over layers, averaged over sequences) relative to the mean cross-entropy."""
    bias_update_rate: Annotated[PositiveFloat, only_with("load_balance", "bias")] = 0.001
    """Amount by which an expert's bias changes after each step."""


class LlamaKeys(Table):
    """The keys of [model]."""

    architecture: Literal["llama"] = "llama"
    """llama: Llama 2 and 3.x; with qk_norm Qwen3; with n_experts Mixtral, DeepSeekMoE and similar models."""
    dim: PositiveInt
    """Width of the residual stream."""
    n_layers: Annotated[int, Field(gt=0, le=4096)]
    """Number of transformer blocks."""
    n_heads: PositiveInt
    """Number of query heads."""
    n_kv_heads: PositiveInt | None = None
    """Number of key and value heads (grouped-query attention); default: n_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head; default: dim / n_heads."""
    qk_norm: Literal["none", "head"] = "none"
    """head: an RMSNorm of each head's queries and keys, with one weight for all heads (Qwen3); none: no such norms."""
    ffn_dim: PositiveInt
    """Inner width of the SwiGLU feed-forward."""
    n_experts: Annotated[int, Field(ge=2)] | None = None
    """Number of routed experts per layer, each a SwiGLU feed-forward; default: dense feed-forwards."""
    experts_per_token: Annotated[PositiveInt, only_with("n_experts")] = 2
    """Number of experts that each token is routed to."""
    n_shared_experts: Annotated[NonNegativeInt, only_with("n_experts")] = 0
    """Number of additional experts per layer that process every token (DeepSeekMoE)."""
    expert_dim: Annotated[PositiveInt | None, only_with("n_experts")] = None
    """Inner width of an expert; default: ffn_dim, which otherwise applies to the dense layers only."""
    n_dense_layers: Annotated[NonNegativeInt, only_with("n_experts")] = 0
    """Number of leading layers with a dense feed-forward instead of experts."""
    router: Annotated[Router, only_with("n_experts")] = Router()
    """Routing and load balancing of the experts."""
    vocab_size: Annotated[int, Field(ge=2)]
    """Number of tokens in the vocabulary; at least the tokenizer's. Further rows are padding, and stand for no text."""
    rope_theta: PositiveFloat = 10000.0
    """Base of the rotary frequencies (10,000 in Llama 2, 500,000 in Llama 3, 1,000,000 in Qwen3)."""
    rope_scaling: RopeScaling | None = None
    """Llama 3.1's scaling of the rotary frequencies."""
    norm_eps: PositiveFloat = 1e-5
    """Epsilon of the RMS norms."""
    tie_embeddings: bool = False
    """Share one matrix between the embedding and the output head."""
    init_std: PositiveFloat = 0.02
    """Standard deviation of the initial weights, before scaling by depth."""


def expert_dim(model: LlamaKeys) -> int:
    """Inner width of one expert."""
    return model.expert_dim or model.ffn_dim


def is_mixture(model: LlamaKeys, layer: int) -> bool:
    """Whether a layer has experts instead of a dense feed-forward."""
    return model.n_experts is not None and layer >= model.n_dense_layers


def shape(model: LlamaKeys) -> str:
    """The sizes, for people; a second line is about the experts."""
    heads = f"{model.n_heads} heads of {head_dim(model)}"
    if n_kv_heads(model) != model.n_heads:
        heads += f", {n_kv_heads(model)} of keys and values"
    tied = ", tied" if model.tie_embeddings else ""
    return (
        f"{model.n_layers} layers, dim {model.dim}, {heads}, ffn_dim {model.ffn_dim}, "
        f"vocabulary {model.vocab_size:,}{tied}{_shape_of_experts(model)}"
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
    return {
        "model.n_heads": model.n_heads,
        **{key: size for key, size in optional.items() if size is not None},
        "model.ffn_dim": model.ffn_dim,
        "model.vocab_size": model.vocab_size,
    }


_NOT_COMPUTED = {"init_std", "router.auxiliary_loss_weight", "router.bias_update_rate"}
"""Keys that matter while the model is trained, not for what it computes from given weights."""


def computed(model: LlamaKeys) -> dict[str, Any]:
    """The keys that decide the model's output for given weights, with the values that apply."""
    values = model.model_dump()
    experts = values.pop("router") if model.n_experts else {}
    values |= {"head_dim": head_dim(model), "n_kv_heads": n_kv_heads(model), "expert_dim": expert_dim(model)}
    values |= {f"router.{key}": value for key, value in experts.items()}
    return {key: value for key, value in values.items() if key not in _NOT_COMPUTED}


# --------------------------------------------------------------------------- rules between the keys


def rules(config: Any) -> Iterator[tuple[str, str]]:
    """What is wrong between the keys: the key to blame, and a message."""
    for rule in (_head_width, _kv_heads, _experts_fit, _router, _rope_scaling):
        yield from rule(config.model)


def _head_width(model: LlamaKeys) -> Iterator[tuple[str, str]]:
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


def _kv_heads(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    if model.n_heads % n_kv_heads(model):
        yield (
            "model.n_kv_heads",
            f"n_heads {model.n_heads} is not divisible by n_kv_heads {model.n_kv_heads} ({model.n_heads} / "
            f"{model.n_kv_heads} = {model.n_heads / n_kv_heads(model):.2f}); change one of them",
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


def _rope_scaling(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    scaling = model.rope_scaling
    if scaling and scaling.low_freq_factor >= scaling.high_freq_factor:
        yield (
            "model.rope_scaling.high_freq_factor",
            f"high_freq_factor {scaling.high_freq_factor} must be above low_freq_factor {scaling.low_freq_factor}",
        )


# --------------------------------------------------------------------------- weights

ATTENTION = "self_attn"
"""A block's module that mixes tokens."""


def before_blocks(model: LlamaKeys) -> list[Weight]:
    """The weights before the first block."""
    embedding = (model.vocab_size, model.dim)
    return [Weight("embed_tokens.weight", embedding, "embedding", hf="model.embed_tokens.weight")]


def block(model: LlamaKeys, layer: int) -> tuple[Weight, ...]:
    """The weights of a block, in the order of the forward pass."""
    return _block(model, is_mixture(model, layer))


@cache
def _block(model: LlamaKeys, mixture: bool) -> tuple[Weight, ...]:
    query = model.n_heads * head_dim(model)
    kv = n_kv_heads(model) * head_dim(model)
    return (
        Weight("input_layernorm.weight", (model.dim,), "norm", "ones"),
        Weight("self_attn.q_proj.weight", (query, model.dim), "column"),
        Weight("self_attn.k_proj.weight", (kv, model.dim), "column"),
        Weight("self_attn.v_proj.weight", (kv, model.dim), "column"),
        *(_qk_norms(model) if model.qk_norm == "head" else ()),
        Weight("self_attn.o_proj.weight", (model.dim, query), "row", "residual"),
        Weight("post_attention_layernorm.weight", (model.dim,), "norm", "ones"),
        *(_experts(model) if mixture else _feed_forward("mlp", model.dim, model.ffn_dim)),
    )


def _qk_norms(model: LlamaKeys) -> list[Weight]:
    """The norms' weights; a tensor-parallel rank uses them for its heads only."""
    names = ("self_attn.q_norm.weight", "self_attn.k_norm.weight")
    return [Weight(name, (head_dim(model),), "replicated_partial_grad", "ones") for name in names]


def _feed_forward(module: str, dim: int, inner: int, roles: Sequence[TensorRole] = ("column", "row")) -> list[Weight]:
    into, out_of = roles
    return [
        Weight(f"{module}.gate_proj.weight", (inner, dim), into),
        Weight(f"{module}.up_proj.weight", (inner, dim), into),
        Weight(f"{module}.down_proj.weight", (dim, inner), out_of, "residual"),
    ]


def _experts(model: LlamaKeys) -> Iterator[Weight]:
    """A router and its experts, with Mixtral's names; then the shared experts, side by side in one feed-forward."""
    n = model.n_experts or 0
    gate = "block_sparse_moe.gate.weight"
    yield Weight("mlp.router.weight", (n, model.dim), "replicated_partial_grad", hf=gate)
    matrices = _feed_forward("mlp.experts", model.dim, expert_dim(model), ("part_column", "part_row"))
    for matrix, hf in zip(matrices, ("w1", "w3", "w2"), strict=True):
        yield replace(
            matrix,
            name=matrix.name.removesuffix(".weight"),
            shape=(n, *matrix.shape),
            hf=f"block_sparse_moe.experts.{{}}.{hf}.weight",
            used=model.experts_per_token,
        )
    if model.n_shared_experts:
        width = model.n_shared_experts * expert_dim(model)
        yield from _feed_forward("mlp.shared_experts", model.dim, width, ("part_column", "part_row"))


def around(model: LlamaKeys, layer: int) -> dict[str, TensorRole]:
    """Roles of the modules in a block that have no weights of their own."""
    return {ATTENTION: "gather", "mlp": "parts" if is_mixture(model, layer) else "gather"}


def after_blocks(model: LlamaKeys) -> list[Weight]:
    """The weights after the last block."""
    tied = "embed_tokens.weight" if model.tie_embeddings else ""
    return [
        Weight("norm.weight", (model.dim,), "norm", "ones", hf="model.norm.weight"),
        Weight("lm_head.weight", (model.vocab_size, model.dim), "head", tied_to=tied),
    ]


# --------------------------------------------------------------------------- small

_SMALL_HEAD = 8


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
    return keys | (_small_experts(model, ranks, n_layers) if model.n_experts else {})


def _small_experts(model: LlamaKeys, ranks: int, n_layers: int) -> dict[str, object]:
    chosen = min(model.experts_per_token, 2)
    dense = 1 if 0 < model.n_dense_layers < model.n_layers else min(model.n_dense_layers, n_layers)
    keys: dict[str, object] = {
        "n_experts": small_size(model.n_experts or 0, 2 * chosen, ranks),
        "experts_per_token": chosen,
        "n_shared_experts": min(model.n_shared_experts, 2),
        "n_dense_layers": dense,
    }
    return keys | ({"expert_dim": small_size(model.expert_dim, 16, ranks)} if model.expert_dim else {})


# --------------------------------------------------------------------------- Hugging Face

_FIELDS = {
    "vocab_size": "vocab_size",
    "hidden_size": "dim",
    "intermediate_size": "ffn_dim",
    "num_hidden_layers": "n_layers",
    "num_attention_heads": "n_heads",
    "num_key_value_heads": "n_kv_heads",
    "head_dim": "head_dim",
    "rms_norm_eps": "norm_eps",
    "initializer_range": "init_std",
    "tie_word_embeddings": "tie_embeddings",
}
# Mixtral's weight of the auxiliary loss is not among them: that loss has another form.
_EXPERT_FIELDS = {"num_local_experts": "n_experts", "num_experts_per_tok": "experts_per_token"}
_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}
_EXPERT_DEFAULTS = {
    "rms_norm_eps": 1e-5,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
    "sliding_window": None,
    "router_jitter_noise": 0.0,
}
_LIKE_MIXTRAL = {
    "qk_norm": ("none",),
    "n_shared_experts": (0,),
    "n_dense_layers": (0,),
    "router.scoring": ("softmax",),
    "router.renormalize": (True,),
    "router.load_balance": ("auxiliary_loss", "none"),
}

LLAMA = HfClass("llama", "LlamaForCausalLM", "Llama 2 and 3.x", _FIELDS, _DEFAULTS, 1e4, _FIXED, {"qk_norm": ("none",)})
MIXTRAL = HfClass(
    "mixtral",
    "MixtralForCausalLM",
    "Mixtral",
    _FIELDS | _EXPERT_FIELDS,
    _DEFAULTS | _EXPERT_DEFAULTS,
    1e6,
    _FIXED,
    _LIKE_MIXTRAL,
)
QWEN3 = HfClass(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3",
    _FIELDS,
    _DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
    1e4,
    _FIXED | {"use_sliding_window": False},
    {"qk_norm": ("head",)},
)
HF_CLASSES: tuple[HfClass, ...] = (LLAMA, MIXTRAL, QWEN3)


def hf_class(model: LlamaKeys) -> HfClass:
    """The class that computes the model, if it has the values of `HfClass.keys`."""
    if model.n_experts is not None:
        return MIXTRAL
    return LLAMA if model.qk_norm == "none" else QWEN3
