"""What must hold between the keys of the family `llama` (`llama.py`)."""

from collections.abc import Iterator
from math import sqrt
from typing import Any

from configs.architectures.llama_keys import (
    Delta,
    LlamaKeys,
    expert_dim,
    is_delta,
    n_further,
    rope_dim,
    window_of,
)
from configs.architectures.parts import head_dim, n_kv_heads
from configs.errors import quotient
from configs.own_code import is_import_path


def rules(config: Any) -> Iterator[tuple[str, str]]:
    """What is wrong between the keys: the key to blame, and a message."""
    yield from model_rules(config.model)
    yield from _delta_and_context(config)
    yield from _window_and_machine(config)
    yield from _further_and_length(config)
    yield from _mup(config)


def model_rules(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    """What is wrong in the model alone, in whatever job: the key to blame, and a message."""
    for rule in (_head_width, _kv_heads, _latent, _experts_fit, _router, _groups, _rope, _norms, _window, _delta):
        yield from rule(model)


def _head_width(model: LlamaKeys) -> Iterator[tuple[str, str]]:
    if model.head_dim is None and model.dim % model.n_heads:
        yield (
            "model.dim",
            f"dim {model.dim} is not divisible by n_heads {model.n_heads} ({quotient(model.dim, model.n_heads)}); "
            "change one of them, or set head_dim",
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
            f"n_heads {model.n_heads} is not divisible by n_kv_heads {model.n_kv_heads} "
            f"({quotient(model.n_heads, n_kv_heads(model))}); change one of them",
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
            f"n_experts {model.n_experts} make no {groups} groups of two experts or more "
            f"({quotient(model.n_experts, groups)}); change one of them",
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
    if scaling and scaling.kind == "yarn" and model.rope_theta <= 1:
        yield (
            "model.rope_theta",
            f"rope_theta {model.rope_theta:g} with rope_scaling of kind yarn, which needs a base above 1",
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
    layers = (layer for layer in range(model.n_layers + n_further(model)) if not is_delta(model, layer))
    if model.window and not any(window_of(model, layer) for layer in layers):
        yield (
            "model.window_pattern",
            f"window_pattern {model.window_pattern} leaves no layer with a window; leave model.window out",
        )


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
            f"value_heads {delta.value_heads} is not divisible by key_heads {delta.key_heads} "
            f"({quotient(delta.value_heads, delta.key_heads)}); change one of them",
        )


def _delta_and_context(config: Any) -> Iterator[tuple[str, str]]:
    """Context parallelism by all_to_all gives each rank some of the heads of whole sequences."""
    cp = config.mesh.cp if config.context.method == "all_to_all" else 1
    tp = config.mesh.tp
    heads = config.model.delta.key_heads
    if cp > 1 and "delta" in config.model.layers and heads % (cp * tp) and heads % tp == 0:
        ranks = f"cp {cp} x tp {tp} = {cp * tp}" if tp > 1 else f"cp {cp}"
        yield (
            "mesh.cp",
            f"{ranks} does not divide model.delta.key_heads {heads} ({quotient(heads, cp * tp)}), of which "
            'context.method "all_to_all" gives each rank some; set "gather" or "ring", or change one of them',
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
    if config.model.window and config.attention.backend not in ("auto", "flash2"):
        yield (
            "attention.backend",
            f'{config.attention.backend} computes no window (model.window); set "auto" or "flash2"',
        )
