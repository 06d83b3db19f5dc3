"""Which layers a stage holds and which stages a rank: against an exhaustive search, torch's own arrangement, and
the whole model."""

from itertools import combinations, pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

from configs.architectures.parts import head_dim
from configs.errors import ConfigError
from configs.layout import layer_matrices
from configs.load import load
from configs.schema import ActivationCheckpoint, Mesh, Pipeline
from configs.stages import layers_of_stages, n_stages, rank_of_stage, stages_of_rank
from models import build_model
from models.documents import Documents
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.pipeline import own_stages

PARITY = load("parity.toml").config


def config(pp, n_layers=8, vocab_size=512, **pipeline):
    model = PARITY.model.model_copy(update={"n_layers": n_layers, "vocab_size": vocab_size})
    return PARITY.model_copy(update={"model": model, "mesh": Mesh(pp=pp), "pipeline": Pipeline(**pipeline)})


def slowest(job, counts):
    """Time of the slowest stage, in matrix elements and attention scores a token."""
    model = job.model
    layer = layer_matrices(model, 0) + model.n_heads * head_dim(model) * job.training.seq_len
    return max([*(n * layer for n in counts[:-1]), counts[-1] * layer + model.vocab_size * model.dim])


@given(st.integers(1, 5), st.integers(0, 6), st.sampled_from([16, 512, 3000, 20000]))
@settings(max_examples=60, deadline=None)
def test_no_other_split_has_a_faster_slowest_stage(stages, more, vocab_size):
    n_layers = stages + more
    job = config(stages, n_layers, vocab_size)
    counts = [len(layers) for layers in layers_of_stages(job)]
    others = combinations(range(1, n_layers), stages - 1)
    cuts = [(0, *ends, n_layers) for ends in others]
    best = min(slowest(job, [b - a for a, b in pairwise(cut)]) for cut in cuts)
    assert slowest(job, counts) == best
    assert [layer for layers in layers_of_stages(job) for layer in layers] == list(range(n_layers))


def test_the_embedding_and_the_head_count():
    def counts(vocab_size):
        return [len(layers) for layers in layers_of_stages(config(4, 32, vocab_size))]

    assert counts(1) == [8, 8, 8, 8]
    layer = layer_matrices(PARITY.model, 0)
    heavy = 3 * layer // PARITY.model.dim  # an embedding and a head that each weigh as much as three layers
    assert counts(heavy) == [8, 9, 9, 6]


@pytest.mark.parametrize("schedule", ["interleaved_1f1b", "zero_bubble_v"])
@pytest.mark.parametrize("pp", [2, 3, 4])
def test_stages_lie_where_torch_expects_them(schedule, pp):
    job = config(pp, schedule=schedule)
    style = "v" if schedule == "zero_bubble_v" else "loop"
    expected = generate_stage_to_rank_mapping(pp, n_stages(job), style=style)
    assert {stage: rank_of_stage(job, stage) for stage in range(n_stages(job))} == expected
    assert sorted(stage for rank in range(pp) for stage in stages_of_rank(job, rank)) == list(range(2 * pp))


def test_without_a_pipeline_there_is_one_stage():
    job = config(1, split=[3], schedule="zero_bubble_v")
    assert layers_of_stages(job) == [range(8)]
    assert stages_of_rank(job, 0) == [0]


def test_an_explicit_split():
    assert layers_of_stages(config(3, split=[4, 3, 1])) == [range(4), range(4, 7), range(7, 8)]
    with pytest.raises(ConfigError, match=r"covers 4 \+ 3 \+ 2 = 9 layers, but n_layers is 8"):
        layers_of_stages(config(3, split=[4, 3, 2]))


def test_stages_one_after_the_other_are_the_model():
    job = config(2, schedule="zero_bubble_v")
    model = build_model(job.model)
    tokens = torch.arange(12).view(2, 6)
    documents = Documents.find(torch.tensor([[0, 0, 0, 1, 1, 1], [0, 0, 0, 0, 0, 1]]))
    expected = model(tokens, documents=documents)
    stages = own_stages(model, job, 0) | own_stages(model, job, 1)
    x = tokens
    for number in range(4):
        x = stages[number](x, torch.arange(6)[None], documents)
    assert torch.equal(x, expected)
    names = [name for number in range(4) for name, _ in stages[number].named_parameters()]
    assert names == [name for name, _ in model.named_parameters()]


def test_every_module_that_a_stages_plan_names_is_there():
    for stage in own_stages(build_model(PARITY.model), config(4, 4, split=[1] * 4, schedule="gpipe"), 1).values():
        modules = dict(stage.named_modules())
        plan = stage.plan
        assert plan.blocks == ("layers.1",)
        assert (plan.first_block, plan.n_blocks, plan.before_blocks, plan.after_blocks) == (1, 4, (), ())
        assert plan.fsdp_groups == (("layers.1",),)
        assert all(pattern.split(".")[0] in modules for pattern in plan.tensor_parallel)


def test_layers_keep_their_number_for_activation_checkpointing():
    model = build_model(config(2).model)
    for stage in (own_stages(model, config(2), rank) for rank in (0, 1)):
        for part in stage.values():
            apply_activation_checkpoint(part, ActivationCheckpoint(mode="full", layers="1-6", every_nth_layer=2))
            wrapped = [int(name) for name, block in part.layers.items() if "forward" in vars(block)]
            assert wrapped == [layer for layer in (2, 4, 6) if str(layer) in part.layers]
