"""Activation checkpointing: same values, and exactly the recomputation and the memory that the config asks for.

The blocks' matrices differ in size, and backward's operations are counted to the last one, so that a mode which
recomputes one matmul too many, too few, or another layer's, fails.
"""

import pytest
import torch
import torch._functorch.config as functorch_config
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from configs.errors import ConfigError
from configs.schema import ActivationCheckpoint, Model
from models import build_model
from parallelisms.activation_checkpoint import apply_activation_checkpoint, resolve_ops, selected_layers
from parallelisms.compile import apply_compile
from scripts.parity_compare import attention_that_compiles

SHAPE = Model(dim=24, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=8, ffn_dim=40, vocab_size=32)
SIZES = {"q": 24 * 32, "k": 24 * 16, "v": 24 * 16, "o": 32 * 24, "gate": 24 * 40, "up": 24 * 40, "down": 40 * 24}
TOKENS = torch.arange(64).view(2, 32) % 32
N_TOKENS = TOKENS.numel()
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"

# Settings -> (matrices multiplied anew, attentions run anew, checkpointed layers). The last matrix's output is only
# added to the residual stream: backward does not need it, so it is never recomputed.
CASES = [
    ({"mode": "none"}, "", 0, 0),
    ({"mode": "full"}, "q k v o gate up", 1, 4),
    ({"mode": "full", "every_nth_layer": 2}, "q k v o gate up", 1, 2),
    ({"mode": "full", "layers": "0,2-3"}, "q k v o gate up", 1, 3),
    ({"mode": "full", "layers": "0,2-3", "every_nth_layer": 3}, "q k v o gate up", 1, 1),
    ({"mode": "selective"}, "", 0, 4),
    ({"mode": "selective", "layers": "1"}, "", 0, 1),
    ({"mode": "selective", "save_every_nth_matmul": 2}, "q v gate", 0, 4),
    ({"mode": "selective", "save_every_nth_matmul": 3}, "q k o gate", 0, 4),
    (
        {"mode": "selective", "save_every_nth_matmul": 2, "save_ops": ["aten.mm"], "every_nth_layer": 2},
        "q v gate",
        1,
        2,
    ),
    ({"mode": "selective", "save_ops": ["aten._scaled_dot_product_*attention*"]}, "q k v o gate up", 0, 4),
    ({"mode": "selective", "save_ops": ["aten.silu.default"]}, "q k v o gate up", 1, 4),
]
IDS = [" ".join(f"{key}={value}" for key, value in case[0].items()) for case in CASES]


def build(settings: dict, dtype=torch.float64, compiled=False) -> nn.Module:
    torch.manual_seed(0)
    model = build_model(SHAPE).to(dtype)
    apply_activation_checkpoint(model, ActivationCheckpoint(**settings))
    if compiled:
        for name in model.plan.blocks:
            block = model.get_submodule(name)
            block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    return model


def loss_of(model: nn.Module) -> torch.Tensor:
    return model(TOKENS).square().sum()


def loss_and_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss = loss_of(model)
    loss.backward()
    return {"loss": loss.detach()} | {name: p.grad.clone() for name, p in model.named_parameters()}


class Count(TorchDispatchMode):
    """Counts the operations of matmuls, and the attentions: FlopCounterMode cannot enter a compiled graph."""

    def __init__(self) -> None:
        super().__init__()
        self.flops = self.attentions = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.name() == "aten::mm":
            self.flops += 2 * args[0].numel() * args[1].shape[1]
        self.attentions += op.name() == ATTENTION
        return op(*args, **(kwargs or {}))


def plain_backward_flops() -> int:
    """Two matmuls (one for the input's gradient, one for the weight's) for each of forward's."""
    per_token = SHAPE.n_layers * sum(SIZES.values()) + SHAPE.dim * SHAPE.vocab_size
    return 2 * 2 * N_TOKENS * per_token


def added_flops(again: str, layers: int) -> int:
    return 2 * N_TOKENS * layers * sum(SIZES[name] for name in again.split())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("settings", [case[0] for case in CASES[1:]], ids=IDS[1:])
def test_gradients_are_bit_equal_to_those_without(settings, dtype):
    expected, actual = (loss_and_gradients(build(s, dtype)) for s in ({}, settings))
    assert expected.keys() == actual.keys()
    for name, value in expected.items():
        assert torch.equal(value, actual[name]), name


