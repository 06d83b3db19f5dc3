"""The Hugging Face classes that compute models of `configs/architectures/llama.py`.

An option of [model] that a class does not have keeps its default there (`_PLAIN`), so a new option changes the classes
that have it only.
"""

from collections.abc import Mapping
from typing import Any, TypeVar

from configs.architectures.parts import HfClass, head_dim

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
_DEFAULTS = {"rms_norm_eps": 1e-6, "initializer_range": 0.02, "tie_word_embeddings": False}
_FIXED = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0.0,
    "quantization_config": None,
}
_WITHOUT_WINDOW = {"sliding_window": None}
_UNUSED_WINDOW = {"use_sliding_window": False}
_PLAIN: dict[str, tuple[Any, ...]] = {
    "n_experts": (None,),
    "qk_norm": ("none",),
    "attention_bias": (False,),
    "attention_gate": (False,),
    "query_scale": (None,),
    "norm_position": ("before",),
    "norm_offset": (False,),
    "activation": ("swiglu",),
    "embedding_scale": (1.0,),
    "rope_fraction": (1.0,),
    "no_rope_every": (None,),
    "window": (None,),
    "window_pattern": (0,),
    "window_rope_theta": (None,),
    "attention": ("grouped",),
    "layers": (("full",),),
    "shared_expert_gate": (False,),
    "router.n_groups": (None,),
    "router.scaling_factor": (1.0,),
}
_SOFTMAX = {"router.scoring": ("softmax",), "router.load_balance": ("auxiliary_loss", "none")}
"""The router of most classes with experts."""
_Value = TypeVar("_Value")


def _size(config: Mapping[str, Any], name: str, default: int) -> int:
    """A field that is a whole number.

    Raises:
        ValueError: it is something else.
    """
    value = config.get(name, default)
    if type(value) is not int:
        raise ValueError(f"{name} is no whole number")
    return value


# --------------------------------------------------------------------------- layers of two kinds


def _without(table: Mapping[str, _Value], *keys: str) -> dict[str, _Value]:
    """A table without some of its keys; of `_PLAIN`, those that may have any value."""
    return {key: value for key, value in table.items() if key not in keys}


def _every(kinds: list[Any], special: Any, other: Any) -> int:
    """n, where every n-th of the layers is special; 0 if none is.

    Raises:
        ValueError: they follow no such rule.
    """
    n = kinds.index(special) + 1 if special in kinds else 0
    if kinds != [special if n and (layer + 1) % n == 0 else other for layer in range(len(kinds))]:
        raise ValueError("is no list in which every n-th layer differs from the others")
    return n


def _layer_kinds(model: Any) -> list[str]:
    n = model.window_pattern
    return [
        "sliding_attention" if model.window and not (n and (layer + 1) % n == 0) else "full_attention"
        for layer in range(model.n_layers)
    ]


def _write_windows(model: Any) -> dict[str, Any]:
    return {"sliding_window": model.window or model.n_layers, "layer_types": _layer_kinds(model)}


def _read_windows(config: Mapping[str, Any], pattern: int) -> dict[str, Any]:
    """The keys from `layer_types`; without it, every `pattern`-th layer has full attention (0: none has)."""
    kinds = config.get("layer_types")
    n = pattern if kinds is None else _every_named(kinds)
    window = config.get("sliding_window", 4096)
    return {} if n == 1 or window is None else {"window": window, "window_pattern": n}


def _every_named(kinds: Any) -> int:
    """`_every` of layer_types, in which full attention is special."""
    allowed = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or any(kind not in allowed for kind in kinds):
        raise ValueError(f"layer_types: the kinds of layers must be among {', '.join(allowed)}")
    try:
        return _every(kinds, *allowed)
    except ValueError as error:
        raise ValueError(f"layer_types {error}") from None


def _read_window(config: Mapping[str, Any]) -> dict[str, Any]:
    """The window of every layer. With `layer_types`, transformers builds a Ministral instead, which may mix kinds."""
    keys = _read_windows(config, 0)
    if keys.get("window_pattern"):
        raise ValueError("layer_types has layers of two kinds, as Ministral has")
    return {"window": keys.get("window")}


def _write_rope_layers(model: Any) -> dict[str, Any]:
    n = model.no_rope_every
    return {
        "no_rope_layers": [int(n is None or (layer + 1) % n > 0) for layer in range(model.n_layers)],
        "no_rope_layer_interval": n or model.n_layers + 1,
        "layer_types": ["full_attention"] * model.n_layers,
        "pad_token_id": None,  # the class's own is beyond smaller vocabularies
    }


