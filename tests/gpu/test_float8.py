"""A GPU's float8 matmuls have the emulated values, which the parity table proves."""

from functools import partial

import pytest
import torch

from configs.load import load
from models import build_model
from parallelisms.float8 import apply_float8, check_float8, choice_of
from parallelisms.float8_experts import multiply

pytest.importorskip("torchao", reason="needs the package torchao")


def products(recipe: str, emulate: bool) -> list[torch.Tensor]:
    """Output and both gradients of a layer, in bfloat16."""
    words = ("--float8.recipe", recipe, *(("--float8.emulate", "true") if emulate else ()), "--model.n_layers", "1")
    config = load("llama_1b.toml", words).config
    check_float8(config.float8, torch.device("cuda"))
    with torch.device("meta"):
        model = build_model(config.model)
        apply_float8(model, choice_of(model, config), config.float8)
    linear = model.get_submodule("layers.0.mlp.up_proj").to_empty(device="cuda").to(torch.bfloat16)
    generator = torch.Generator("cuda").manual_seed(1)
    torch.nn.init.normal_(linear.weight, std=0.02, generator=generator)
    x = torch.randn(1024, linear.in_features, device="cuda", dtype=torch.bfloat16, generator=generator)
    y = linear(x.requires_grad_())
    y.backward(torch.randn(y.shape, device="cuda", dtype=torch.bfloat16, generator=generator))
    return [y.detach().float(), x.grad.float(), linear.weight.grad.float()]


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_8_bit_products_have_the_emulated_values(recipe):
    for ours, emulated in zip(products(recipe, False), products(recipe, True), strict=True):
        assert (ours - emulated).norm() < 0.005 * emulated.norm()  # rounding to 8 bits alone is off by 0.03


def products_of_experts(emulate: bool, compiled: bool = False) -> list[torch.Tensor]:
    """Output and both gradients of groups of any size, some of them empty, in bfloat16; the last rows are of none."""
    generator = torch.Generator("cuda").manual_seed(1)
    counts = torch.tensor([0, 1000, 1, 17, 0, 512, 300, 0], device="cuda")
    n = int(counts.sum())
    draw = partial(torch.randn, device="cuda", dtype=torch.bfloat16, generator=generator)
    rows, weights, grad = draw(n + 7, 1024), draw(8, 528, 1024) * 0.02, draw(n + 7, 528)
    rows.requires_grad_()
    weights.requires_grad_()
    way = torch.compile(multiply, fullgraph=True) if compiled else multiply
    out = way(rows, weights, counts, emulate=emulate)
    found = torch.autograd.grad(out, (rows, weights), grad)
    return [out[:n].detach().float(), found[0][:n].float(), found[1].float()]


@pytest.mark.parametrize("compiled", [False, True])
def test_8_bit_products_of_experts_have_the_emulated_values(compiled):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("this GPU has no kernel for them")
    for ours, emulated in zip(products_of_experts(False, compiled), products_of_experts(True), strict=True):
        assert (ours - emulated).norm() < 0.005 * emulated.norm()