@pytest.mark.parametrize(("settings", "again", "attentions", "layers"), CASES, ids=IDS)
def test_backward_recomputes_exactly_what_is_asked(settings, again, attentions, layers):
    loss = loss_of(build(settings))
    with FlopCounterMode(display=False) as reference, Count() as count:
        loss.backward()
    matmuls = reference.get_flop_counts()["Global"][torch.ops.aten.mm]
    assert matmuls == plain_backward_flops() + added_flops(again, layers)
    assert count.flops == matmuls
    assert count.attentions == attentions * layers


COMPILED = [0, 1, 3, 5, 7, 9, 11]  # a compilation takes a second


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "again", "attentions", "layers"), [CASES[i] for i in COMPILED], ids=[IDS[i] for i in COMPILED]
)
def test_compiled_backward_recomputes_the_same_without_breaks_or_recompiles(settings, again, attentions, layers):
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model = build(settings, compiled=True)
    actual = loss_and_gradients(model)
    for name, value in loss_and_gradients(build({})).items():
        torch.testing.assert_close(value, actual[name], rtol=1e-12, atol=1e-12)

    with torch._dynamo.config.patch(error_on_recompile=True):
        loss_and_gradients(model)
        loss = loss_of(model)
    with Count() as count:
        loss.backward()
    assert count.flops == plain_backward_flops() + added_flops(again, layers)
    assert count.attentions == attentions * layers
    # One graph for all blocks of a kind: the checkpointed, and the others where there are any.
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == (2 if 0 < layers < 4 else 1)
    assert not torch._dynamo.utils.counters["graph_break"]


@pytest.mark.slow
def test_compiled_models_of_different_selections_do_not_share_a_graph():
    torch._dynamo.reset()
    flops = []
    for save_ops in (["aten.mm"], ["aten.silu"], ["aten.mm"]):
        loss = loss_of(build({"mode": "selective", "save_ops": save_ops}, compiled=True))
        with Count() as count:
            loss.backward()
        flops.append(count.flops - plain_backward_flops())
    assert flops == [0, added_flops("q k v o gate up", 4), 0]


