"""A step's fingerprint on every kind of mesh, against the whole gradients; and who held a flipped bit."""

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.guards.fingerprint import GradientFingerprint
from parallelisms.mesh import build_mesh
from parallelisms.ranks import local_part
from tests.end_to_end.launch import TINY
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.step import Learner, build_learner

MESHES = {
    "FSDP 2": ("--mesh.dp_shard", "2"),
    "DDP 2": ("--mesh.dp_replicate", "2"),
    "CP 2": ("--mesh.cp", "2"),
    "TP 2": ("--mesh.tp", "2"),
    "PP 2": ("--mesh.pp", "2"),
    "owner 2": ("--mesh.dp_replicate", "2", "--fsdp.partition", "owner"),
    "EP 2": ("--mesh.dp_shard", "2", "--mesh.ep", "2", "--model.n_experts", "4"),
    "owner 4 x EP 2": (
        *("--mesh.dp_replicate", "4", "--fsdp.partition", "owner"),
        *("--mesh.ep", "2", "--model.n_experts", "4"),
    ),
    "HSDP 2x2": ("--mesh.dp_replicate", "2", "--mesh.dp_shard", "2"),
    "FSDP 2 x TP 2": ("--mesh.dp_shard", "2", "--mesh.tp", "2"),
}
SEED, STEP = 0, 3


def whole(learner: Learner) -> dict[str, torch.Tensor]:
    """The gradients of the whole model, on every rank."""
    own = {
        name: (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).clone()
        for name, p in learner.parameters.items()
    }
    gathered = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, own)
    return {name: gradient for each in gathered for name, gradient in each.items()}


def prepare(words: tuple[str, ...]) -> tuple[Learner, dict[str, torch.Tensor], int]:
    """A learner with the gradients of one global batch, and the sum of its micro-batches' digests."""
    job = load(str(TINY), ("--metrics.fingerprint", "true", *words), dist.get_world_size())
    mesh = build_mesh(mesh_sizes(job.config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(job.config, mesh)
    loader = build_loader(job.config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    micro_batches = next(loader)
    learner.gradients(micro_batches)
    loader.close()
    return learner, whole(learner), sum(batch.digest() for batch in micro_batches)


def fingerprint_of(words: tuple[str, ...]) -> dict:
    learner, gradients, data = prepare(words)
    assert learner.fingerprint is not None
    found = learner.fingerprint.read(learner.fingerprint.sums(STEP, data))
    expected = reference(learner.fingerprint, gradients)
    result = {"found": vars(found), "expected": expected, "names": learner.fingerprint.names}
    # A bit of the last rank's part of one gradient flips.
    name = next(reversed(learner.parameters))
    if dist.get_rank() == dist.get_world_size() - 1:
        local_part(learner.parameters[name].grad).view(torch.int32).view(-1)[0] ^= 1
    flipped = learner.fingerprint.read(learner.fingerprint.sums(STEP, data))
    places = np.flatnonzero(found.digests != flipped.digests).tolist()
    result["flipped"] = [learner.fingerprint.names[place] for place in places]
    result["name"] = name
    result["ranks"] = np.flatnonzero(found.ranks != flipped.ranks).tolist()
    return result


def reference(fingerprint: GradientFingerprint, gradients: dict[str, torch.Tensor]) -> dict:
    digests, norms, samples = [], [], []
    for name in fingerprint.names:
        gradient = gradients[name].contiguous()
        digests.append(int(gradient.numpy().view(np.uint32).sum(dtype=np.uint64)) % (1 << 32))
        norms.append(gradient.double().norm().item())
        samples.append(
            gradient.flatten()[xxhash.xxh3_64_intdigest(f"{SEED}/{STEP}/{name}".encode()) % gradient.numel()].item()
        )
    return {"digests": digests, "norms": norms, "samples": samples}


def digest_of_the_global_batch() -> int:
    """The digest of the first global batch, one sample at a time."""
    config = load(str(TINY), ("--training.micro_batch_size", "1"), 1).config
    loader = build_loader(config, 0, 1, start_sample=0)
    total = 0
    for sample, batch in enumerate(next(loader)):
        content = batch.tokens.numpy().tobytes() + batch.targets.numpy().tobytes()
        total += xxhash.xxh3_64_intdigest(content, seed=sample) // 2**32
    loader.close()
    return total % 2**32


@pytest.mark.parametrize(
    "mesh", marked(MESHES, slow=["DDP 2", "owner 2", "EP 2", "owner 4 x EP 2", "HSDP 2x2", "FSDP 2 x TP 2"])
)
def test_it_is_that_of_the_whole_gradients(ranks, mesh):
    n = 4 if "x" in mesh else 2
    results = ranks(n, fingerprint_of, MESHES[mesh])
    for result in results:
        found, expected = result["found"], result["expected"]
        assert found["digests"].tolist() == expected["digests"]
        assert found["samples"].tolist() == expected["samples"]
        np.testing.assert_allclose(found["norms"], expected["norms"], rtol=1e-6)
        assert found["data"] == digest_of_the_global_batch()
        assert len(found["ranks"]) == n
        assert result["ranks"] == [n - 1]
    assert results[-1]["flipped"] == [results[-1]["name"]]  # the last rank has flipped a bit of its last parameter
