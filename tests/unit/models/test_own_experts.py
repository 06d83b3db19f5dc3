"""Parts of mixtures for models of one's own: against a loop over tokens, and against Keel's own mixture."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from configs.architectures.llama_keys import Router as RouterKeys
from configs.schema import Model
from models.moe import MixtureOfExperts
from models.own import CausalLm, Experts, Head, Options, Router, plan_of_parts

DIM = 16
INNER = 8
N = 5


def drawn(module):
    torch.manual_seed(0)
    module.double()
    for parameter in module.parameters():
        parameter.data.normal_(0, 0.5)
    for part in module.modules():
        if hasattr(part, "init_buffers"):
            part.init_buffers()
    return module


def by_hand(experts, x, chosen, weights):
    out = torch.zeros_like(x)
    for token in range(len(x)):
        for expert, weight in zip(chosen[token].tolist(), weights[token], strict=True):
            up = experts.up_proj[expert] @ x[token]
            if experts.activation == "relu_squared":
                inner = F.relu(up) ** 2
            else:
                gate = experts.gate_proj[expert] @ x[token]
                inner = up * (F.silu(gate) if experts.activation == "swiglu" else F.gelu(gate, approximate="tanh"))
            out[token] = out[token] + weight * (experts.down_proj[expert] @ inner)
    return out


@pytest.mark.parametrize("activation", ["swiglu", "geglu", "relu_squared"])
def test_experts_compute_what_a_loop_over_tokens_does(activation):
    experts = drawn(Experts(N, DIM, INNER, activation))
    x = torch.randn(2, 7, DIM, dtype=torch.float64, requires_grad=True)
    chosen = torch.stack([torch.randperm(N - 1)[:3] for _ in range(14)]).view(2, 7, 3)  # the last one gets no token
    weights = torch.rand(2, 7, 3, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(2, 7, DIM, dtype=torch.float64)
    expected = by_hand(experts, x.flatten(0, 1), chosen.flatten(0, 1), weights.flatten(0, 1)).view_as(x)
    found = experts(x, chosen, weights)
    assert_close(found, expected)
    wanted = (x, weights, *experts.parameters())
    assert_close(
        torch.autograd.grad(found, wanted, grad),
        torch.autograd.grad(expected, wanted, grad, materialize_grads=True),
    )


@pytest.mark.parametrize("recomputes", [False, True])
def test_experts_and_router_count_each_micro_batch_once_and_no_validation(recomputes):
    router = drawn(Router(DIM, N, 2))
    experts = drawn(Experts(N, DIM, INNER))

    def mixture(x):
        choice = router(x)
        return experts(x, choice.experts, choice.weights)

    batches = torch.randn(3, 2, 7, DIM, dtype=torch.float64)
    for x in batches:
        run = checkpoint(mixture, x, use_reentrant=False) if recomputes else mixture(x)
        run.sum().backward()
    with torch.no_grad():
        mixture(batches[0])
    shares = F.linear(batches, router.weight).softmax(-1)
    assert experts.tokens_per_expert.tolist() == shares.topk(2).indices.flatten().bincount(minlength=N).tolist()
    assert_close(router.entropy, -(shares * shares.log()).sum())


@pytest.mark.parametrize("balance", ["none", "auxiliary_loss", "bias"])
def test_router_and_experts_together_are_keels_own_mixture(balance):
    settings = RouterKeys(load_balance=balance)
    sizes = {"dim": DIM, "ffn_dim": INNER, "n_experts": N, "experts_per_token": 2}
    config = Model(**sizes, n_layers=1, n_heads=2, vocab_size=8, router=settings)
    theirs = drawn(MixtureOfExperts(config))
    router = drawn(Router(DIM, N, 2, settings))
    experts = drawn(Experts(N, DIM, INNER))
    router.load_state_dict(theirs.router.state_dict())
    experts.load_state_dict(theirs.experts.state_dict())
    router.balance_scale = theirs.router.balance_scale = 0.5
    if balance == "bias":
        router.bias += torch.tensor([3.0, 0, 0, 0, -3.0])
        theirs.router.bias += torch.tensor([3.0, 0, 0, 0, -3.0])
    x = torch.randn(2, 7, DIM, dtype=torch.float64)
    choice = router(x)
    found = experts(x, choice.experts, choice.weights)
    expected, _ = theirs(x)
    assert_close(found, expected, rtol=0, atol=0)
    for out in (found, expected):
        out.square().sum().backward()
    assert_close(router.weight.grad, theirs.router.weight.grad, rtol=1e-14, atol=0)
    for name, parameter in experts.named_parameters():
        assert_close(parameter.grad, theirs.experts.get_parameter(name).grad, rtol=0, atol=0)


class Small(CausalLm):
    """One dense block and one mixture, with what a test names in the plan."""

    def __init__(self, **plan):
        super().__init__(Options(vocab_size=8, dim=DIM, n_layers=2))
        self.embed = nn.Embedding(8, DIM)
        self.blocks = nn.ModuleDict({"0": nn.ModuleDict({"up": nn.Linear(DIM, DIM)}), "1": nn.ModuleDict()})
        self.blocks["1"]["experts"] = Experts(N, DIM, INNER)
        self.blocks["1"]["router"] = Router(DIM, N, 2, RouterKeys(load_balance="bias"))
        self.blocks["1"]["other"] = nn.Linear(DIM, N)
        self.head = Head(DIM, 8, bias=False)
        self.given = plan

    @property
    def plan(self):
        return plan_of_parts(self, "blocks", 2, ("embed",), ("head",), **self.given)


def test_a_plan_has_the_mixtures_of_the_blocks_that_have_them():
    plan = Small(experts="experts", router="router", n_experts=N, tensor_parallel={}).plan
    assert plan.experts == plan.counters == ("blocks.1.experts",)
    assert plan.routers == ("blocks.1.router",)
    assert plan.n_counted == N
    assert not plan.has_losses_of_layers
    assert not plan.why_not_distributed
    assert plan.tensor_parallel["blocks.1.experts"] == "whole_experts"
    assert plan.tensor_parallel["blocks.1.experts.down_proj"] == "part_row"
    split = Small(tensor_parallel={"up": "whole_column", "upp": "whole_row"}).plan.tensor_parallel
    assert {name for name in split if name.startswith("blocks.")} == {"blocks.0.up", "blocks.0.upp", "blocks.1.upp"}
    alone = Small(experts="experts", n_experts=N).plan
    assert alone.routers == ()
    assert not alone.tensor_parallel
    assert "no stacked experts" in Small().plan.why_not_distributed


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"experts": "expert", "n_experts": N}, "no block has a module expert, which the plan names as experts"),
        ({"experts": "other", "n_experts": N}, r"blocks\.1\.other, .* is no models\.own\.Experts"),
        ({"experts": "experts"}, r"blocks\.1\.experts has 5 experts, and the plan says that n_experts is 0"),
        ({"experts": "experts", "n_experts": N, "router": "other"}, r"is no models\.own\.Router"),
        ({"experts": "experts", "n_experts": N, "router": "gate"}, r"blocks\.1\.gate, .* is no models"),
        ({"router": "router"}, "names a router, but no experts"),
    ],
)
def test_a_plan_that_does_not_fit_the_modules_is_refused(given, message):
    model = Small(**given)
    with pytest.raises(ValueError, match=message):
        _ = model.plan
