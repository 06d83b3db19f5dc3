"""Experts of transformers as grouped products, against the families' own loops, and what they are refused for."""

from importlib import import_module

import pytest
import torch
from torch import nn
from transformers import AutoConfig

from configs.errors import ConfigError
from configs.load import load
from models.hf.experts import compute_experts_in_groups, give_all_a_gradient
from tests.hf_families import NEEDS_TRANSFORMERS, words, write_config
from trainer.planning.unknown_names import require_known_names

pytestmark = NEEDS_TRANSFORMERS
N_EXPERTS, DIM, INNER, TOKENS = 5, 6, 4, 7
_NUMBER = {"num_local_experts": N_EXPERTS, "n_routed_experts": N_EXPERTS, "hidden_size": DIM}
FIELDS = {
    "MixtralExperts": ("mixtral", {**_NUMBER, "intermediate_size": INNER}),
    "GptOssExperts": ("gpt_oss", {**_NUMBER, "intermediate_size": INNER}),  # transposed, with biases
    "NemotronHExperts": ("nemotron_h", {**_NUMBER, "moe_intermediate_size": INNER}),  # without a gate
}


class Family(nn.Module):
    """A family of which only a layer's experts matter."""

    def __init__(self, experts):
        super().__init__()
        self.layers = nn.ModuleList([nn.ModuleDict({"experts": experts})])


def found_in(experts, block="layers.0"):
    return compute_experts_in_groups(Family(experts), (block,))


def experts_of(kind, dtype=torch.float64):
    family, fields = FIELDS[kind]
    of_kind = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), kind)
    experts = of_kind(AutoConfig.for_model(family, **fields, experts_implementation="eager"))
    generator = torch.Generator().manual_seed(0)
    for parameter in experts.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(dtype)
    return experts


def routed(dtype=torch.float64):
    """Hidden states, the experts of each token, of which one has none, and their weights."""
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(TOKENS, DIM, generator=generator, dtype=torch.float64).to(dtype)
    chosen = torch.rand(TOKENS, N_EXPERTS - 1, generator=generator).topk(2).indices
    return hidden.requires_grad_(), chosen, torch.rand(TOKENS, 2, generator=generator, dtype=torch.float64)


def values(experts):
    """The output, and the gradients of hidden states, weights and parameters."""
    hidden, chosen, weights = routed()
    weights.requires_grad_()
    out = experts(hidden, chosen, weights)
    return [out, *torch.autograd.grad(out.sin().sum(), [hidden, weights, *experts.parameters()])]


@pytest.mark.parametrize("kind", FIELDS)
def test_grouped_products_are_the_familys_loop(kind):
    expected = values(experts_of(kind))
    experts = experts_of(kind)
    assert found_in(experts) == (("layers.0.experts",), "")
    for ours, theirs in zip(values(experts), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=1e-13)


def test_types_are_those_of_transformers():
    """The router's weights are wider than the experts': their products are summed in the wider type."""
    hidden, chosen, weights = routed(torch.bfloat16)
    experts = experts_of("MixtralExperts", torch.bfloat16)
    functions = import_module("transformers.integrations.moe").ALL_EXPERTS_FUNCTIONS
    theirs = functions["batched_mm"](experts, hidden, chosen, weights.float())
    found_in(experts)
    assert torch.equal(experts(hidden, chosen, weights.float()), theirs)


@pytest.mark.parametrize(
    ("kind", "packed"),
    [("MixtralExperts", {"gate_up_proj": 2}), ("GptOssExperts", {}), ("NemotronHExperts", {})],
)
def test_how_tensor_parallelism_splits_experts_is_found(kind, packed):
    """Mixtral stores all gates before all up features; GPT-OSS both in turns; Nemotron-H has no gate."""
    experts = experts_of(kind)
    found_in(experts)
    is_transposed = kind == "GptOssExperts"
    up = "up_proj" if kind == "NemotronHExperts" else "gate_up_proj"
    roles = {
        up: "part_row" if is_transposed else "part_column",
        "down_proj": "part_column" if is_transposed else "part_row",
    }
    biases = {"gate_up_proj_bias": "part_row"} if is_transposed else {}
    assert experts.tensor_parallel == roles | biases
    assert experts.packed == packed


class Mixing(nn.Module):
    """Experts whose gate sees all of its features at once, so that no part of them can be computed alone."""

    def __init__(self, config=None):
        super().__init__()
        self.num_experts = N_EXPERTS
        self.gate_up_proj = nn.Parameter(torch.empty(N_EXPERTS, 2 * INNER, DIM))
        self.down_proj = nn.Parameter(torch.empty(N_EXPERTS, DIM, INNER))
        self.act_fn = nn.SiLU()

    def _apply_gate(self, features):
        gate, up = features.chunk(2, -1)
        return gate.softmax(-1) * up

    def forward(self, hidden, chosen, weights):
        parts = []
        for k in range(chosen.shape[1]):
            inner = self._apply_gate(torch.einsum("td,tid->ti", hidden, self.gate_up_proj[chosen[:, k]]))
            parts.append(torch.einsum("ti,tdi->td", inner, self.down_proj[chosen[:, k]]) * weights[:, k, None])
        return sum(parts)


