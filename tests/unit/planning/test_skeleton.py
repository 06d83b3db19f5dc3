"""What the estimates know of a model, against the parallelized model itself."""

import pytest

from configs.schema import Model
from models import build_model
from trainer.planning.skeleton import skeleton

TOY = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 80}
MIXTURE = TOY | {"n_experts": 5, "n_shared_experts": 2, "expert_dim": 24, "n_dense_layers": 1}


@pytest.mark.parametrize("keys", [TOY, MIXTURE, TOY | {"tie_embeddings": True, "n_layers": 1}])
def test_names_and_shapes_are_the_models(keys):
    model = build_model(Model(**keys))
    assert skeleton(Model(**keys)).shapes == {name: tuple(p.shape) for name, p in model.named_parameters()}


def test_where_a_parameter_belongs():
    found = skeleton(Model(**MIXTURE))
    head, q_proj = "lm_head.weight", "layers.2.self_attn.q_proj.weight"
    assert [found.block_of(name) for name in (head, q_proj)] == [None, 2]
    assert [found.fsdp_group_of(name) for name in ("norm.weight", head, q_proj)] == ["lm_head", "lm_head", "layers.2"]
    assert skeleton(Model(**TOY, tie_embeddings=True)).fsdp_group_of("norm.weight") == "root"
    assert [found.is_before_blocks(name) for name in ("embed_tokens.weight", head, q_proj)] == [True, False, False]


def test_what_tensor_parallelism_cuts():
    found = skeleton(Model(**MIXTURE))
    cut = {name: found.tp_dimension(name) for name in found.shapes}
    expected = {
        "embed_tokens.weight": -2,
        "layers.0.input_layernorm.weight": None,
        "layers.0.self_attn.v_proj.weight": -2,
        "layers.0.self_attn.o_proj.weight": -1,
        "layers.0.mlp.up_proj.weight": -2,
        "layers.0.mlp.down_proj.weight": -1,
        "layers.1.mlp.router.weight": None,
        "layers.1.mlp.experts.gate_proj": -2,
        "layers.1.mlp.experts.down_proj": -1,
        "layers.1.mlp.shared_experts.down_proj.weight": -1,
        "norm.weight": None,
        "lm_head.weight": -2,
    }
    assert {name: cut[name] for name in expected} == expected
    assert {name for name in found.shapes if found.is_of_experts(name)} == {
        f"layers.{layer}.mlp.experts.{matrix}_proj" for layer in (1, 2) for matrix in ("gate", "up", "down")
    }
