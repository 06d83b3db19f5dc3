"""Float8 matmuls on meshes: rows of the parity table, and weights that move between meshes in full precision."""

from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from parallelisms.torch_internals import listening
from scripts import parity_reference
from scripts.parity import run_rows
from scripts.parity_compare import bits, compare
from scripts.parity_rows import BOUNDS, Difference, float8_rows, words

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("torchao") is None, reason="the extra float8 is not installed"),
]

ROWS = {row.name: row for row in float8_rows()}
CHOSEN = [
    "float8 tensorwise, FSDP 2, selective, eager",
    "float8 tensorwise, HSDP 2x2, gathered in 8 bits, eager",
    "float8 tensorwise, ZeRO 1, gathered in 8 bits, eager",
    "float8 tensorwise, PP 2, gathered in 8 bits, eager",
    "float8 tensorwise, PP 2 interleaved, gathered in 8 bits, eager",
    "float8 tensorwise, owner 2, eager",
    "float8 tensorwise, FSDP 2 x TP 2, gathered in 8 bits, eager",
    "float8 tensorwise, FSDP 2, gathered in 8 bits, compiled",
    "float8 tensorwise, TP 2, compiled",
    "float8 rowwise, FSDP 2, selective, eager",
    "float8 rowwise, FSDP 2 x TP 2, eager",
    "float8 rowwise_with_gw_hp, FSDP 2, 2 at once, eager",
    "float8 rowwise_with_gw_hp, CP 2, eager",
    "float8 experts, FSDP 2, 2 at once, eager",
    "float8 experts, FSDP 2, selective, compiled",
    "float8 experts, CP 2, eager",
    "float8 experts, EP 2 in buffers, eager",
    "float8 experts, EP 2 x TP 2, compiled",
    "float8 experts, FSDP 2, dense matrices too, eager",
]


@pytest.mark.parametrize("name", CHOSEN)
def test_chosen_rows(ranks, name):
    class Pool:
        run = staticmethod(ranks)

    for row, difference in run_rows(Pool(), "parity.toml", [ROWS[name]], ("--training.steps", "3")):
        bounds = row.bounds or "float64"
        assert difference.passes(bounds), (row.name, difference, BOUNDS[bounds])


def gathered_bytes(overrides: tuple[str, ...]) -> int:
    """On a rank: the bytes that it sends to all-gathers of FSDP while it trains."""
    sent = []

    def listen(name: str, _group: object, arguments: tuple) -> None:
        if "allgather" in name:
            sent.append(arguments[1].nbytes if isinstance(arguments[1], torch.Tensor) else 0)

    with listening(before=listen):
        bits("parity.toml", overrides)
    return sum(sent)


def test_weights_are_gathered_in_8_bits(ranks):
    dtypes = {f"training.{key}": "float32" for key in ("dtype", "compute_dtype", "reduce_dtype")}
    run = words({**dtypes, "training.steps": 1, "float8.recipe": "tensorwise", "float8.emulate": "true"})
    plain, in_8_bits = (
        ranks(2, gathered_bytes, (*run, "--float8.fsdp_all_gather", value))[0] for value in ("false", "true")
    )
    assert in_8_bits < 0.8 * plain


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
