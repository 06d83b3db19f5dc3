"""What a rank holds in each stage of ZeRO, measured where stages differ, against the formula in parallelisms/fsdp.py.

All widths are multiples of the ranks, so that shares are exact; one type throughout, so that bytes are elements x 8.
"""

from collections.abc import Iterable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.layout import mesh_sizes, parameter_count
from configs.load import load
from parallelisms.mesh import build_mesh
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.planning.memory import estimate_memory
from trainer.step import build_learner


def size(tensors: Iterable[Tensor]) -> int:
    """Bytes of memory behind the tensors on this rank, each counted once."""
    local = [t.to_local() if isinstance(t, DTensor) else t for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for t in local if (s := t.untyped_storage()).nbytes()}.values())


def measure(stage: int, ranks_per_replica: int) -> dict[str, int]:
    """Bytes of this rank in a step of two micro-batches, at the end of the second forward pass and between steps."""
    n_ranks = dist.get_world_size()
    words = ("--fsdp.zero_stage", str(stage), "--training.micro_batch_size", str(8 // n_ranks // 2))
    words += ("--mesh.dp_shard", str(ranks_per_replica), "--mesh.dp_replicate", str(n_ranks // ranks_per_replica))
    config = load("parity.toml", words, n_ranks).config
    sizes = mesh_sizes(config, n_ranks)
    mesh = build_mesh(sizes, torch.device("cpu"))
    learner = build_learner(config, mesh)
    model, shards = learner.passes.model, list(learner.parameters.values())
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    found: dict[str, int] = {}
    passes = []

    def at_head(*_: object) -> None:
        """The last group computes: the second time, after one micro-batch's backward pass."""
        passes.append(None)
        if len(passes) == 2:
            found["gathered"] = size(p for p in model.parameters() if not isinstance(p, DTensor))
            whole = (p.grad for p in model.parameters() if not isinstance(p, DTensor) and p.grad is not None)
            found["whole gradients"] = size(whole)
            found["shards of gradients"] = size(p.grad for p in shards if p.grad is not None)

    def before_update(*_: object) -> None:
        found["gradients"] = size(p.grad for p in shards)

    model.lm_head.register_forward_hook(at_head)
    learner.optimizer.register_step_pre_hook(before_update)
    learner.step(next(loader), lr=1e-3)
    loader.close()
    found["parameters"] = size(model.parameters())
    found["optimizer"] = size(t for state in learner.optimizer.state.values() for t in state.values() if t.dim())
    found["head's group"] = 8 * sum(p.numel() for n, p in model.named_parameters() if n.startswith(("norm", "lm_head")))
    estimate = estimate_memory(config, sizes, "cpu")
    found["estimated states"] = estimate.parameters + estimate.optimizer
    found["estimated gradients"] = estimate.gradients
    return found


@pytest.mark.parametrize(("n_ranks", "n_shards"), [(2, 2), (4, 4), (4, 2)])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_bytes_follow_the_formula(ranks, stage, n_ranks, n_shards):
    whole = 8 * parameter_count(load("parity.toml").config.model)
    share = whole // n_shards
    for found in ranks(n_ranks, measure, stage, n_shards):
        assert found["parameters"] == share
        assert found["gradients"] == share
        assert found["optimizer"] == 2 * share
        # The root has no parameters of its own: what stage 3 has gathered at the head is the head's group.
        assert found["gathered"] == (whole if stage < 3 else found["head's group"])
        assert found["whole gradients"] == (whole if stage == 1 else 0)
        assert found["shards of gradients"] == (0 if stage == 1 else share)
        assert found["estimated gradients"] == (found["whole gradients"] or share)  # reduced, the whole ones go
        assert found["estimated states"] - 3 * share < 1000  # and the optimizer's step counts


def gradients_of(words: tuple[str, ...], n_ranks: int) -> dict[str, Tensor]:
    """The whole gradients of a step of bfloat16 weights, as the optimizer sees them."""
    config = load("parity.toml", words, n_ranks).config
    mesh = build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    found: dict[str, Tensor] = {}

    def before_update(*_: object) -> None:
        for name, parameter in learner.parameters.items():
            gradient = parameter.grad
            found[name] = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone()

    learner.optimizer.register_step_pre_hook(before_update)
    batch = next(loader)
    for _ in range(2):  # the second after what the first has left behind
        found.clear()
        learner.step(batch, lr=0.0)
    loader.close()
    return found


NARROW = ("--training.dtype", "bfloat16", "--training.compute_dtype", "float32", "--training.reduce_dtype")


RUNS = {
    "FSDP 2": (2, "--mesh.dp_shard 2"),
    "FSDP 2, ZeRO 2": (2, "--mesh.dp_shard 2 --fsdp.zero_stage 2"),
    "FSDP 2, ZeRO 1": (2, "--mesh.dp_shard 2 --fsdp.zero_stage 1"),
    "FSDP 2, states in CPU memory": (2, "--mesh.dp_shard 2 --fsdp.cpu_offload true"),
    "HSDP 2x2": (4, "--mesh.dp_replicate 2 --mesh.dp_shard 2"),
    "owner 2": (2, "--mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner"),
    "TP 2": (2, "--mesh.tp 2"),
    "PP 2": (2, "--mesh.pp 2"),
    "exactly": (1, "--training.reduction exact"),
    "one rank": (1, ""),
}


def whole_gradients(ranks, n_ranks: int, words: str, micro_batch_size: int, reduce_dtype: str = "float32") -> Tensor:
    size = str(micro_batch_size)
    run = (*NARROW, reduce_dtype, "--training.micro_batch_size", size, "--training.max_norm", "1e9", *words.split())
    gradients: dict[str, Tensor] = {}
    for each in ranks(n_ranks, gradients_of, run, n_ranks):
        gradients |= each
    assert {gradient.dtype for gradient in gradients.values()} == {torch.bfloat16}
    return torch.cat([gradients[name].flatten() for name in sorted(gradients)])


@pytest.fixture(scope="module")
def added_by_autograd(ranks) -> Tensor:
    """Of one rank, without micro-batches."""
    return whole_gradients(ranks, 1, "", micro_batch_size=8)


@pytest.mark.parametrize("run", marked(RUNS, slow=["FSDP 2", "FSDP 2, ZeRO 1", "HSDP 2x2", "TP 2", "PP 2", "exactly"]))
def test_gradients_are_added_in_reduce_dtype(ranks, added_by_autograd, run):
    """They are rounded once, after the sum."""
    n_ranks, words = RUNS[run]
    differ = whole_gradients(ranks, n_ranks, words, micro_batch_size=1) != added_by_autograd
    assert differ.double().mean() < 0.01


def test_a_sum_that_is_rounded_each_time_differs(ranks, added_by_autograd):
    differ = whole_gradients(ranks, 1, "", micro_batch_size=1, reduce_dtype="bfloat16") != added_by_autograd
    assert differ.double().mean() > 0.3