def test_the_matmul_kept_is_told_by_its_weight_not_by_its_call():
    """A block that calls its matrices in another order than it defines them, one of them twice."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)

        def forward(self, x):
            return self.first(self.second(self.second(x).sin()).sin()).sin()

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()
            names = {"blocks": ("block",), "further_blocks": (), "save_ops": ("aten.mm",)}
            self.plan = type("Plan", (), {**names, "first_block": 0, "n_blocks": 1})

    multiplied = []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, op, types, args=(), kwargs=None):
            if op.name() == "aten::mm" and args[1].shape == (8, 8) and not args[1].is_contiguous():
                multiplied.append(names.get(args[1].untyped_storage().data_ptr()))
            return op(*args, **(kwargs or {}))

    net = Net()
    names = {module.weight.untyped_storage().data_ptr(): name for name, module in net.block.named_children()}
    apply_activation_checkpoint(net, ActivationCheckpoint(mode="selective", save_every_nth_matmul=2))
    out = net.block(torch.randn(4, 8, requires_grad=True)).sum()
    with Watch():
        out.backward()
    assert multiplied == ["first"]


def test_parameter_names_do_not_change():
    names = list(build({}).state_dict())
    for mode in ("full", "selective", "budget"):
        assert list(build({"mode": mode, "save_every_nth_matmul": 2}).state_dict()) == names


# --------------------------------------------------------------------------- memory


def compiled_saved_bytes(settings: dict) -> int:
    """Bytes of the tensors that the compiled blocks keep for backward, without weights and rotary angles."""
    torch._dynamo.reset()
    model = build(settings, compiled=True)
    cos, sin = model.rotary(torch.arange(32)[None])
    shared = {tensor.untyped_storage().data_ptr() for tensor in (cos, sin, *model.parameters())}
    kept: dict[int, int] = {}

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in shared:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    hidden = model.embed_tokens(TOKENS)
    with saved_tensors_hooks(keep, lambda tensor: tensor):
        for block in model.layers.values():
            hidden, _ = block(hidden, cos, sin, None)
    return sum(kept.values())


@pytest.mark.slow
def test_modes_order_the_memory_of_compiled_blocks():
    modes = [{"mode": "full"}, {"mode": "selective", "save_every_nth_matmul": 2}, {"mode": "selective"}, {}]
    sizes = [compiled_saved_bytes(settings) for settings in modes]
    assert sizes == sorted(set(sizes))


@pytest.mark.slow
def test_budget_limits_the_memory_of_compiled_blocks_and_of_nothing_else():
    sizes = {b: compiled_saved_bytes({"mode": "budget", "memory_budget": b}) for b in (0.0, 0.4, 1.0)}
    assert sizes[0.0] < sizes[0.4] < sizes[1.0] == compiled_saved_bytes({})
    assert sizes[0.0] == compiled_saved_bytes({"mode": "full"})
    # The partitioner's own estimate is rough where blocks are tiny.
    assert sizes[0.4] - sizes[0.0] == pytest.approx(0.4 * (sizes[1.0] - sizes[0.0]), rel=0.2)
    assert functorch_config.activation_memory_budget == 1.0


def test_budget_does_not_change_the_values():
    torch._dynamo.reset()
    model = build({"mode": "budget", "memory_budget": 0.3}, compiled=True)
    actual = loss_and_gradients(model)
    for name, value in loss_and_gradients(build({})).items():
        torch.testing.assert_close(value, actual[name], rtol=1e-12, atol=1e-12)
    loss = loss_of(model)
    with Count() as count:
        loss.backward()
    assert plain_backward_flops() < count.flops < plain_backward_flops() + added_flops("q k v o gate up", 4)


@pytest.mark.slow
def test_works_with_the_default_backend():
    torch._dynamo.reset()
    model = build({"mode": "selective", "save_every_nth_matmul": 2})
    apply_compile(model, {})
    with attention_that_compiles():
        actual = loss_and_gradients(model)
    for name, value in loss_and_gradients(build({})).items():
        torch.testing.assert_close(value, actual[name], rtol=1e-12, atol=1e-12)


# --------------------------------------------------------------------------- names of ops and layers


@given(st.integers(1, 20), st.integers(1, 20))
def test_every_nth_layer_is_the_last_of_each_n(n_layers, nth):
    selected = selected_layers(ActivationCheckpoint(mode="full", every_nth_layer=nth), n_layers)
    assert selected == [layer for layer in range(n_layers) if (layer + 1) % nth == 0]


def test_every_nth_is_counted_among_the_layers_named():
    assert selected_layers(ActivationCheckpoint(mode="full", layers="0-3,8-9", every_nth_layer=2), 10) == [1, 3, 9]


@pytest.mark.parametrize("layers", ["", "x", "3-2", "0-4", "4"])
def test_layers_that_are_not_there_are_an_error(layers):
    with pytest.raises(ConfigError):
        build({"mode": "full", "layers": layers})


def test_a_name_stands_for_all_overloads_and_a_pattern_for_all_matches():
    assert {"aten::mm", "aten::mm.out"} <= set(resolve_ops(("aten.mm",)))
    assert not {"aten::bmm", "aten::addmm"} & set(resolve_ops(("aten.mm",)))
    assert resolve_ops(("aten.mm.default",)) == ("aten::mm",)
    attention = set(resolve_ops(("aten._scaled_dot_product_*attention*",)))
    kinds = ("flash", "efficient", "cudnn")
    assert {f"aten::_scaled_dot_product_{kind}_attention" for kind in kinds} | {ATTENTION} <= attention


@pytest.mark.parametrize(
    ("name", "nearest"), [("aten.mmm", "aten.mm"), ("aten.sillu", "aten.silu"), ("mm", "aten.mm"), ("aten.zz*", "")]
)
def test_a_name_that_is_no_op_is_an_error(name, nearest):
    with pytest.raises(ConfigError) as error:
        build({"mode": "selective", "save_ops": ["aten.mm", name]})
    assert f'no op is named "{name}"' in str(error.value)
    assert nearest in str(error.value)


@pytest.mark.parametrize(
    "settings", [{"save_every_nth_matmul": 8}, {"save_every_nth_matmul": 2, "save_ops": ["aten.silu"]}]
)
def test_matmuls_to_keep_that_are_not_there_are_an_error(settings):
    with pytest.raises(ConfigError, match="keeps no matmul"):
        build({"mode": "selective"} | settings)
