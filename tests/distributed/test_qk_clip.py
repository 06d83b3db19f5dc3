"""QK-clip: rows of the parity table, and what a step that is skipped, an evaluation and frozen weights do to it."""

import pytest
import torch

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from scripts.parity_reference import batches
from scripts.parity_rows import qk_clip_rows, words
from tests.distributed.test_parity import assert_parity
from tests.marked import marked
from trainer.step import build_learner

ROWS = {row.name: row for row in qk_clip_rows()}
CHOSEN = [  # `scripts/parity.py --rows "QK-clip*"` runs all
    "QK-clip, documents, CP 2 ring, eager",
    "QK-clip, Muon, owner 2 x TP 2, eager",
    "QK-clip, 1 process, compiled",
]


@pytest.mark.slow
@pytest.mark.parametrize("name", marked(CHOSEN, slow=CHOSEN[1:]))
def test_the_mesh_does_not_change_it(ranks, name):
    assert_parity(ranks, [ROWS[name]])


def _steps(*keys):
    """What is measured of two steps of one batch, without an update but the clip, and then of a step that is skipped;
    and whether the queries' weights have changed in each."""
    limit = {"optimizer.qk_clip": 1e-3, "optimizer.weight_decay": 0.0, "training.steps": 1}
    config = load("parity.toml", [*words(limit), *keys], torch.distributed.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, torch.distributed.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    micro_batches = next(iter(batches(config, mesh.dp_rank, mesh.sizes.dp)))
    weights = {name: p for name, p in learner.parameters.items() if "q_proj" in name}
    found = []
    for number in range(3):
        if number == 2:
            learner.parameters["norm.weight"].data.fill_(float("nan"))
            learner.optimizer.refresh_copies()
        before = {name: p.detach().clone() for name, p in weights.items()}
        learner.evaluate(micro_batches, None)
        step = learner.step(micro_batches, 0.0)
        assert step.result().skipped == (number == 2)
        changed = {name.split(".")[1] for name, p in weights.items() if not torch.equal(p, before[name])}
        found.append((learner.measure()["max_attention_logit"], sorted(changed)))
    return found


IN_HALF = words({"training.dtype": "float32", "training.reduce_dtype": "float32", "training.compute_dtype": "bfloat16"})
"""A single rank computes with copies of the weights."""


@pytest.mark.parametrize("keys", [(), IN_HALF], ids=["float64", "bfloat16 copies"])
def test_a_clip_brings_logits_to_the_limit_and_a_skipped_step_changes_nothing(ranks, keys):
    (first, clipped), (second, _), (third, not_skipped) = ranks(1, _steps, *keys)[0]
    assert first > 2e-3
    assert clipped == ["0", "1", "2", "3"]
    # The first layers' outputs do not depend on their logits much: the second step's are the limit, within rounding.
    assert second == pytest.approx(1e-3, rel=0.02)
    assert third == pytest.approx(second, rel=0.02)
    assert not_skipped == []


def test_frozen_queries_keep_their_weights(ranks):
    groups = '[{pattern = "layers.1.*", freeze = true}]'
    (_, clipped), _, _ = ranks(1, _steps, "--optimizer.groups", groups)[0]
    assert clipped == ["0", "2", "3"]
