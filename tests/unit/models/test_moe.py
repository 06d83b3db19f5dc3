"""A mixture of experts against loops over tokens and experts, and its balance against the published formulas."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from configs.architectures.llama_keys import Router
from configs.schema import Model
from models.grouped_mm import grouped_mm
from models.llama import Llama
from models.moe import MixtureOfExperts

COUNTS = [3, 0, 5, 1, 0]


def mixture(**settings):
    router = Router(**settings.pop("router", {}))
    config = Model(dim=16, n_layers=1, n_heads=2, ffn_dim=8, vocab_size=8, n_experts=6, router=router, **settings)
    module = MixtureOfExperts(config).double()
    torch.manual_seed(0)
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.5)
    module.router.init_buffers()
    return module


def swiglu(x, gate, up, down):
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("n_in", "n_out"), [(16, 24), (7, 9)])
@pytest.mark.parametrize("counts", [COUNTS, [0] * 5])
def test_grouped_products_are_those_of_a_loop(dtype, n_in, n_out, counts):
    torch.manual_seed(0)
    rows = torch.randn(sum(counts), n_in, dtype=dtype, requires_grad=True)
    weights = torch.randn(len(counts), n_out, n_in, dtype=dtype, requires_grad=True)
    grad = torch.randn(sum(counts), n_out, dtype=dtype)
    out = grouped_mm(rows, weights, torch.tensor(counts))
    expected = torch.cat([part @ weight.T for part, weight in zip(rows.split(counts), weights, strict=True)])
    assert_close(out, expected)
    found = torch.autograd.grad(out, (rows, weights), grad)
    assert_close(found, torch.autograd.grad(expected, (rows, weights), grad))


def test_the_op_is_sound_for_the_compiler():
    rows, weights = (torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((9, 4), (5, 3, 4)))
    torch.library.opcheck(grouped_mm, (rows, weights, torch.tensor(COUNTS)))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
@pytest.mark.parametrize("bias", [None, [0.0, 0.0, -9.0, 0.0, 9.0, 0.0]])
def test_each_token_gets_its_experts(scoring, renormalize, bias):
    balance = {"load_balance": "bias" if bias else "none"}
    module = mixture(n_shared_experts=2, router={"scoring": scoring, "renormalize": renormalize, **balance})
    if bias:
        module.router.bias += torch.tensor(bias)
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    out, load = module(x)
    experts, shared, chosen = module.experts, module.shared_experts, []
    for token, result in zip(x.flatten(0, 1), out.flatten(0, 1), strict=True):
        logits = module.router.weight @ token
        scores = logits.softmax(0) if scoring == "softmax" else logits.sigmoid()
        preference = scores + torch.tensor(bias or [0.0] * 6)
        best = sorted(range(6), key=lambda i: -preference[i])[:2]
        chosen += best
        total = scores[best].sum() if renormalize else 1.0
        parts = [
            scores[i] / total * swiglu(token, experts.gate_proj[i], experts.up_proj[i], experts.down_proj[i])
            for i in best
        ]
        of_shared = swiglu(token, shared.gate_proj.weight, shared.up_proj.weight, shared.down_proj.weight)
        assert_close(result, sum(parts) + of_shared)
    assert load.tokens.tolist() == [chosen.count(i) for i in range(6)]
    if bias:
        assert load.tokens[2] == 0, "an expert that no token wants"
        assert load.tokens[4] == 10


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_experts_that_no_token_chooses_get_no_rounding(scoring, renormalize):
    """Optimizers that take the sign of a gradient would make a whole step of it."""
    module = mixture(router={"scoring": scoring, "renormalize": renormalize, "load_balance": "bias"})
    module.router.bias[:2] -= 9.0
    module(torch.randn(2, 5, 16, dtype=torch.float64))[0].square().sum().backward()
    grad = module.router.weight.grad
    is_zero = (grad == 0).all(1).tolist()
    assert is_zero == ([True] * 2 if renormalize or scoring == "sigmoid" else [False] * 2) + [False] * 4


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_backward_adds_the_auxiliary_loss_and_forward_does_not(scoring):
    module = mixture(router={"scoring": scoring, "auxiliary_loss_weight": 0.3})
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    plain, _ = module(x)
    module.router.balance_scale = 0.5
    out, _ = module(x)
    assert torch.equal(out, plain)
    out.square().sum().backward()
    found = module.router.weight.grad.clone()
    module.zero_grad()
    logits = x @ module.router.weight.T
    scores = logits.softmax(-1) if scoring == "softmax" else logits.sigmoid()
    loss = 0.0
    for sequence in scores:
        shares = sequence / sequence.sum(-1, keepdim=True)
        chosen = sequence.topk(2).indices.flatten().tolist()
        loss += sum(6 / (2 * 7) * chosen.count(i) * shares[:, i].mean() for i in range(6))
    (plain.square().sum() + 0.5 * 0.3 * loss).backward()
    assert_close(found, module.router.weight.grad)


def test_over_the_global_batch_the_loss_weighs_shares_by_the_load_of_the_step_before():
    """At the first step the load counts as even: the shares sum to 1, so the loss is constant."""
    module = mixture(router={"auxiliary_loss_weight": 0.3, "auxiliary_loss_over": "global_batch"})
    module.router.balance_scale = 0.5
    x = torch.randn(2, 7, 16, dtype=torch.float64)
    module.router(x).weights.sum().backward()  # constant: the gradient is the auxiliary loss's alone
    assert_close(module.router.weight.grad, torch.zeros(6, 16, dtype=torch.float64))
    load = torch.tensor([3.0, 0.5, 0.0, 1.0, 1.25, 0.25], dtype=torch.float64)
    module.router.frequency.copy_(load)
    module.router(x).weights.sum().backward()
    found = module.router.weight.grad.clone()
    module.zero_grad()
    (0.5 * 0.3 * 2 * ((x @ module.router.weight.T).softmax(-1) @ load).mean()).backward()
    assert_close(found, module.router.weight.grad)


def test_a_token_chooses_from_few_groups():
    """Of three groups of two experts, those with the largest sums of their two best scores, with the bias."""
    settings = {"scoring": "sigmoid", "n_groups": 3, "groups_per_token": 2, "scaling_factor": 2.5}
    module = mixture(experts_per_token=3, router={**settings, "load_balance": "bias_and_auxiliary_loss"})
    module.router.bias += torch.tensor([0.3, 0.0, 0.0, 0.1, 0.0, -0.2])
    x = torch.randn(2, 40, 16, dtype=torch.float64)
    choice = module.router(x)
    outside = 0
    for token, experts, weights in zip(x.flatten(0, 1), *(t.flatten(0, 1) for t in choice[:2]), strict=True):
        scores = (module.router.weight @ token).sigmoid()
        preference = (scores + module.router.bias).tolist()
        groups = sorted(range(3), key=lambda group: -preference[2 * group] - preference[2 * group + 1])[:2]
        members = [expert for group in groups for expert in (2 * group, 2 * group + 1)]
        assert experts.tolist() == sorted(members, key=lambda expert: -preference[expert])[:3]
        outside += experts.tolist() != sorted(range(6), key=lambda expert: -preference[expert])[:3]
        assert_close(weights, 2.5 * scores[experts] / scores[experts].sum())
    assert outside > 10
    module.router.balance_scale = 1.0
    module.router(x).weights.sum().backward()  # constant: the gradient is the auxiliary loss's alone
    assert module.router.weight.grad.abs().max() > 1e-5


def test_evaluation_and_recomputation_count_no_tokens():
    config = Model(dim=16, n_layers=2, n_heads=2, ffn_dim=8, vocab_size=8, n_experts=4, n_dense_layers=1, expert_dim=4)
    model = Llama(config)
    tokens = torch.randint(0, 8, (3, 5))
    with torch.no_grad():
        model(tokens)
    router = model.get_submodule("layers.1.mlp.router")
    assert not router.tokens_per_expert.any()
    model(tokens)
    model(tokens)
    assert router.tokens_per_expert.sum() == 2 * 3 * 5 * 2
    assert model.plan.routers == ("layers.1.mlp.router",)
    assert model.plan.experts == ("layers.1.mlp.experts",)
