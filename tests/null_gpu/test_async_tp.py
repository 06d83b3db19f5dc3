"""comm.async_tp: the compiler's passes meet Keel's blocks, and put fused operators where collectives were."""

import os
from collections import Counter

import pytest
import torch
from torch._inductor.fx_passes import post_grad

from tests.null_gpu.step import build, load_job
from tests.null_gpu.test_axes import SMALL

GATHER, SCATTER = "_c10d_functional.all_gather_into_tensor", "_c10d_functional.reduce_scatter_tensor"
FUSED = ("symm_mem.fused_all_gather_matmul", "symm_mem.fused_matmul_reduce_scatter")


class _SeenEnough(Exception):
    """The graph is known; this device has no symmetric memory to run it in."""


def collectives(words: str) -> tuple[Counter[str], Counter[str]]:
    """On a rank: the collectives of a block's forward pass, before and after the compiler's pass."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    found: list[Counter[str]] = []
    fuse = post_grad.micro_pipeline_tp_pass

    def watch(graph: torch.fx.Graph) -> None:
        found.append(_collectives_of(graph))
        fuse(graph)
        found.append(_collectives_of(graph))
        raise _SeenEnough("_SeenEnough")

    uncached = torch._inductor.config.patch(force_disable_caches=True)  # a graph found on disk meets no pass
    with uncached, pytest.MonkeyPatch.context() as patch:
        patch.setattr(post_grad, "micro_pipeline_tp_pass", watch)
        patch.setattr(torch.cuda, "can_device_access_peer", lambda *_: True)
        learner, loader = build(load_job("llama_1b.toml", [*SMALL.split(), "--mesh.tp", "2", *words.split()], 2))
        with pytest.raises(Exception, match="_SeenEnough"):
            learner.step(next(loader), 1e-4)
        loader.close()
    before, after = found
    return before, after


def _collectives_of(graph: torch.fx.Graph) -> Counter[str]:
    names = (str(node.target).removesuffix(".default") for node in graph.nodes if node.op == "call_function")
    return Counter(name for name in names if name.startswith(("_c10d_functional.", "symm_mem.")))


def test_gathers_and_reductions_of_a_block_are_fused_with_its_products(null_ranks):
    for before, after in null_ranks(2, collectives, "--comm.async_tp true"):
        assert (before[GATHER], before[SCATTER]) == (2, 2)
        assert (after[GATHER], after[SCATTER]) == (0, 0)
        assert [after[name] for name in FUSED] == [2, 2]


def test_in_8_bits_the_reductions_are(null_ranks):
    pytest.importorskip("torchao", reason="needs the package torchao")
    for _, after in null_ranks(2, collectives, "--comm.async_tp true --float8.recipe tensorwise"):
        assert after["symm_mem.fused_scaled_matmul_reduce_scatter"] == 2
        assert after[GATHER] == 2
