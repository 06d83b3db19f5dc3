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
