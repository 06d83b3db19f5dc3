"""Run keys whose models the parity table computes on every axis: each option of [model], and those of families."""

MOE: dict[str, object] = {
    "model.n_experts": 64,
    "model.experts_per_token": 2,
    "model.n_shared_experts": 1,
    "model.expert_dim": 16,
    "model.n_dense_layers": 1,
    "model.router.auxiliary_loss_weight": 0.1,
}
LATENT: dict[str, object] = {
    "model.attention": "latent",
    "model.n_kv_heads": 8,
    "model.head_dim": 12,
    "model.latent": "{query_rank = 24, key_value_rank = 20, rope_head_dim = 4, value_head_dim = 6}",
}
DOCUMENTS: dict[str, object] = {
    "data.document_mask": "true",
    "data.sources": '[{name = "documents", kind = "synthetic", document_length = 8}]',
}
OPTIONS: dict[str, dict[str, object]] = {
    "tied embeddings": {"model.tie_embeddings": "true"},
    "qk_norm over all heads": {"model.qk_norm": "full"},
    "attention bias": {"model.attention_bias": "true"},
    "attention gate": {"model.attention_gate": "true"},
    "query scale": {"model.query_scale": 24},
    "latent attention": LATENT,
    "latent attention, whole queries, wide values": {
        **LATENT,
        "model.latent": "{key_value_rank = 20, rope_head_dim = 6, value_head_dim = 12}",
        "model.query_scale": 24,
    },
    "groups of experts": {
        **MOE,
        "model.router.n_groups": 8,
        "model.router.groups_per_token": 2,
        "model.router.scaling_factor": 2.5,
    },
    "norms after": {"model.norm_position": "after"},
    "norms before and after": {"model.norm_position": "both"},
    "norms with an offset": {"model.norm_offset": "true", "model.qk_norm": "head"},
    "geglu": {"model.activation": "geglu"},
    "squared relu": {"model.activation": "relu_squared"},
    "embedding scale": {"model.embedding_scale": "sqrt_dim"},
    "part of a head rotated": {"model.rope_fraction": 0.5},
    "every second layer rotated": {"model.no_rope_every": 2},
    "YaRN": {"model.rope_scaling": '{kind = "yarn", factor = 4.0, original_seq_len = 16}'},
    "linear scaling": {"model.rope_scaling": '{kind = "linear", factor = 4.0}'},
    "window": {"model.window": 5},
    "window, every third layer whole": {"model.window": 9, "model.window_pattern": 3, "model.window_rope_theta": 500},
    "window, documents": {"model.window": 5, **DOCUMENTS},
}
FAMILIES: dict[str, dict[str, object]] = {
    "Qwen 2": {"model.attention_bias": "true", "model.tie_embeddings": "true"},
    "Qwen3 with experts": {"model.qk_norm": "head", **MOE},
    "OLMo 3": {
        "model.norm_position": "after",
        "model.qk_norm": "full",
        "model.window": 6,
        "model.window_pattern": 4,
        **DOCUMENTS,
    },
    "Gemma 3": {
        "model.qk_norm": "head",
        "model.query_scale": 24,
        "model.norm_position": "both",
        "model.norm_offset": "true",
        "model.activation": "geglu",
        "model.embedding_scale": "sqrt_dim",
        "model.window": 6,
        "model.window_pattern": 2,
        "model.window_rope_theta": 500,
    },
    "DeepSeek-V3": {
        **LATENT,
        **MOE,
        "model.router.scoring": "sigmoid",
        "model.router.n_groups": 8,
        "model.router.groups_per_token": 2,
        "model.router.scaling_factor": 2.5,
        "model.router.load_balance": "bias_and_auxiliary_loss",
        "model.router.bias_update_rate": 0.01,
        "model.rope_scaling": '{kind = "yarn", factor = 4.0, original_seq_len = 16}',
        **DOCUMENTS,
    },
    "gate, squared relu, experts, window": {
        "model.attention_gate": "true",
        "model.activation": "relu_squared",
        "model.rope_fraction": 0.5,
        "model.window": 7,
        **MOE,
    },
}
