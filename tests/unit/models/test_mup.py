"""muP against plain models, transformers and the sizes of updates that it is about."""

from math import sqrt

import pytest
import torch
from torch.nn import Parameter

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from configs.architectures import family_of, own_weights
from configs.architectures.llama_keys import Latent, MultiToken
from configs.architectures.mup import folds, lr_scale
from configs.architectures.parts import head_dim
from configs.exportable import not_exportable
from configs.load import load
from configs.schema import Model, Optimizer, ParameterGroup
from models import build_model
from parallelisms.init import materialize
from tests.unit.hf_support import TINY, make_model, save, skip_what_is_too_old
from tests.unit.small_job import JOB
from trainer.optimizers.build import WidthScale, build_optimizer, set_groups, set_lr
from trainer.step import hidden_matrices, width_scales

MUP = {"mup_base_dim": 8, "mup_base_head_dim": 2}
LATENT = {"attention": "latent", "head_dim": 12, "latent": Latent(key_value_rank=9, rope_head_dim=4, value_head_dim=8)}
MIXTURE = {"n_experts": 8, "n_shared_experts": 1}


def initialized(**keys):
    with torch.device("meta"):
        model = build_model(Model(dim=64, n_layers=2, n_heads=4, ffn_dim=128, vocab_size=100, **keys))
    materialize(model, torch.device("cpu"), seed=1)
    return model


@pytest.mark.parametrize("more", [{}, {"tie_embeddings": True, "query_scale": 24.0, **MIXTURE}])
def test_the_base_itself_is_as_without(more):
    tokens = torch.randint(100, (2, 9))
    plain = initialized(**more)
    base = initialized(**more, mup_base_dim=64)
    assert all(torch.equal(p, base.get_parameter(name)) for name, p in plain.named_parameters())
    assert torch.equal(plain(tokens), base(tokens))
    assert not folds(base.config)


def test_initial_values_have_the_tables_deviations():
    """Relative to the base's: the same of embedding and head, 1 / 2 of hidden matrices, 1 / 4 of the router."""
    base = initialized(**MIXTURE)
    wider = initialized(**MIXTURE, mup_base_dim=16)
    shares = {"embed_tokens": 1, "lm_head": 1, "router": 1 / 4}
    for name, parameter in wider.named_parameters():
        before = base.get_parameter(name)
        share = next((share for part, share in shares.items() if part in name), 1 / 2)
        expected = before if parameter.ndim == 1 else before * share  # the draws are those of the same name
        torch.testing.assert_close(parameter, expected)


@pytest.mark.parametrize(
    "keys",
    [{}, {"tie_embeddings": True}, {"query_scale": 24.0, "head_dim": 12}, LATENT],
)
def test_it_computes_what_a_plain_model_with_other_keys_does(keys):
    """The scores are divided by head_dim and multiplied by what the base divides by, the logits times base / dim."""
    sizes = {"dim": 32, "n_layers": 2, "n_heads": 4, "ffn_dim": 48, "vocab_size": 96, **keys}
    ours = make_model(Model(**sizes, **MUP), torch.float64)
    divisor = head_dim(ours.config) / MUP["mup_base_head_dim"] * sqrt(keys.get("query_scale", MUP["mup_base_head_dim"]))
    plain = build_model(Model(**sizes | {"query_scale": divisor**2})).to(torch.float64)
    plain.load_state_dict(ours.state_dict())
    tokens = torch.randint(96, (2, 20))
    torch.testing.assert_close(ours(tokens), plain(tokens) / 4, rtol=1e-12, atol=1e-12)


REFUSED = {"gemma3", "qwen3_next", "qwen3_next_moe"}
"""The families of which muP refuses the scale of the embedding, or layers with a state."""


@pytest.mark.parametrize("name", sorted(TINY.keys() - REFUSED))
def test_transformers_computes_an_export(tmp_path, name):
    from transformers import AutoModelForCausalLM

    skip_what_is_too_old(name)
    ours = make_model(TINY[name].model_copy(update=MUP))
    tokens = torch.randint(96, (2, 20))
    export_hf(save(tmp_path / "step-00000001", ours), tmp_path / "out", TokenizerFiles())
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        expected = ours(tokens)
        found = theirs(tokens).logits
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_what_no_class_has_a_place_for_is_not_exported():
    tied = TINY["deepseek_v3"].model_copy(update={**MUP, "tie_embeddings": True, "multi_token": MultiToken(depth=1)})
    assert "head" in not_exportable(tied)
    assert not not_exportable(tied.model_copy(update={"mup_base_dim": tied.dim}))
    assert not not_exportable(tied.model_copy(update={"multi_token": MultiToken()}))


def test_an_export_has_the_factors_in_modules_that_predict_further_tokens_too():
    factors = folds(TINY["deepseek_v3"].model_copy(update={**MUP, "multi_token": MultiToken(depth=2)}))
    own = {f"{block}.self_attn.q_b_proj.weight" for block in ("multi_token.0.block", "multi_token.1.block")}
    assert own < factors.keys()
    assert len({factors[name] for name in (*own, "layers.0.self_attn.q_b_proj.weight")}) == 1


# --------------------------------------------------------------------------- updates

SIZES = {"n_layers": 1, "vocab_size": 100}
WIDER = Model(dim=64, n_heads=8, ffn_dim=128, head_dim=8, mup_base_dim=16, **SIZES, **MIXTURE)
BASE = Model(dim=16, n_heads=2, ffn_dim=32, head_dim=8, mup_base_dim=16, **SIZES, **MIXTURE)


