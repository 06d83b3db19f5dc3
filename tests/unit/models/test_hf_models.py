"""Models of Hugging Face as Keel builds them: outputs, initial values, buffers, and what is refused."""

import json
from math import prod
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from checkpoint.export.family import seq_len_of
from configs.errors import ConfigError
from configs.load import load
from models import build_model
from parallelisms.init import materialize
from tests.hf_families import FAMILIES, NEEDS_TRANSFORMERS, words, write_config
from trainer.planning.flops import flops_per_token
from trainer.planning.skeleton import skeleton
from trainer.planning.unknown_names import require_known_names
from trainer.report.summary import native_modules

pytestmark = NEEDS_TRANSFORMERS
PUBLISHED = Path(__file__).parents[2] / "published"


def built(folder, seed=0, dtype=torch.float64):
    config = load("parity.toml", words(folder), world_size=1).config
    with torch.device("meta"):
        model = build_model(config.model).to(dtype)
    materialize(model, torch.device("cpu"), seed)
    return model


def plain(folder):
    """The family's own model."""
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.float64)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_the_familys(tmp_path, family):
    folder = write_config(tmp_path / family, family)
    ours = built(folder)
    theirs = plain(folder)
    assert [name for name, _ in ours.named_parameters()] == [name for name, _ in theirs.named_parameters()]
    theirs.load_state_dict(dict(ours.named_parameters()), strict=False)
    theirs.tie_weights()
    tokens = torch.randint(160, (2, 24))
    assert torch.equal(ours(tokens), theirs(input_ids=tokens, use_cache=False).logits)
    positions = torch.arange(24)[None]
    assert torch.equal(ours(tokens, positions), ours(tokens))


@pytest.mark.parametrize("family", FAMILIES)
def test_initial_values_are_drawn_as_the_family_does(tmp_path, family):
    """The same spread for each parameter, within what chance explains; constants are equal."""
    folder = write_config(tmp_path / family, family)
    theirs = dict(plain(folder).named_parameters())
    for name, ours in built(folder).named_parameters():
        spread = theirs[name].std().item() if theirs[name].numel() > 1 else 0.0
        if spread == 0.0:
            assert torch.equal(ours, theirs[name]), name
        else:
            found = ours.std().item()
            assert found > 0.0, name
            largest = max(found, spread)  # of the few sinks of a layer, the family's may be close by chance
            chance = max(0.15, 4 / ours.numel() ** 0.5)
            assert abs(found - spread) <= chance * largest, name
            assert ours.mean().abs().item() < 5 * largest / ours.numel() ** 0.5, name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("qwen3-0.6b", 596_049_920),
        ("olmo-2-1b", 1_484_916_736),
        ("smollm3-3b", 3_075_098_624),
        ("gemma-3-270m", 268_098_176),
    ],
)
def test_published_models_have_their_parameters(name, parameters):
    """Their config.json as it was published, with the fields of earlier versions of transformers."""
    config = load("parity.toml", words(PUBLISHED / f"{name}.json"), world_size=1).config
    assert sum(map(prod, skeleton(config.model).shapes.values())) == parameters


def test_a_model_that_keel_has_modules_for_is_told_so():
    """Where Keel's own modules would compute something else, and in jobs that use them, there is no hint."""
    qwen3 = str(PUBLISHED / "qwen3-0.6b.json")
    hint = "\nKeel's own llama computes the same, and offers sequence parallelism and float8 besides"
    hints = {
        words(Path(qwen3)): hint,
        words(Path(qwen3), "--model.hf_overrides.attention_bias", "true"): "",
        words(PUBLISHED / "gemma-3-270m.json"): hint,
        words(PUBLISHED / "gemma-3-270m.json", "--model.hf_overrides.final_logit_softcapping", "30.0"): "",
        (): "",
    }
    for overrides, expected in hints.items():
        assert native_modules(load("parity.toml", overrides, world_size=1).config) == expected


def test_residual_matrices_of_gpt2_start_smaller(tmp_path):
    """The rule is of the whole model: it writes parameters of modules inside."""
    model = built(write_config(tmp_path / "gpt2", "gpt2"))
    stds = {name: p.std().item() for name, p in model.named_parameters()}
    assert stds["transformer.h.0.mlp.c_proj.weight"] == pytest.approx(0.02 / 2, rel=0.1)
    assert stds["transformer.h.0.mlp.c_fc.weight"] == pytest.approx(0.02, rel=0.1)


