"""Mixtures of experts over ranks: rows of the parity table, biases across a resume, and what is measured."""

import itertools
import math

import pytest
import torch

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from parallelisms.torch_internals import has_zero_bubble
from scripts.parity_reference import batches
from scripts.parity_rows import MOE, MOE_BIAS, Row, moe_rows, words
from tests.distributed.test_parity import assert_parity
from tests.marked import marked
from trainer.stages import saved_buffers
from trainer.step import build_learner

ROWS = {row.name: row for row in moe_rows()}
CHOSEN = [  # `scripts/parity.py --rows "MoE*"` runs all
    "MoE auxiliary loss, FSDP 2, compiled",
    "MoE auxiliary loss, TP 2, eager",
    "MoE bias, CP 2, eager",
    "MoE bias, PP 2, eager",
]
MORE = [
    # Five experts over two ranks: FSDP cuts the second dimension, which tensor parallelism has cut before.
    Row("5 experts, FSDP 2 x TP 2", 4, words({"mesh.tp": 2}), words(MOE | {"model.n_experts": 5})),
    Row("PP 2 zero-bubble", 2, words({"mesh.pp": 2, "pipeline.schedule": "zero_bubble_v"}), words(MOE)),
]


@pytest.mark.long
@pytest.mark.parametrize("row", MORE, ids=lambda row: row.name)
def test_other_meshes(ranks, row):
    if "zero-bubble" in row.name and not has_zero_bubble():
        pytest.skip("zero-bubble schedules need torch 2.13")
    assert_parity(ranks, [row])


@pytest.mark.parametrize(
    "name",
    marked(
        CHOSEN,
        slow=["MoE auxiliary loss, TP 2, eager", "MoE bias, CP 2, eager"],
        long=["MoE auxiliary loss, FSDP 2, compiled"],
    ),
)
def test_the_mesh_does_not_change_a_mixture(ranks, name):
    assert_parity(ranks, [ROWS[name]])


BOTH = {"model.router.load_balance": "bias_and_auxiliary_loss", "model.router.auxiliary_loss_over": "global_batch"}


def _measured(machine):
    """After three steps: the balance of the last, and what balances the next, which a skipped step does not change."""
    n_ranks = torch.distributed.get_world_size()
    config = load("parity.toml", [*words(MOE_BIAS | BOTH | machine), "--training.steps", "3"], n_ranks).config
    mesh = build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu"))
    learner = build_learner(config, mesh)
    for micro_batches in batches(config, mesh.dp_rank, mesh.sizes.dp):
        learner.step(micro_batches, 1e-3)
    found = learner.load_balance.measure()
    kept = _kept(learner)
    next(iter(learner.parameters.values())).data.fill_(float("nan"))
    assert learner.step(micro_batches, 1e-3).result().skipped
    assert kept == _kept(learner)
    return found, kept


def _kept(learner):
    """The buffers that checkpoints hold, of which a mixture has no others, and the load of the step before."""
    saved = itertools.chain.from_iterable(saved_buffers(stage) for stage in learner.stages.values())
    return {name: kept.tolist() for name, kept in (*saved, *learner.load_balance.state().items())}


@pytest.mark.long
@pytest.mark.parametrize(
    "meshes",
    [
        [{"mesh.tp": 2, "mesh.cp": 2}],
        [{"mesh.dp_shard": 2, "mesh.pp": 2}, {"mesh.dp_replicate": 4}],
    ],
    ids=["TP 2 x CP 2", "more"],
)
def test_balance_and_biases_are_those_of_one_process(ranks, meshes):
    ((expected, kept),) = ranks(1, _measured, {})
    assert expected.tokens_per_expert.keys() == {1, 2, 3}
    loads = list(expected.tokens_per_expert.values())
    assert all(sum(load) == 8 * 32 * 2 for load in loads)
    assert any(0 in load for load in loads), "an expert that got no token of the whole batch"
    assert expected.load_imbalance == max(max(load) * 64 / (8 * 32 * 2) for load in loads)
    assert 0 < expected.router_entropy < math.log(64)
    assert expected.router_entropies.keys() == {1, 2, 3}
    assert sum(expected.router_entropies.values()) / 3 == pytest.approx(expected.router_entropy, rel=1e-12)
    biases = [each for name, each in kept.items() if not name.startswith("load.")]
    assert {round(abs(value), 6) for bias in biases for value in bias} <= {0.0, 0.01, 0.02, 0.03}
    for layer, counts in expected.tokens_per_expert.items():
        assert kept[f"load.layers.{layer}.mlp.router"] == [n / (8 * 32 * 2 / 64) for n in counts]
    for machine in meshes:
        results = ranks(4, _measured, machine)
        assert dict(item for _, found in results for item in found.items()) == kept
        for balance, _ in results:
            assert balance.tokens_per_expert == expected.tokens_per_expert
            assert balance.load_imbalance == expected.load_imbalance
            assert balance.router_entropy == pytest.approx(expected.router_entropy, rel=1e-12)
            assert balance.router_entropies == pytest.approx(expected.router_entropies, rel=1e-12)