def spectral_norm(model, weight, by_head):
    """The norm of Muon's update at a learning rate of 1, over what a change of features by 0.2 of their size takes."""
    rows, columns = weight.shape[-2:]
    rows = head_dim(model) if by_head else rows
    return lr_scale(model, weight, "muon", by_head) * sqrt(max(rows, columns)) / sqrt(rows / columns)


@pytest.mark.parametrize("split_heads", [False, True])
@pytest.mark.parametrize("base", [BASE, BASE.model_copy(update={"n_heads": 8, "head_dim": 2})])
def test_muons_updates_change_features_as_much_at_any_width(base, split_heads):
    wider = WIDER.model_copy(update={"mup_base_head_dim": base.head_dim})
    compared = 0
    for weight, before in zip(own_weights(wider), own_weights(base), strict=True):
        if not weight.name.startswith("layers.") or len(weight.shape) < 2:
            continue
        by_head = split_heads and any(f".{each}_proj" in weight.name for each in "qkv")
        found = [spectral_norm(model, each, by_head) for model, each in ((wider, weight), (base, before))]
        assert found[0] == pytest.approx(found[1], rel=1e-12), weight.name
        compared += 1
    assert compared == 11


def after_a_step(tmp_path, name, weight_decay, gradient):
    """Each parameter before and after a step of a width of four times the base's, whose gradients are all alike."""
    file = tmp_path / "job.toml"
    keys = f'lr = 1e-2\nname = "{name}"\nweight_decay = {weight_decay}'
    file.write_text(JOB.replace("lr = 1e-3", keys).replace("dim = 64", "dim = 64\nmup_base_dim = 16"))
    return step_of(file, gradient)


def step_of(file, gradient):
    """Each parameter before and after a step of a job whose gradients are all alike."""
    config = load(str(file), (), 1).config
    model = make_model(config.model, torch.float64)
    named = list(model.named_parameters())
    hidden = hidden_matrices(model, config)
    optimizer = build_optimizer(config.optimizer, named, hidden, width_scales=width_scales(config, hidden))
    before = {name: parameter.detach().clone() for name, parameter in named}
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    optimizer.step()
    return {name: (before[name], parameter.detach()) for name, parameter in named}


@pytest.mark.parametrize("name", ["adamw", "ademamix", "lion"])
def test_hidden_matrices_move_less(tmp_path, name):
    """The first step of these takes the gradient's sign, times a rate."""
    moved = {key: after - before for key, (before, after) in after_a_step(tmp_path, name, 0.0, 1.0).items()}
    of_norm = moved["norm.weight"].mean()
    assert of_norm < -9e-3
    for key, change in moved.items():
        share = 1 / 4 if key.startswith("layers.") and change.ndim == 2 else 1
        torch.testing.assert_close(change, torch.full_like(change, share * of_norm), rtol=1e-6, atol=0)


def test_an_eps_above_the_gradients_takes_the_same_share_of_a_step_at_any_width(tmp_path):
    """Gradients that are four times smaller than the base's move a matrix by what a quarter of the rate makes of it."""
    text = JOB.replace("lr = 1e-3", "lr = 1e-2\neps = 1e-3\nweight_decay = 0.0")
    moved = []
    for base, gradient in ((64, 4e-3), (16, 1e-3)):
        file = tmp_path / "job.toml"
        file.write_text(text.replace("dim = 64", f"dim = 64\nmup_base_dim = {base}"))
        moved.append({key: after - before for key, (before, after) in step_of(file, gradient).items()})
    for key, change in moved[0].items():
        share = 1 / 4 if key.startswith("layers.") and change.ndim == 2 else 1
        torch.testing.assert_close(moved[1][key], share * change, rtol=1e-9, atol=0)


@pytest.mark.parametrize("name", ["adamw", "ademamix", "lion", "muon"])
def test_a_steps_decay_does_not_depend_on_the_width(tmp_path, name):
    for before, after in after_a_step(tmp_path, name, 0.5, 0.0).values():
        decay = 1e-2 * 0.5 if before.ndim == 2 else 0.0
        torch.testing.assert_close(after, before * (1 - decay), rtol=1e-12, atol=0)


def test_groups_multiply_and_a_stage_keeps_the_widths_share():
    parameters = [("layers.0.a.weight", Parameter(torch.ones(2, 2))), ("norm.weight", Parameter(torch.ones(2)))]
    scales = {"layers.0.a.weight": WidthScale(lr=0.25)}
    first, second = (
        Optimizer(lr=1e-2, weight_decay=0.5, groups=[ParameterGroup(pattern="layers.*", lr_scale=scale)])
        for scale in (2.0, 3.0)
    )
    optimizer = build_optimizer(first, parameters, later=[second], width_scales=scales)
    for config, scale in ((first, 2.0), (second, 3.0)):
        set_groups(optimizer, config, parameters, [name for name, _ in parameters], scales)
        set_lr(optimizer, 1e-2)
        of_matrix, of_norm = optimizer.param_groups
        assert of_matrix["lr"] == pytest.approx(1e-2 * scale / 4)
        assert of_matrix["lr"] * of_matrix["weight_decay"] == pytest.approx(1e-2 * scale * 0.5)
        assert of_norm["lr"] == 1e-2


def test_the_small_model_has_the_same_share_of_the_base():
    small = family_of(WIDER).small(WIDER.model_copy(update={"mup_base_head_dim": 4}), 2)
    assert small["mup_base_dim"] / small["dim"] == 1 / 4
    assert small["mup_base_head_dim"] / small["head_dim"] == 1 / 2
