"""8-bit products on meshes: rows of the parity table, and weights that move between meshes in full precision."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from scripts import parity_reference
from scripts.parity import run_rows
from scripts.parity_compare import compare
from scripts.parity_rows import BOUNDS, Difference, float8_rows

pytestmark = pytest.mark.skipif(find_spec("torchao") is None, reason="the extra float8 is not installed")

ROWS = {row.name: row for row in float8_rows()}
CHOSEN = [
    "float8 tensorwise, FSDP 2, selective, eager",
    "float8 tensorwise, HSDP 2x2, gathered in 8 bits, eager",
    "float8 tensorwise, ZeRO 1, gathered in 8 bits, eager",
    "float8 tensorwise, PP 2, gathered in 8 bits, eager",
    "float8 tensorwise, owner 2, eager",
    "float8 tensorwise, FSDP 2 x TP 2, gathered in 8 bits, eager",
    "float8 tensorwise, FSDP 2, gathered in 8 bits, compiled",
    "float8 tensorwise, TP 2, compiled",
    "float8 rowwise, FSDP 2, selective, eager",
    "float8 rowwise, FSDP 2 x TP 2, eager",
    "float8 rowwise_with_gw_hp, FSDP 2, 2 at once, eager",
    "float8 rowwise_with_gw_hp, CP 2, eager",
]


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_rows(ranks, name):
    class Pool:
        run = staticmethod(ranks)

    for row, difference in run_rows(Pool(), "parity.toml", [ROWS[name]], ("--training.steps", "3")):
        bounds = row.bounds or "float64"
        assert difference.passes(bounds), (row.name, difference, BOUNDS[bounds])


def against_torchao(run: tuple[str, ...], path: str) -> Difference | None:
    """On a rank: the trainer against the bare model that torchao has converted, in plain PyTorch."""
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    def convert(model: torch.nn.Module, config) -> None:
        recipe = replace(Float8LinearConfig.from_recipe_name(config.recipe), emulate=True)
        convert_to_float8_training(model.get_submodule("layers"), config=recipe)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parity_reference, "in_8_bits", convert)
        parity_reference.reference("parity.toml", run, path)
    return compare("parity.toml", run, path)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_training_is_that_of_torchao_on_the_bare_model(ranks, recipe, tmp_path):
    run = next(row.run_overrides for name, row in ROWS.items() if name.startswith(f"float8 {recipe}, 1 process"))
    difference = ranks(1, against_torchao, ("--training.steps", "3", *run), str(tmp_path / "reference.pt"))[0]
    assert difference.passes("float64"), difference
