"""Llama 2 and 3.x, Qwen3; with experts, Mixtral, DeepSeek-V3 and similar models. Modules: `models/llama.py`.

The weights are described here, the keys in `llama_keys.py`, the rules between them in `llama_rules.py`, and the classes
of Hugging Face in `llama_hf.py`.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain
from math import ceil, sqrt

from configs.architectures.llama_hf import HF_CLASSES, name_of_experts, name_of_router, name_of_shared
from configs.architectures.llama_keys import (
    Delta,
    Latent,
    LlamaKeys,
    expert_dim,
    has_gate,
    is_delta,
    is_mixture,
    n_further,
)
from configs.architectures.llama_keys import computed as computed
from configs.architectures.llama_keys import shape as shape
from configs.architectures.llama_keys import split_sizes as split_sizes
from configs.architectures.llama_rules import model_rules as model_rules
from configs.architectures.llama_rules import rules as rules
from configs.architectures.parts import HfClass, Start, Weight, head_dim, n_kv_heads, small_size
from configs.plan import TensorRole

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
    if has_gate(model.activation):
        yield Weight(f"{module}.gate_proj.weight", (inner, model.dim), into)
    yield Weight(f"{module}.up_proj.weight", (inner, model.dim), into)
    yield Weight(f"{module}.down_proj.weight", (model.dim, inner), out_of, "residual")


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