def _read_rope_layers(config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = config.get("no_rope_layers")
    if rotated is None:
        return {"no_rope_every": config.get("no_rope_layer_interval", 4)}
    try:
        n = _every(list(rotated), 0, 1)
    except (TypeError, ValueError):
        raise ValueError("no_rope_layers is no list in which every n-th layer is 0, and the others 1") from None
    if n == 1:
        raise ValueError("no_rope_layers: no layer has a rotary embedding")
    return {"no_rope_every": n} if n else {}


def _write_latent(model: Any) -> dict[str, Any]:
    groups = model.router.n_groups
    return {
        "head_dim": model.latent.rope_head_dim,
        "qk_nope_head_dim": head_dim(model) - model.latent.rope_head_dim,
        "moe_intermediate_size": model.expert_dim or model.ffn_dim,
        "n_group": groups or 1,
        "topk_group": model.router.groups_per_token if groups else 1,
        "num_nextn_predict_layers": model.multi_token.depth or 0,
    }


def _read_latent(config: Mapping[str, Any]) -> dict[str, Any]:
    heads = config.get("num_attention_heads", 128)
    if config.get("num_key_value_heads", heads) not in (None, heads):
        raise ValueError(f"num_key_value_heads is not num_attention_heads, {heads}")
    groups = _size(config, "n_group", 8)
    chosen = _size(config, "topk_group", 4)
    expert_dim = _size(config, "moe_intermediate_size", 2048)
    is_dense_first = _size(config, "first_k_dense_replace", 3) > 0
    return {
        "head_dim": _size(config, "qk_nope_head_dim", 128) + _size(config, "qk_rope_head_dim", 64),
        "latent.query_rank": config.get("q_lora_rank", 1536),
        "multi_token.depth": _size(config, "num_nextn_predict_layers", 0) or None,
        **({"expert_dim": expert_dim} if is_dense_first else {"ffn_dim": expert_dim}),
        **({"router.n_groups": groups, "router.groups_per_token": chosen} if groups > 1 else {}),
    }


def _write_deepseek(model: Any) -> dict[str, Any]:
    return {
        "moe_intermediate_size": model.expert_dim or model.ffn_dim,
        "n_shared_experts": model.n_shared_experts or None,
    }


def _read_deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    width = config.get("moe_intermediate_size", 1407)
    if not config.get("n_routed_experts"):
        return {}
    return {"expert_dim": width} if config.get("first_k_dense_replace") else {"ffn_dim": width}


def _write_hybrid(model: Any) -> dict[str, Any]:
    kinds = [model.layers[layer % len(model.layers)] for layer in range(model.n_layers)]
    return {"layer_types": [_KINDS[kind] for kind in kinds], **_write_feed_forwards(model)}


def _write_feed_forwards(model: Any) -> dict[str, Any]:
    width = model.expert_dim or model.ffn_dim
    return {
        "intermediate_size": model.ffn_dim,
        "moe_intermediate_size": width,
        "num_experts": model.n_experts or 0,
        "shared_expert_intermediate_size": model.n_shared_experts * width,
        "mlp_only_layers": list(range(model.n_dense_layers)),
    }


_KINDS = {"delta": "linear_attention", "full": "full_attention"}
_MOST_LAYERS = 1 << 12
"""Limit on layers whose kinds are looked at before the tensors are counted."""


def _read_hybrid(config: Mapping[str, Any]) -> dict[str, Any]:
    n_layers = _size(config, "num_hidden_layers", 48)
    if not 0 < n_layers <= _MOST_LAYERS:
        raise ValueError(f"num_hidden_layers {n_layers} is not from 1 to {_MOST_LAYERS}")
    kinds = config.get("layer_types")
    if kinds is None:
        interval = _size(config, "full_attention_interval", 4)
        if interval < 1:
            raise ValueError(f"full_attention_interval {interval} is below 1")
        kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(n_layers)]
    names = {name: kind for kind, name in _KINDS.items()}
    if not isinstance(kinds, list) or len(kinds) != n_layers or any(kind not in _KINDS.values() for kind in kinds):
        raise ValueError(f"layer_types: a list of {n_layers} kinds, each among {', '.join(names)}")
    feed_forwards = _read_feed_forwards(config, n_layers, n_experts=512, expert_dim=512, shared_dim=512)
    return {"layers": _shortest([names[kind] for kind in kinds]), **feed_forwards}


