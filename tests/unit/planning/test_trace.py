"""What a traced step communicates, against the formula of each technique."""

from math import prod

import pytest
import torch
from torch.torch_version import TorchVersion

from configs.load import load
from trainer.planning.skeleton import skeleton
from trainer.planning.traffic import Collective, Traffic, trace_step

MICRO_BATCHES = 2
TYPES = ("dtype", "float32"), ("compute_dtype", "bfloat16"), ("reduce_dtype", "float32")


def traced(ranks, micro_batch_size, *overrides, rank=0):
    batch = (("global_batch_size", "16"), ("micro_batch_size", str(micro_batch_size)))
    words = [word for key, value in (*TYPES, *batch) for word in (f"--training.{key}", value)]
    config = load("parity.toml", (*words, *overrides), ranks).config
    return config, trace_step(config, ranks, rank)


def hidden_bytes(config):
    return config.training.micro_batch_size * config.training.seq_len * config.model.dim * 2


def test_fsdp_gathers_and_reduces_each_group_by_its_size():
    config, traffic = traced(4, 2)
    elements = {name: prod(shape) for name, shape in skeleton(config.model).shapes.items()}
    last_group = elements["norm.weight"] + elements["lm_head.weight"]
    groups = config.model.n_layers + 2
    gathered = 2 * sum(elements.values()) - last_group  # forward and backward, but the last group stays
    assert traffic == {
        Collective("all_gather", "shard"): Traffic(MICRO_BATCHES * (2 * groups - 1), MICRO_BATCHES * gathered * 2),
        Collective("reduce_scatter", "shard"): Traffic(
            MICRO_BATCHES * groups, MICRO_BATCHES * sum(elements.values()) * 4
        ),
        Collective("all_reduce", "shard"): Traffic(1, 4),  # of the norm
    }


def test_stochastic_rounding_communicates_nothing():
    narrow = ("--training.dtype", "bfloat16")
    assert traced(2, 2, *narrow, "--optimizer.rounding", "stochastic")[1] == traced(2, 2, *narrow)[1]


@pytest.mark.slow
def test_an_exact_reduction_sends_as_many_bytes_as_a_reduce_scatter():
    _, fast = traced(4, 2)
    _, exact = traced(4, 2, "--training.reduction", "exact")
    assert exact[Collective("all_to_all", "shard")] == fast[Collective("reduce_scatter", "shard")]
    assert Collective("reduce_scatter", "shard") not in exact
    assert exact[Collective("all_gather", "shard")] == fast[Collective("all_gather", "shard")]


@pytest.mark.slow
def test_exact_replicas_gather_the_sum_once_a_step():
    config, exact = traced(4, 2, "--training.reduction", "exact", "--mesh.dp_shard", "1", "--mesh.dp_replicate", "4")
    elements, groups = sum(prod(shape) for shape in skeleton(config.model).shapes.values()), config.model.n_layers + 2
    assert exact[Collective("all_to_all", "replicas")] == Traffic(MICRO_BATCHES * groups, MICRO_BATCHES * elements * 4)
    assert exact[Collective("all_gather", "replicas")] == Traffic(groups, elements * 4)


@pytest.mark.slow
def test_what_reads_values_of_a_step_is_traced_without_it():
    owners = ("--fsdp.partition", "owner", "--mesh.dp_shard", "1", "--mesh.dp_replicate", "2")
    _, plain = traced(2, 2, *owners)
    _, other = traced(2, 2, *owners, "--optimizer.name", "ademamix", "--metrics.fingerprint", "true")
    assert Collective("broadcast", "replicas") in plain
    assert other == plain


def test_a_pipeline_sends_each_micro_batch_on_and_its_gradient_back():
    config, traffic = traced(4, 4, "--mesh.pp", "4", rank=1)
    # Before them torch 2.11 opens each of the two channels, with an empty and a one-element message.
    opening = 0 if TorchVersion(torch.__version__) >= "2.13" else 2
    for op in ("send", "receive"):
        assert traffic[Collective(op, "pp")] == Traffic(8 + opening, 8 * hidden_bytes(config) + 4 * opening)


@pytest.mark.slow
def test_tensor_parallelism_gathers_the_sequence_before_each_cut_matrix():
    config, traffic = traced(2, 8, "--mesh.tp", "2")
    # Attention and feed-forward of each layer, forward and backward, and the head's and embedding's: Korthikanti et
    # al. 2022, figure 5.
    calls = MICRO_BATCHES * (4 * config.model.n_layers + 2)
    assert traffic[Collective("reduce_scatter", "tp")] == Traffic(calls, calls * hidden_bytes(config))


@pytest.mark.slow
def test_an_average_in_bfloat16_sends_nothing():
    _, plain = traced(2, 8)
    _, averaged = traced(2, 8, "--average.interval", "1", "--average.dtype", "bfloat16")
    assert averaged == plain
