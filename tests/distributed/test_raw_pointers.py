"""Tensors handed to kernels that read them by a bare pointer are laid out as those take for granted.

A kernel that honors strides on a CPU may not on a GPU: FlashAttention's reads the logsumexp from its first byte on,
grouped products want rows or columns without gaps, and a collective sends what lies behind a pointer. Every call of a
step is seen, also those inside of Keel's own operators; what calls CUDA's packed kernels is in tests/unit/packed_flash.
"""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.utils._python_dispatch import TorchDispatchMode

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from parallelisms.torch_internals import listening, tensors_of
from scripts.parity_rows import DOCUMENTS, MOE, words
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.step import build_learner

BFLOAT16 = ("--training.dtype", "float32", "--training.reduce_dtype", "float32", "--training.compute_dtype", "bfloat16")
CASES = {
    "alone": (1, ()),
    "alone, documents": (1, words(DOCUMENTS)),
    **{
        f"CP 2 {method}": (2, ("--mesh.cp", "2", "--context.method", method))
        for method in ("gather", "ring", "all_to_all")
    },
    "CP 2 gather, documents": (2, ("--mesh.cp", "2", *words(DOCUMENTS))),
    "TP 2": (2, ("--mesh.tp", "2")),
    "experts": (1, words(MOE)),
    "experts, EP 2": (2, ("--mesh.ep", "2", "--training.micro_batch_size", "2", *words(MOE))),
}
BY_ROWS = ("query", "key", "value", "grad_out", "grad", "out")
"""Arguments of attention whose strides are passed on, but for that of their last dimension, which is 1."""
BARE = ("logsumexp",)
"""Those that are read from their first byte on."""


class Layouts(TorchDispatchMode):
    """Checks the arguments of each call."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: set[str] = set()
        self.within = ""
        """Keel's operator that calls."""

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = op._schema.name
        if name in OPDEFS and op.namespace == "keel":  # see what it is made of
            self.within = name
            with self:
                made = OPDEFS[name]._init_fn(*args, **(kwargs or {}))
            self.within = ""
            return made
        given = dict(zip((argument.name for argument in op._schema.arguments), args, strict=False)) | (kwargs or {})
        if "attention" in name:
            self.calls.add(name.removeprefix("aten::"))
            check_attention(name, given, self.within)
        if name == "aten::_grouped_mm":
            self.calls.add("_grouped_mm")
            check_grouped(given)
        return op(*args, **(kwargs or {}))


def check_attention(name: str, given: dict[str, Any], within: str) -> None:
    # The other calls are made on a CPU alone: by torch's own autograd, one by one, and with a mask.
    is_as_on_cuda = "context_attention" in within and given.get("attn_mask") is None
    for argument, tensor in given.items():
        if argument in BARE and isinstance(tensor, Tensor) and is_as_on_cuda:
            assert tensor.is_contiguous(), f"{name}: {argument} has strides {tensor.stride()}"
        if argument in BY_ROWS:
            assert tensor.stride(-1) == 1, f"{name}: {argument} has strides {tensor.stride()}"


def check_grouped(given: dict[str, Any]) -> None:
    """As CUTLASS wants it: rows or columns without gaps, whose beginnings are a multiple of 16 bytes apart."""
    for argument in ("self", "mat2"):
        tensor = given[argument]
        apart = {tensor.stride(-1), tensor.stride(-2)} - {1}
        assert 1 in tensor.stride()[-2:], f"{argument} has strides {tensor.stride()}"
        assert all(n * tensor.element_size() % 16 == 0 for n in apart), f"{argument} has strides {tensor.stride()}"
    if given.get("offs") is not None:
        assert given["offs"].is_contiguous()
        assert given["offs"].dtype == torch.int32


def calls_of_a_step(overrides: tuple[str, ...]) -> tuple[set[str], int]:
    """The operators whose arguments were checked, and how many tensors of collectives were."""
    config = load("parity.toml", (*BFLOAT16, *overrides), dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    exchanged = 0

    def check_collective(operator: str, _: dist.ProcessGroup, arguments: tuple[Any, ...]) -> None:
        nonlocal exchanged
        for tensor in tensors_of(arguments):
            assert tensor.is_contiguous(), f"{operator} is given a tensor with strides {tensor.stride()}"
            exchanged += 1

    layouts = Layouts()
    with listening(check_collective), layouts:
        learner.step(next(loader), lr=1e-3)
    loader.close()
    return layouts.calls, exchanged


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", marked(CASES, slow=["CP 2 gather", "CP 2 all_to_all", "CP 2 gather, documents", "TP 2"])
)
def test_layouts(ranks, name):
    n_ranks, overrides = CASES[name]
    for calls, exchanged in ranks(n_ranks, calls_of_a_step, overrides):
        flash = "_scaled_dot_product_flash_attention_for_cpu"
        assert {flash, f"{flash}_backward"} <= calls
        assert ("_grouped_mm" in calls) == ("experts" in name)
        assert (exchanged > 0) == (n_ranks > 1)  # a rank alone exchanges nothing
