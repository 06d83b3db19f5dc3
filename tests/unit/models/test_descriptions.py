"""Each description of a family, in configs/architectures/, against the family's modules, which repeat its facts."""

from functools import cache
from math import prod

import pytest
import torch

from configs.architectures import block_names, init_stds, own_weights, stored_tensors, tensor_parallel_roles
from configs.layout import active_matrices, active_parameter_count, layer_matrices, parameter_count
from configs.load import load
from configs.plan import PARAMETER_ROLES, Attention, LocalWeights, PlannedModel, Recurrent, Router
from configs.schema import Model
from models import build_model
from tests.conftest import ROOT
from trainer.stages import saved_buffers

TOY = {"dim": 32, "n_layers": 3, "n_heads": 4, "n_kv_heads": 2, "ffn_dim": 48, "vocab_size": 80}
MIXTURE = TOY | {"n_experts": 5, "n_shared_experts": 2, "expert_dim": 24, "n_dense_layers": 1}
JOBS = {path.stem: None for path in (ROOT / "configs").glob("*.toml")}
TOYS = {"toy": TOY, "tied": TOY | {"tie_embeddings": True}, "mixture": MIXTURE, "wide heads": TOY | {"head_dim": 24}}
TOYS |= {"rich": TOY | {"qk_norm": "full", "attention_bias": True, "attention_gate": True, "norm_position": "both"}}
LATENT = {"attention": "latent", "n_kv_heads": None, "head_dim": 12}
WIDTHS = {"key_value_rank": 20, "rope_head_dim": 4, "value_head_dim": 6}
TOYS |= {
    "latent": TOY | LATENT | {"latent": WIDTHS},
    "latent queries": MIXTURE | LATENT | {"latent": WIDTHS | {"query_rank": 9}, "router": {"load_balance": "bias"}},
}
TOYS |= {
    "further tokens": TOY | {"multi_token": {"depth": 2}, "tie_embeddings": True, "norm_offset": True},
    "further tokens, latent": TOYS["latent queries"] | {"multi_token": {"depth": 1}},
}
DELTA = {"layers": ("delta", "full"), "delta": {"key_heads": 2, "value_heads": 6, "key_head_dim": 5}}
TOYS |= {
    "delta": TOY | DELTA,
    "delta mixture": MIXTURE | DELTA | {"shared_expert_gate": True, "norm_offset": True},
    "delta, further tokens": TOY | DELTA | {"multi_token": {"depth": 2}},
}
TOYS |= {"normed": TOY | {"qk_norm": "head"}, "normed mixture": MIXTURE | {"qk_norm": "head"}}


@pytest.fixture(params=(JOBS | TOYS).items(), ids=lambda param: param[0])
def model(request):
    name, keys = request.param
    return Model(**keys) if keys else load(name).config.model


@cache
def built(model):
    with torch.device("meta"):
        return build_model(model)


def test_names_and_shapes_are_the_modules_in_their_order(model):
    modules = {name: tuple(parameter.shape) for name, parameter in built(model).named_parameters()}
    assert list(modules.items()) == [(weight.name, weight.shape) for weight in own_weights(model)]
    assert parameter_count(model) == sum(map(prod, modules.values()))


def test_a_layer_has_the_matrices_of_its_block(model):
    blocks = built(model).layers.values()
    for layer, block in list(enumerate(blocks))[:: max(1, model.n_layers - 1)]:
        sizes = {name: p.numel() for name, p in block.named_parameters() if p.ndim > 1}
        experts = sum(size for name, size in sizes.items() if ".experts." in name)
        idle = experts * (1 - model.experts_per_token / (model.n_experts or 1))
        assert layer_matrices(model, layer) == sum(sizes.values())
        assert active_matrices(model, layer) == sum(sizes.values()) - idle
    layers = range(len(block_names(model)))
    idle_matrices = sum(layer_matrices(model, i) - active_matrices(model, i) for i in layers)
    assert parameter_count(model) - active_parameter_count(model) == idle_matrices


def test_every_weight_has_one_role_and_every_role_a_place(model):
    modules = built(model)
    roles = tensor_parallel_roles(model)
    parameters = dict(modules.named_parameters(remove_duplicate=False))
    assert {name for name, role in roles.items() if role in PARAMETER_ROLES} <= parameters.keys()
    assert {name for name, role in roles.items() if role not in PARAMETER_ROLES} <= dict(modules.named_modules()).keys()
    assert all(roles.keys() & {name, name.rpartition(".")[0]} for name in parameters)
    assert modules.plan.tensor_parallel == roles


def test_only_norms_start_at_one(model):
    """With an offset their factors do, but for those of heads in layers of kind delta; biases start at zero, too."""
    stds = init_stds(model)
    assert stds.keys() == dict(built(model).named_parameters()).keys()
    of_delta = {name for name in stds if name.endswith(("linear_attn.norm.weight", "dt_bias"))}
    norms = {name for name in stds if "norm" in name} - of_delta
    assert {name for name, std in stds.items() if std is None} == (set() if model.norm_offset else norms) | of_delta
    zeros = norms if model.norm_offset else set()
    assert {name for name, std in stds.items() if std == 0} == zeros | {name for name in stds if name.endswith(".bias")}
    rates = {name for name in stds if name.endswith("A_log")}
    assert {name for name, std in stds.items() if std == "log_of_uniform"} == rates


def test_modules_have_what_techniques_read_and_replace(model):
    modules = built(model)
    plan = modules.plan
    wanted = [(modules, PlannedModel)]
    wanted += [(modules.get_submodule(name), Attention) for name in plan.attention]
    wanted += [(modules.get_submodule(name), kind) for name in plan.recurrent for kind in (LocalWeights, Recurrent)]
    wanted += [(modules.get_submodule(name), LocalWeights) for name in plan.experts]
    wanted += [(modules.get_submodule(name), kind) for name in plan.routers for kind in (LocalWeights, Router)]
    for module, protocol in wanted:
        assert all(hasattr(module, name) for name in protocol.__annotations__), (module, protocol)


def test_a_checkpoint_has_the_weights_and_the_buffers_of_the_model(model):
    modules = built(model)
    state = {**dict(modules.named_parameters()), **dict(saved_buffers(modules))}
    assert {weight.name: weight.shape for weight in stored_tensors(model)} == {
        name: tuple(tensor.shape) for name, tensor in state.items()
    }