def test_a_parameter_depends_on_the_seed_and_its_name_only(tmp_path):
    folder = write_config(tmp_path / "qwen3", "qwen3")
    first, again, other = (dict(built(folder, seed).named_parameters()) for seed in (0, 0, 1))
    longer = dict(built(write_config(tmp_path / "longer", "qwen3", num_hidden_layers=3)).named_parameters())
    matrix = "model.layers.1.mlp.up_proj.weight"
    assert torch.equal(first[matrix], again[matrix])
    assert torch.equal(first[matrix], longer[matrix])
    assert not torch.equal(first[matrix], other[matrix])
    assert not torch.equal(first[matrix], first[matrix.replace(".1.", ".0.")])


@pytest.mark.parametrize("family", FAMILIES)
def test_buffers_are_computed_after_the_meta_device(tmp_path, family):
    folder = write_config(tmp_path / family, family)
    theirs = dict(AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).named_buffers())
    ours = dict(built(folder).named_buffers())
    assert ours.keys() == theirs.keys()
    for name, buffer in ours.items():
        assert buffer.dtype == theirs[name].dtype, name
        assert torch.equal(buffer, theirs[name]), name


def test_the_loss_gets_hidden_states_and_the_heads_weight(tmp_path):
    model = built(write_config(tmp_path / "gemma3_text", "gemma3_text"))
    tokens = torch.randint(160, (1, 8))
    logits = model(tokens, loss=lambda hidden, weight: hidden @ weight.T)
    assert torch.equal(logits, model(tokens))


def test_flops_count_matrices_and_attention(tmp_path):
    """6 FLOPs a weight of a matrix; of 4 experts the 2 that a token is sent to."""
    config = load("parity.toml", words(write_config(tmp_path / "mixtral", "mixtral"))).config
    attention = 64 * (64 + 32 + 32) + 64 * 64
    experts = 2 * 3 * 64 * 96
    matrices = 2 * (attention + experts + 64 * 4) + 64 * 160
    assert flops_per_token(config.model, 32).full == 6 * matrices + 12 * 2 * 64 * 32


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("phimoe", {"router_jitter_noise": 0.01}, "random numbers.*router_jitter_noise = 0.01"),
        ("gpt2", {"attn_pdrop": 0.1}, "dropout.*attn_pdrop = 0.1"),
        ("seed_oss", {}, "has dropout"),
        (
            "bert",
            {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            "shares cls.predictions.bias with cls.predictions.decoder.bias",
        ),
        ("mixtral", {"output_router_logits": True}, "auxiliary loss"),
        ("qwen3", {"rope_parameters": {"rope_type": "nonsense"}}, "transformers cannot build this qwen3"),
        ("qwen3", {"layer_types": ["full_attention"]}, "validator .* ValueError: `num_hidden_layers` .* must be equal"),
    ],
)
def test_what_cannot_be_trained_as_it_is_is_refused(tmp_path, family, fields, message):
    job = load("parity.toml", words(write_config(tmp_path / family, family, **fields)))
    with pytest.raises(ConfigError, match=message) as caught:
        require_known_names(job)
    assert str(caught.value).startswith("--model.hf: ")


@pytest.mark.parametrize(
    ("family", "field", "ends"),
    [("gpt2", "n_positions", True), ("mpt", "max_seq_len", True), ("qwen3", "max_position_embeddings", False)],
)
def test_sequences_are_no_longer_than_a_table_of_positions(tmp_path, family, field, ends):
    """GPT-2 has learned positions, MPT a table of biases; rotary ones go on."""
    folder = write_config(tmp_path / family, family)
    fields = json.loads((folder / "config.json").read_text())
    del fields["max_position_embeddings"]
    (folder / "config.json").write_text(json.dumps(fields | {field: 24}))
    model = load("parity.toml", words(folder)).config.model
    assert seq_len_of(model) == 24
    require_known_names(load("parity.toml", words(folder, "--training.seq_len", "24")))
    job = load("parity.toml", words(folder, "--training.seq_len", "32"))
    if not ends:
        require_known_names(job)
        return
    with pytest.raises(
        ConfigError, match=f"is 32, but {family} has positions for 24 tokens only; set training.seq_len"
    ):
        require_known_names(job)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        ("gpt2", "has no plan of tensor parallelism"),
        ("sarvam_moe", "says nothing of model.layers.0.self_attn.[qk]_norm"),
    ],
)
def test_a_family_that_tensor_parallelism_cannot_split(tmp_path, family, message):
    folder = write_config(tmp_path / family, family, num_key_value_heads=4)
    require_known_names(load("parity.toml", words(folder)))
    with pytest.raises(ConfigError, match=message):
        require_known_names(load("parity.toml", words(folder, "--mesh.tp", "2")))
