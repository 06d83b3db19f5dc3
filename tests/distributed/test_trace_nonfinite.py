"""A value that is not finite, planted on one rank: the first module that has it, the rank and the sample are named."""

import math
import socket

import pytest
import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from tests.distributed.test_verdict import poison
from tests.marked import marked
from tests.torture.resume import JOB
from trainer.data.loader import build_loader
from trainer.guards.trace_nonfinite import trace_nonfinite
from trainer.step import Learner, build_learner

HOST = socket.gethostname()
BF16 = "--training.compute_dtype bfloat16"
MESHES = {"FSDP": "--mesh.dp_shard 2", "TP": "--mesh.tp 2", "PP": "--mesh.pp 2", "DDP": "--mesh.dp_replicate 2"}


class _BadGradient(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        return x.view_as(x)

    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone()
        gradient[1, 2] = math.nan
        return gradient


def plant(learner: Learner, where: str, kind: str, micro_batch: int) -> None:
    """In a weight, or in the second row of one micro-batch of the forward or the backward pass of a module."""
    module = learner.stages[max(learner.stages)].get_submodule(where)
    if kind == "weight":
        weight = module.weight.to_local() if hasattr(module.weight, "to_local") else module.weight
        weight.detach().view(-1)[5] = math.nan
        return
    forward, calls = module.forward, []

    def planted(*arguments):
        output = forward(*arguments)
        calls.append(1)
        if (len(calls) - 1) % 2 != micro_batch:
            return output
        if kind == "backward":
            return _BadGradient.apply(output)
        first = output[0] if isinstance(output, tuple) else output
        (first.to_local() if hasattr(first, "to_local") else first).data[1, 2] = math.inf
        return output

    module.forward = planted


def traced(words: str, where: str, kind: str) -> tuple[str, bool, bool, list[int]]:
    """What is said of a bad step; whether gradients are left, whether the next trace is the same, rank 1's samples."""
    torch._dynamo.reset()
    config = load(str(JOB), (*words.split(), "--training.global_batch_size", "8"), dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, 0)
    micro_batches = next(loader)
    loader.close()
    learner.step(micro_batches, 1e-3)
    if dist.get_rank() == 1:
        plant(learner, where, kind, micro_batch=len(micro_batches) % 2)
    assert learner.step(micro_batches, 1e-3).result().skipped
    learner.gradients(micro_batches)  # the next step's, as where results are read late
    said = trace_nonfinite(learner, micro_batches)
    left = any(p.grad is not None for p in learner.parameters.values())
    return said, left, trace_nonfinite(learner, micro_batches) == said, [b.samples[1] for b in micro_batches]


PLANTED = {
    # kind: (words, module, kind, what is named, the one before it)
    "weight": ("", "layers.1.mlp.up_proj", "weight", "the weight layers.1.mlp.up_proj.weight", None),
    "forward": ("", "layers.1.mlp.down_proj", "forward", "the output of layers.1.mlp.down_proj", "input"),
    "forward, bf16": (BF16, "layers.1.mlp.down_proj", "forward", "the output of layers.1.mlp.down_proj", "input"),
    "backward": ("", "layers.1.mlp", "backward", "the gradient by the output of layers.1.mlp.down_proj", "gradient"),
}


@pytest.mark.parametrize("mesh", marked(MESHES, slow=["TP"]))
@pytest.mark.parametrize("name", PLANTED)
def test_the_first_module_and_the_rank_are_named(ranks, mesh, name):
    words, where, kind, what, before = PLANTED[name]
    (said, left, again, _), (same, *_, samples) = ranks(2, traced, f"{MESHES[mesh]} {words}", where, kind)
    assert said == same
    assert said.startswith(f"the first value that is not finite is in {what}, on rank 1 ({HOST})"), said
    assert not left
    assert again
    if before is None:
        assert said.endswith(f"({HOST})")
    else:
        assert any(f", for sample {sample}; the {before}" in said for sample in samples), (said, samples)


CHECKPOINTED = "--activation_checkpoint.mode selective"


@pytest.mark.parametrize(
    "words",
    [CHECKPOINTED, pytest.param(f"--compile.enable true {CHECKPOINTED}", marks=pytest.mark.slow)],
    ids=["AC", "compiled"],
)
def test_a_checkpointed_or_compiled_block(ranks, words):
    what = "layers.1" if "compile" in words else "layers.1.mlp.down_proj"
    (said, _, again, _), _ = ranks(2, traced, f"--mesh.dp_shard 2 {words}", what, "forward")
    assert f"in the output of {what}, on rank 1 ({HOST}), for sample " in said
    assert f"; the input of {what}, before it, is finite" in said
    assert again


def lost(words: str, cause: str) -> str:
    """What is said of a step that was bad once, or is so in sum alone."""
    config = load(str(JOB), words.split(), dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, 0)
    micro_batches = next(loader)
    loader.close()
    if cause == "overflow":
        clean = learner.passes.train
        object.__setattr__(learner.passes, "train", lambda calls, scale: clean(calls, scale * 1e21) / 1e21)
        assert learner.step(micro_batches, 1e-3).result().skipped
    return trace_nonfinite(learner, micro_batches)


def test_what_cannot_be_found_again_is_said(ranks):
    assert set(ranks(2, lost, MESHES["TP"], "once")) == {
        "computed again, the step is finite: a device or its memory is at fault, not the model or the data"
    }
    assert set(ranks(2, lost, MESHES["FSDP"], "overflow")) == {
        "every value and gradient is finite, but their sum is not: it overflows"
    }


def reduced() -> str:
    """What is said if a gradient is bad on one rank only after the reduction."""
    from tests.distributed.test_verdict import gradients_changed

    with gradients_changed(1, 1, poison):
        return lost(MESHES["DDP"], "once")


def test_a_reduced_gradient(ranks):
    (said, same) = ranks(2, reduced)
    assert said == same
    what = "the reduced gradient of layers.1.input_layernorm.weight"
    assert said == f"the first value that is not finite is in {what}, on rank 1 ({HOST})"