def test_experts_that_no_cut_separates_stay_whole():
    experts = import_module("transformers.integrations.moe").use_experts_implementation()(Mixing)(None)
    assert found_in(experts) == (("layers.0.experts",), "")
    assert experts.tensor_parallel == {}


class Declared(nn.Module):
    """Experts of one matrix up and one down."""

    def __init__(self, config=None):
        super().__init__()
        self.num_experts = N_EXPERTS
        self.up_proj = nn.Parameter(torch.empty(N_EXPERTS, INNER, DIM))
        self.down_proj = nn.Parameter(torch.empty(N_EXPERTS, DIM, INNER))
        self.act_fn = nn.SiLU()

    def forward(self, hidden, chosen, weights):
        parts = []
        for k in range(chosen.shape[1]):
            inner = self.act_fn(torch.einsum("td,tid->ti", hidden, self.up_proj[chosen[:, k]]))
            parts.append(torch.einsum("ti,tdi->td", inner, self.down_proj[chosen[:, k]]) * weights[:, k, None])
        return self.after(sum(parts))

    def after(self, out):
        return out


class Clamped(Declared):
    def after(self, out):
        return out.clamp(max=50.0)


class WithAVector(Declared):
    def __init__(self, config=None):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(N_EXPERTS))


class WithANorm(Declared):
    def __init__(self, config=None):
        super().__init__()
        self.post_expert_norm = nn.RMSNorm(DIM)


def declared(kind):
    class Own(kind):
        def forward(self, hidden, chosen, weights):
            return super().forward(hidden, chosen, weights)

    decorator = import_module("transformers.integrations.moe").use_experts_implementation
    return decorator(has_gate=False)(Own)(None)


def test_what_a_module_declares_is_computed():
    assert found_in(declared(Declared)) == (("layers.0.experts",), "")


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Clamped, "computes its experts otherwise than it declares"),
        (WithAVector, "has experts with parameters of its own (up_proj, down_proj, scale)"),
        (WithANorm, "has experts with parameters of its own (up_proj, down_proj, post_expert_norm.weight)"),
    ],
)
def test_a_module_that_computes_otherwise_keeps_its_own_loop(kind, reason):
    experts = declared(kind)
    names, why_not = found_in(experts)
    assert not names
    assert reason in why_not
    assert "forward" not in vars(experts)


def test_experts_outside_of_layers_are_not_distributed():
    assert "outside of its layers" in found_in(declared(Declared), block="layers.1").why_not


@pytest.mark.parametrize(
    ("family", "ep", "message"),
    [
        ("llama", 2, "mesh.ep is 2, but llama has no stacked experts"),
        ("jetmoe", 2, "mesh.ep is 2, but jetmoe has no stacked experts"),
        ("mixtral", 3, "mesh.ep 3 does not divide the 4 experts of model.layers.0.mlp.experts.gate_up_proj (4 / 3"),
    ],
)
def test_a_family_that_expert_parallelism_cannot_distribute(tmp_path, family, ep, message):
    batch = ("--training.global_batch_size", "6", "--training.micro_batch_size", "1")
    mesh = ("--mesh.dp_shard", str(ep), "--mesh.ep", str(ep), *batch)
    job = load("debug.toml", words(write_config(tmp_path / family, family), *mesh), world_size=ep)
    with pytest.raises(ConfigError) as raised:
        require_known_names(job)
    assert message in str(raised.value)


def test_features_of_experts_that_tensor_parallelism_cannot_divide(tmp_path):
    folder = write_config(tmp_path / "mixtral", "mixtral", intermediate_size=33)
    with pytest.raises(ConfigError) as raised:
        require_known_names(load("debug.toml", words(folder, "--mesh.tp", "2"), world_size=2))
    message = "mesh.tp 2 does not divide the 33 features of model.layers.0.mlp.experts.down_proj (33 / 2 = 16.50)"
    assert message in str(raised.value)


class OneOfTwo(nn.Module):
    """A layer of which a token uses one expert, by a loop that leaves the other one out."""

    def __init__(self):
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(4, 4).double(), nn.Linear(4, 4).double()])
        self.norm = nn.Linear(4, 4).double()

    def forward(self, hidden, chosen):
        return (self.experts[chosen](hidden), None)


@pytest.mark.parametrize("chosen", [0, 1])
def test_experts_without_tokens_have_gradients_of_zeros(chosen):
    """FSDP passes over parameters without gradients, so ranks would reduce unequal sizes."""
    torch.manual_seed(0)
    family = nn.ModuleDict({"layer": OneOfTwo()})
    hidden = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    family["layer"](hidden, chosen)[0].square().sum().backward()
    expected = {name: p.grad for name, p in family.named_parameters()}
    of_hidden = hidden.grad
    family.zero_grad()
    hidden.grad = None
    give_all_a_gradient(family, ("layer",), ())
    family["layer"](hidden, chosen)[0].square().sum().backward()
    assert torch.equal(hidden.grad, of_hidden)
    for name, p in family.named_parameters():
        if name.startswith(f"layer.experts.{chosen}."):
            assert torch.equal(p.grad, expected[name])
        elif "experts" in name:
            assert torch.equal(p.grad, torch.zeros_like(p))
        else:
            assert p.grad is None
