"""Pipeline stages of Hugging Face's families, chained in one process, against the whole model in float64."""

import pytest
import torch
import torch.nn.functional as F

from configs.errors import ConfigError
from configs.load import load
from models import build_model
from parallelisms.init import materialize
from tests.hf_families import NEEDS_TRANSFORMERS, words, write_config
from tests.marked import marked
from trainer.planning.unknown_names import require_known_names

pytestmark = NEEDS_TRANSFORMERS
BOUND = 1e-11
UNTIED = {"tie_word_embeddings": False}
FAMILIES = {
    **{"llama": {}, "qwen3": UNTIED, "gpt2": UNTIED, "gemma3_text": UNTIED, "mixtral": {}, "deepseek_v3": {}},
    "llama of any length": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
        "max_position_embeddings": 8,
    },
    "granite": {"embedding_multiplier": 6.0, **UNTIED},
    "opt": {"ffn_dim": 96, "dropout": 0.0, "word_embed_proj_dim": 32, **UNTIED},
    "gpt_neox": {},
    "falcon_h1": UNTIED,
    "bloom": {"n_layer": 2, "n_head": 4, "hidden_dropout": 0.0, "attention_dropout": 0.0, **UNTIED},
    "ctrl": {"n_embd": 64, "n_layer": 2, "n_head": 4, "dff": 96, "resid_pdrop": 0.0, "embd_pdrop": 0.0, **UNTIED},
}
"""OPT has learned positions and projections at both ends; Granite scales its embeddings outside of any module. Bloom
computes in the type of its embeddings' norm. CTRL changes its embeddings in place, on stages without them, too. Dynamic
frequencies depend on the length of the sequences."""


def model_of(tmp_path, family, **fields):
    folder = write_config(tmp_path / family, family.partition(" ")[0], **fields)
    config = load("debug.toml", words(folder), world_size=1).config
    with torch.device("meta"):
        return build_model(config.model).double()


def summed(hidden, weight, bias=None):
    targets = torch.arange(hidden.shape[0] * hidden.shape[1]) % weight.shape[0]
    return F.cross_entropy(F.linear(hidden, weight, bias).flatten(0, 1), targets, reduction="sum")


@pytest.mark.parametrize("family", marked(FAMILIES, slow=["falcon_h1"]))
def test_stages_compute_what_the_model_computes(tmp_path, family):
    tokens = torch.randint(3, 160, (2, 16), generator=torch.Generator().manual_seed(1))
    whole, first, last = (model_of(tmp_path, family, **FAMILIES[family]) for _ in range(3))
    plan = whole.plan
    first.leave_out((plan.blocks[1], *plan.after_blocks))
    last.leave_out((plan.blocks[0], *plan.before_blocks))
    for model in (whole, first, last):
        materialize(model, torch.device("cpu"), 3)
    loss = whole(tokens, loss=summed)
    loss.backward()
    found = last(first(tokens, loss=summed), loss=summed)
    found.backward()
    assert abs(found / loss - 1) < BOUND
    expected = {name: p.grad for name, p in whole.named_parameters()}
    of_stages = [(name, p.grad) for stage in (first, last) for name, p in stage.named_parameters()]
    assert sorted(name for name, _ in of_stages) == sorted(expected)
    for name, gradient in of_stages:
        assert torch.linalg.vector_norm(gradient - expected[name]) <= BOUND * torch.linalg.vector_norm(expected[name])


def test_a_stage_has_its_own_part_of_the_plan(tmp_path):
    model = model_of(tmp_path, "qwen3", **UNTIED)
    model.leave_out((model.plan.blocks[0], *model.plan.before_blocks))
    plan = model.plan
    assert (plan.blocks, plan.first_block, plan.n_blocks) == (("model.layers.1",), 1, 2)
    assert (plan.before_blocks, plan.after_blocks) == ((), ("model.norm", "lm_head"))
    assert plan.fsdp_groups == (("model.layers.1",), ("lm_head",))
    assert all(name.startswith(("model.layers.1.", "lm_head")) for name in plan.tensor_parallel)


@pytest.mark.parametrize(
    ("family", "fields", "reason"),
    [
        ("qwen3", {}, "cannot share one matrix; model.hf_overrides.tie_word_embeddings = false"),
        ("gemma4_text", {"hidden_size_per_layer_input": 16, **UNTIED}, "uses more than the last layer's hidden states"),
        ("jetmoe", UNTIED, "can't be followed through its forward pass without memory"),
    ],
)
def test_what_cannot_be_cut_has_a_reason(tmp_path, family, fields, reason):
    folder = write_config(tmp_path / family, family, **fields)
    overrides = words(folder, "--mesh.pp", "2", "--training.micro_batch_size", "1")
    with pytest.raises(ConfigError, match=r"mesh\.pp is 2, but ") as raised:
        require_known_names(load("debug.toml", overrides, world_size=2))
    assert reason in str(raised.value)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("phimoe", {"num_local_experts": 4, "num_experts_per_tok": 2}, "router_jitter_noise = 0.01"),
        (
            "phimoe",
            {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.0, "input_jitter_noise": 0.0},
            "draws random numbers in its forward pass",
        ),
    ],
)
def test_random_numbers_are_refused(tmp_path, family, fields, message):
    with pytest.raises(ConfigError, match=message):
        assert model_of(tmp_path, family, **fields).plan
