"""What a step asks of a GPU in floating-point operations and bytes, counted while it runs.

Operators are counted as they are dispatched: products and attention by their operations, all others by the bytes of
their tensors, each read or written once. Kernels of inductor's generated code are counted as they are launched: every
operand once for its loads and once for its stores, as the code has them, and at most the elements that the kernel
covers. What a cache saves or a second pass over a row costs is not counted. The optimizer's update, for which there are
several kernels, is counted from its tensors instead.
"""

import re
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._inductor.runtime.triton_heuristics import CachingAutotuner
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_PRODUCTS = {"mm": 0, "bmm": 0, "_grouped_mm": 0, "_scaled_mm": 0, "_scaled_grouped_mm_v2": 0, "addmm": 1, "baddbmm": 1}
"""Matrix products, and which argument is their left matrix. Of the bytes of products and attention nothing is counted,
since the rates at which they run contain them."""
_ATTENTION = re.compile(r"aten::_scaled_dot_product_\w*attention")
_NOTHING_MOVES = re.compile(r"aten::(empty|new_empty|detach|alias|lift|set_|resize|record_stream|_local_scalar|item)")
_WRITES_ONLY = re.compile(r"aten::(_foreach_)?(copy_|fill_|zero_)")
_UPDATES = re.compile(r"aten::_fused_adamw_")
_OF_COLLECTIVES = ("c10d", "_c10d_functional")
Work = Counter[str]
"""`gemm_flops`, `gemm_flops_float8`; `attention_flops_forward` and `_backward` (of the causal half);
`generated_bytes` (inductor's kernels); `operator_bytes` (torch's own); `update_bytes` (the optimizer);
`generated_launches`; `collective_bytes` (inputs)."""


@contextmanager
def counting(optimizer: Any, parameters: Any) -> Iterator[Work]:
    """Count what runs in this context: one step, with its update.

    Args:
        optimizer: a `TrainingOptimizer`.
        parameters: those that it updates on this rank.
    """
    work: Work = Counter()
    launch = CachingAutotuner.run

    def counted_launch(self: CachingAutotuner, *arguments: Any, **settings: Any) -> Any:
        work["generated_launches"] += 1
        work["generated_bytes"] += _bytes_of_launch(self, arguments)
        return launch(self, *arguments, **settings)

    CachingAutotuner.run = counted_launch  # type: ignore[method-assign]
    try:
        with _Operators(work):
            yield work
    finally:
        CachingAutotuner.run = launch  # type: ignore[method-assign]
    work["update_bytes"] += _bytes_of_update(optimizer, parameters)


class _Operators(TorchDispatchMode):
    def __init__(self, work: Work) -> None:
        super().__init__()
        self.work = work

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """Compiled code runs as ever; in other modes torch would run what it was compiled from."""
        return True

    def __torch_dispatch__(self, operator: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords = keywords or {}
        if any(kind not in (Tensor, torch.nn.Parameter) for kind in types):
            return NotImplemented  # a DTensor: its operators on the rank's part come here by themselves
        result = operator(*arguments, **keywords)
        name = operator._schema.name
        if (product := name.removeprefix("aten::")) in _PRODUCTS:
            left, right = arguments[_PRODUCTS[product] :][:2]
            kind = "gemm_flops_float8" if product.startswith("_scaled") else "gemm_flops"
            self.work[kind] += 2 * left.numel() * right.shape[-1]
        elif _ATTENTION.match(name):
            is_backward = "backward" in name
            query, key, value = arguments[is_backward:][:3]
            forward = query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            self.work[f"attention_flops_{'backward' if is_backward else 'forward'}"] += (
                forward * 5 // 2 if is_backward else forward
            )
        elif operator.namespace in _OF_COLLECTIVES:
            self.work["collective_bytes"] += sum(_bytes(each) for each in tree_leaves(arguments))
        elif not (operator.is_view or _NOTHING_MOVES.match(name) or _UPDATES.match(name)):
            self.work["operator_bytes"] += _bytes_of_operator(operator, arguments, keywords, result)
        return result


def _bytes_of_operator(operator: Any, arguments: Any, keywords: Any, result: Any) -> int:
    """Bytes on the device: inputs are read; results, and what is written in place, are written."""
    read = written = 0
    schema = operator._schema
    named = dict(zip([each.name for each in schema.arguments], arguments, strict=False)) | keywords
    for argument in schema.arguments:
        size = sum(_bytes(each) for each in tree_leaves(named.get(argument.name)))
        is_written = argument.alias_info is not None and argument.alias_info.is_write
        written += size if is_written else 0
        only_written = is_written and (argument.is_out or _WRITES_ONLY.match(schema.name))
        read += 0 if only_written else size
    if not any(each.alias_info for each in schema.returns):
        written += sum(_bytes(each) for each in tree_leaves(result))
    return read + written


def _bytes_of_launch(kernel: CachingAutotuner, arguments: Any) -> int:
    """Bytes of a launch of a generated kernel."""
    source = kernel.fn.src
    named = dict(zip(kernel.triton_meta["signature"], arguments, strict=False))
    covered = 1
    for name, value in named.items():
        if name.endswith("numel") and isinstance(value, int):
            covered *= value
    total = 0
    for name, value in named.items():
        if isinstance(value, Tensor) and value.is_cuda:
            passes = sum(bool(re.search(rf"tl\.{way}\({name}\b", source)) for way in ("load", "store|atomic_add"))
            total += passes * min(value.numel(), covered) * value.element_size()
    return total


def _bytes_of_update(optimizer: Any, parameters: Any) -> int:
    """Bytes of an update: a gradient is read; a parameter and its moments are read and written."""
    total = 0
    for parameter in parameters:
        if state := optimizer.owned_state(parameter):
            moments = [value for value in state.values() if isinstance(value, Tensor) and value.ndim]
            total += 3 * _bytes(parameter) + 2 * sum(map(_bytes, moments))
    return total


def _bytes(value: Any) -> int:
    """Of a tensor's part on this rank's device; of anything else, none."""
    if not isinstance(value, Tensor):
        return 0
    local = getattr(value, "_local_tensor", value)
    return local.numel() * local.element_size() if local.is_cuda else 0
