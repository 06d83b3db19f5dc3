"""The keys of the family `llama` (`llama.py`), and what follows from them alone.

A key is its attribute in `LlamaKeys` (the docstring is its help text), what it changes in the weights (`llama.py`) and
in Hugging Face's config.json (`llama_hf.py`), the rules that bind it to others (`llama_rules.py`), and the code of the
modules that reads it.
"""

from math import sqrt
from typing import Annotated, Any, Literal

from pydantic import Field, PlainSerializer

from configs.architectures.parts import head_dim, n_kv_heads
from configs.only_with import only_with
from configs.table import NonNegativeInt, PositiveFloat, PositiveInt, Table


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

_ATTENTION = only_with("layers", "full", unless="model.multi_token.depth")
_WITH_LOSS = ("auxiliary_loss", "bias_and_auxiliary_loss")
_WITH_BIAS = ("bias", "bias_and_auxiliary_loss")


Activation = Literal["swiglu", "geglu", "relu_squared"]
"""What a feed-forward does between its matrices."""


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
    """auxiliary_loss: of Switch, DeepSeek-V3 and Qwen3; bias: for the choice only (Wang et al. 2024)."""
    auxiliary_loss_weight: Annotated[PositiveFloat, only_with("load_balance", *_WITH_LOSS)] = 0.01
    """Weight of the auxiliary loss (summed over layers, averaged over sequences) relative to the mean cross-entropy."""
    auxiliary_loss_over: Annotated[Literal["sequence", "global_batch"], only_with("load_balance", *_WITH_LOSS)] = (
        "sequence"
    )
    """Whose load an auxiliary loss evens out: each sequence's, or the global batch's, by that of the step before."""
    bias_update_rate: Annotated[PositiveFloat, only_with("load_balance", *_WITH_BIAS)] = 0.001
    """Amount by which an expert's bias changes after each step."""

    @property
    def has_auxiliary_loss(self) -> bool:
        """Whether a loss balances the experts' load."""
        return self.load_balance in _WITH_LOSS

    @property
    def balances_global_batch(self) -> bool:
        """Whether that loss evens out the load of the global batch."""
        return self.has_auxiliary_loss and self.auxiliary_loss_over == "global_batch"

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
    n_kv_heads: Annotated[PositiveInt | None, _ATTENTION] = None
    """Number of key and value heads (grouped-query attention); default: n_heads."""
    head_dim: PositiveInt | None = None
    """Width of one head (of latent attention: of its queries and keys, rotated features included); default: dim /
    n_heads."""
    attention: Annotated[Literal["grouped", "latent"], _ATTENTION] = "grouped"
    """grouped: queries share heads of keys and values; latent: keys and values are compressed (DeepSeek-V3)."""
    latent: Annotated[Latent, only_with("attention", "latent")] = Latent()
    """Widths of latent attention."""
    layers: LayerKinds = ("full",)
    """Kinds of the layers, repeated: full has attention, delta has Gated DeltaNet in its place (Qwen3-Next)."""
    delta: Delta = Delta()
    """Widths of the layers of kind delta."""
    qk_norm: Annotated[Literal["none", "head", "full"], _ATTENTION, only_with("attention", "grouped")] = "none"
    """RMSNorms of queries and keys. head: of each, with one weight for all (Qwen3); full: over all heads (OLMo 2)."""
    attention_bias: Annotated[bool, _ATTENTION, only_with("attention", "grouped")] = False
    """Add biases to queries, keys and values (Qwen 2)."""
    attention_gate: Annotated[bool, _ATTENTION, only_with("attention", "grouped")] = False
    """Multiply each head's output by the sigmoid of one more projection (Qiu et al. 2025; Qwen3-Next)."""
    query_scale: Annotated[PositiveFloat | None, _ATTENTION] = None
    """Number by whose square root the scores of attention are divided; default: head_dim."""
    norm_position: Literal["before", "after", "both"] = "before"
    """Norms of attention and feed-forward: before their input, after their output (OLMo 2), or both (Gemma 3)."""
    norm_offset: bool = False
    """Norms multiply by 1 + weight, and their weights start at 0 (Gemma)."""
    ffn_dim: PositiveInt
    """Inner width of the feed-forward."""
    activation: Activation = "swiglu"
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
    rope_theta: Annotated[PositiveFloat, _ATTENTION] = 10000.0
    """Base of the rotary frequencies (10,000 in Llama 2, 500,000 in Llama 3, 1,000,000 in Qwen3)."""
    rope_scaling: Annotated[RopeScaling | None, _ATTENTION] = None
    """Scaling of the rotary frequencies, for longer sequences."""
    rope_fraction: Annotated[float, Field(gt=0, le=1), _ATTENTION, only_with("attention", "grouped")] = 1.0
    """Share of each head's features that are rotated, its first ones."""
    no_rope_every: Annotated[Annotated[int, Field(ge=2)] | None, _ATTENTION] = None
    """Every n-th layer has no rotary embedding (4 in SmolLM3); default: all have."""
    window: Annotated[PositiveInt | None, _ATTENTION] = None
    """Number of last tokens that attention sees, a token itself among them; default: all earlier ones."""
    window_pattern: Annotated[NonNegativeInt, only_with("window")] = 0
    """Every n-th layer sees all earlier tokens all the same (6 in Gemma 3, 4 in OLMo 3); 0: none does."""
    window_rope_theta: Annotated[PositiveFloat | None, only_with("window")] = None
    """rope_theta of the layers with a window, which then have no rope_scaling (Gemma 3); default: as in all layers."""
    max_seq_len: PositiveInt | None = None
    """Longest sequence that the model is for, which exports declare; default: training.seq_len, or that of
    rope_scaling. An export never declares less than training.seq_len."""
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

    @property
    def keys_in_vain(self) -> frozenset[str]:
        """The keys that do nothing in this model, since no layer has attention."""
        return frozenset() if has_attention(self) else _KEYS_OF_ATTENTION


_KEYS_OF_ATTENTION = frozenset(name for name, key in LlamaKeys.model_fields.items() if _ATTENTION in key.metadata)


def n_further(model: object) -> int:
    """Number of modules that predict further tokens; 0 for a `[model]` without these keys."""
    return model.multi_token.depth or 0 if isinstance(model, LlamaKeys) else 0


def has_attention(model: LlamaKeys) -> bool:
    """Whether any layer has attention, or a module that predicts further tokens."""
    return "full" in model.layers or n_further(model) > 0


def has_gate(activation: Activation) -> bool:
    """Whether a feed-forward has a matrix of gates."""
    return activation != "relu_squared"


def expert_dim(model: LlamaKeys) -> int:
    """Inner width of one expert."""
    return model.expert_dim or model.ffn_dim


def is_mixture(model: LlamaKeys, layer: int) -> bool:
    """Whether a layer has experts instead of a dense feed-forward."""
    return model.n_experts is not None and layer >= model.n_dense_layers


def window_of(model: object, layer: int) -> int | None:
    """Number of last tokens that a layer's attention sees; None: all."""
    if not isinstance(model, LlamaKeys):
        return None
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


_OF_TRAINING = ("load_balance", "auxiliary_loss_weight", "auxiliary_loss_over", "bias_update_rate")
_NOT_COMPUTED = {"init_std", "max_seq_len", *(f"router.{key}" for key in _OF_TRAINING)}
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
    return {key: value for key, value in values.items() if key not in _NOT_COMPUTED | model.keys_in_vain}