def _read_feed_forwards(
    config: Mapping[str, Any], n_layers: int, n_experts: int, expert_dim: int, shared_dim: int
) -> dict[str, Any]:
    """Experts, the shared one's width as a multiple of theirs, and leading dense layers; without experts all are.

    The last three arguments are defaults of the class.
    """
    n_experts = config.get("num_experts", n_experts)
    inner = config.get("intermediate_size", 5632)
    width = _size(config, "moe_intermediate_size", expert_dim)
    shared = _size(config, "shared_expert_intermediate_size", shared_dim)
    dense = config.get("mlp_only_layers") or []
    if not n_experts:
        return {"ffn_dim": inner}
    if not isinstance(dense, list) or dense != list(range(len(dense))) or len(dense) >= n_layers:
        raise ValueError(f"mlp_only_layers = {dense!r} are not the leading layers, followed by others")
    if width < 1 or shared < 1 or shared % width:
        raise ValueError(f"shared_expert_intermediate_size {shared} is no multiple of moe_intermediate_size {width}")
    keys = {"n_experts": n_experts, "n_shared_experts": shared // width, "shared_expert_gate": True}
    return keys | (
        {"ffn_dim": inner, "expert_dim": width, "n_dense_layers": len(dense)} if dense else {"ffn_dim": width}
    )


def _shortest(kinds: list[str]) -> list[str]:
    """The shortest list that repeats as these kinds."""
    n = next(n for n in range(1, len(kinds) + 1) if kinds[n:] == kinds[:-n])
    return kinds[:n]


# --------------------------------------------------------------------------- classes

LLAMA = HfClass(
    "llama", "LlamaForCausalLM", "Llama 2 and 3.x", _FIELDS, _DEFAULTS, 1e4, _FIXED | _WITHOUT_WINDOW, _PLAIN
)
# Mixtral's weight of the auxiliary loss is not among the fields: that loss has another form.
MIXTRAL = HfClass(
    "mixtral",
    "MixtralForCausalLM",
    "Mixtral",
    _FIELDS | {"num_local_experts": "n_experts", "num_experts_per_tok": "experts_per_token"},
    _DEFAULTS | {"rms_norm_eps": 1e-5, "num_key_value_heads": 8, "num_local_experts": 8, "num_experts_per_tok": 2},
    1e6,
    _FIXED | _WITHOUT_WINDOW | {"router_jitter_noise": 0.0},
    _without(_PLAIN, "n_experts")
    | {
        "n_shared_experts": (0,),
        "n_dense_layers": (0,),
        "router.scoring": ("softmax",),
        "router.renormalize": (True,),
        "router.load_balance": ("auxiliary_loss", "none"),
    },
)
QWEN2 = HfClass(
    "qwen2",
    "Qwen2ForCausalLM",
    "Qwen 2 and 2.5",
    _FIELDS,
    _DEFAULTS | {"num_key_value_heads": 32},
    1e4,
    _without(_FIXED, "attention_bias") | _UNUSED_WINDOW,
    _PLAIN | {"attention_bias": (True,)},
)
QWEN3 = HfClass(
    "qwen3",
    "Qwen3ForCausalLM",
    "Qwen3",
    _FIELDS,
    _DEFAULTS | {"num_key_value_heads": 32, "head_dim": 128},
    1e4,
    _FIXED | _UNUSED_WINDOW,
    _PLAIN | {"qk_norm": ("head",)},
)
QWEN3_MOE = HfClass(
    "qwen3_moe",
    "Qwen3MoeForCausalLM",
    "Qwen3 with experts",
    _without(_FIELDS, "intermediate_size")
    | {
        "moe_intermediate_size": "ffn_dim",
        "num_experts": "n_experts",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "router.renormalize",
    },
    _DEFAULTS
    | {
        "num_key_value_heads": 4,
        "moe_intermediate_size": 768,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": False,
    },
    1e4,
    _FIXED | _UNUSED_WINDOW | {"decoder_sparse_step": 1, "mlp_only_layers": []},
    _without(_PLAIN, "n_experts")
    | {
        "qk_norm": ("head",),
        "n_shared_experts": (0,),
        "n_dense_layers": (0,),
        **_SOFTMAX,
    },
    write=lambda model: {"intermediate_size": model.ffn_dim, "num_local_experts": model.n_experts},
    read=lambda config: {"n_experts": config["num_local_experts"]} if "num_local_experts" in config else {},
)
QWEN2_MOE = HfClass(
    "qwen2_moe",
    "Qwen2MoeForCausalLM",
    "Qwen 1.5 and 2 with experts",
    _without(_FIELDS, "intermediate_size")
    | {
        "qkv_bias": "attention_bias",
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "router.renormalize",
    },
    _DEFAULTS
    | {
        "num_key_value_heads": 16,
        "qkv_bias": True,
        "num_experts_per_tok": 4,
        "norm_topk_prob": False,
    },
    1e4,
    _without(_FIXED, "attention_bias") | _UNUSED_WINDOW | {"decoder_sparse_step": 1},
    _without(_PLAIN, "n_experts", "attention_bias", "shared_expert_gate") | _SOFTMAX,
    gates_shared_expert=True,
    write=_write_feed_forwards,
    read=lambda config: _read_feed_forwards(
        config, _size(config, "num_hidden_layers", 24), n_experts=60, expert_dim=1408, shared_dim=5632
    ),
)
# transformers has no such class: DeepSeek's models come with code of their own, which has no width of heads. Rotary
# frequencies that are scaled have another form there.
DEEPSEEK = HfClass(
    "deepseek",
    "DeepseekForCausalLM",
    "DeepSeekMoE",
    _without(_FIELDS, "head_dim")
    | {
        "n_routed_experts": "n_experts",
        "num_experts_per_tok": "experts_per_token",
        "n_shared_experts": "n_shared_experts",
        "first_k_dense_replace": "n_dense_layers",
    },
    _DEFAULTS,
    1e4,
    _FIXED | {"scoring_func": "softmax", "norm_topk_prob": False, "moe_layer_freq": 1},
    _without(_PLAIN, "n_experts")
    | {
        "head_dim": (None,),
        "rope_scaling": (None,),
        "router.scoring": ("softmax",),
        "router.renormalize": (False,),
        "router.load_balance": ("auxiliary_loss", "none"),
    },
    in_transformers=False,
    write=_write_deepseek,
    read=_read_deepseek,
)
MISTRAL = HfClass(
    "mistral",
    "MistralForCausalLM",
    "Mistral",
    _FIELDS,
    _DEFAULTS | {"num_key_value_heads": 8},
    1e4,
    _FIXED,
    _without(_PLAIN, "window"),
    write=lambda model: {"sliding_window": model.window},
    read=_read_window,
)
OLMO2 = HfClass(
    "olmo2",
    "Olmo2ForCausalLM",
    "OLMo 2",
    _FIELDS,
    _DEFAULTS | {"rms_norm_eps": 1e-5},
    1e4,
    _FIXED,
    _PLAIN | {"qk_norm": ("full",), "norm_position": ("after",)},
)
OLMO3 = HfClass(
    "olmo3",
    "Olmo3ForCausalLM",
    "OLMo 3",
    _FIELDS,
    _DEFAULTS | {"rms_norm_eps": 1e-5},
    5e5,
    _FIXED,
    _without(_PLAIN, "window", "window_pattern", "window_rope_theta")
    | {"qk_norm": ("full",), "norm_position": ("after",)},
    rope_by_layer=True,
    write=_write_windows,
    read=lambda config: _read_windows(config, 4),
)
SMOLLM3 = HfClass(
    "smollm3",
    "SmolLM3ForCausalLM",
    "SmolLM3",
    _FIELDS,
    _DEFAULTS | {"num_key_value_heads": 4, "tie_word_embeddings": True},
    2e6,
    _FIXED | _UNUSED_WINDOW,
    _without(_PLAIN, "no_rope_every"),
    write=_write_rope_layers,
    read=_read_rope_layers,
)
GEMMA3 = HfClass(
    "gemma3_text",
    "Gemma3ForCausalLM",
    "Gemma 3, text",
    _FIELDS | {"query_pre_attn_scalar": "query_scale"},
    _DEFAULTS | {"num_key_value_heads": 4, "head_dim": 256, "query_pre_attn_scalar": 256, "tie_word_embeddings": True},
    1e6,
    _without(_FIXED, "hidden_act")
    | {
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    },
    _without(_PLAIN, "window", "window_pattern", "window_rope_theta", "query_scale")
    | {
        "qk_norm": ("head",),
        "norm_position": ("both",),
        "norm_offset": (True,),
        "activation": ("geglu",),
        "embedding_scale": ("sqrt_dim",),
    },
    rope_by_layer=True,
    window_rope_theta=1e4,
    # transformers takes integers only
    write=lambda model: _write_windows(model) | {"query_pre_attn_scalar": int(model.query_scale or head_dim(model))},
    read=lambda config: _read_windows(config, config.get("sliding_window_pattern", 6)),
)
DEEPSEEK_V3 = HfClass(
    "deepseek_v3",
    "DeepseekV3ForCausalLM",
    "DeepSeek-V3",
    _without(_FIELDS, "num_key_value_heads", "head_dim")
    | {
        "kv_lora_rank": "latent.key_value_rank",
        "q_lora_rank": "latent.query_rank",
        "qk_rope_head_dim": "latent.rope_head_dim",
        "v_head_dim": "latent.value_head_dim",
        "n_routed_experts": "n_experts",
        "num_experts_per_tok": "experts_per_token",
        "n_shared_experts": "n_shared_experts",
        "first_k_dense_replace": "n_dense_layers",
        "norm_topk_prob": "router.renormalize",
        "routed_scaling_factor": "router.scaling_factor",
    },
    _DEFAULTS
    | {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
    },
    1e4,
    _FIXED
    | {
        "rope_interleave": True,
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
        "moe_layer_freq": 1,
    },
    _without(_PLAIN, "n_experts", "attention", "query_scale", "router.n_groups", "router.scaling_factor")
    | {
        "attention": ("latent",),
        "router.scoring": ("sigmoid",),
        "router.load_balance": ("bias", "bias_and_auxiliary_loss"),
    },
    yarn_scales_scores=True,
    has_further=True,
    write=_write_latent,
    read=_read_latent,
)
QWEN3_NEXT = HfClass(
    "qwen3_next",
    "Qwen3NextForCausalLM",
    "Qwen3-Next",
    _without(_FIELDS, "intermediate_size")
    | {
        "num_experts_per_tok": "experts_per_token",
        "norm_topk_prob": "router.renormalize",
        "linear_num_key_heads": "delta.key_heads",
        "linear_num_value_heads": "delta.value_heads",
        "linear_key_head_dim": "delta.key_head_dim",
        "linear_value_head_dim": "delta.value_head_dim",
        "linear_conv_kernel_dim": "delta.conv_kernel",
    },
    _DEFAULTS
    | {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "num_experts_per_tok": 10,
        "norm_topk_prob": True,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    1e4,
    _FIXED | {"decoder_sparse_step": 1},
    _without(_PLAIN, "n_experts", "layers", "rope_fraction", "shared_expert_gate")
    | {
        "qk_norm": ("head",),
        "attention_gate": (True,),
        "norm_offset": (True,),
        **_SOFTMAX,
    },
    rope_fraction=0.25,
    gates_shared_expert=True,
    left_out="mtp.",
    write=_write_hybrid,
    read=_read_hybrid,
)
HF_CLASSES: tuple[HfClass, ...] = (
    LLAMA,
    MIXTRAL,
    QWEN2,
    QWEN3,
    QWEN3_MOE,
    DEEPSEEK,
    QWEN2_MOE,
    MISTRAL,
    OLMO2,
    OLMO3,
    SMOLLM3,
    GEMMA3,
    DEEPSEEK_V3,
    QWEN3_NEXT,
)

_MIXTRALS_EXPERTS = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}


def name_of_router(kind: HfClass) -> str:
    """Hugging Face's name of a router's weight, in a block."""
    return "block_sparse_moe.gate.weight" if kind is MIXTRAL else "mlp.gate.weight"


def name_of_experts(kind: HfClass, matrix: str) -> str:
    """Hugging Face's name of one expert's matrix, in a block; {} stands for the expert's number."""
    if kind is MIXTRAL:
        return f"block_sparse_moe.experts.{{}}.{_MIXTRALS_EXPERTS[matrix]}.weight"
    return f"mlp.experts.{{}}.{matrix}.weight"


def name_of_shared(kind: HfClass, name: str) -> str:
    """Hugging Face's name of a matrix of the shared experts, in a block."""
    return name.replace("shared_experts", "shared_expert") if kind.gates_shared_expert else name
