"""The kernel that computes attention, where the job names it (`attention.backend`).

torch chooses a kernel by its own rules, which differ between versions and machines: on an H200 and torch 2.11, cuDNN's;
with `training.deterministic`, FlashAttention 2. A job that names one gets that one or an error. cuDNN's and
FlashAttention's kernels are torch's; FlashAttention 3 takes the place of torch's FlashAttention 2 where its package is
installed, also for packed documents and in context parallelism; flex is compiled for the shapes at hand.
"""

import importlib.util
import warnings
from collections.abc import Callable
from functools import partial
from math import ceil
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, activate_flash_attention_impl, sdpa_kernel
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from configs.architectures.parts import head_dim, n_kv_heads
from configs.errors import ConfigError
from configs.plan import attention_of
from configs.schema import Config

aten = torch.ops.aten

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
"""(q, k, v, mask) -> output; shapes as in a model's `attend`."""

_SDPA = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash2": SDPBackend.FLASH_ATTENTION,
    "flash3": SDPBackend.FLASH_ATTENTION,
}
_NAMES = {
    SDPBackend.CUDNN_ATTENTION: "cuDNN",
    SDPBackend.FLASH_ATTENTION: "FlashAttention 2",
    SDPBackend.EFFICIENT_ATTENTION: "memory-efficient attention",
    SDPBackend.MATH: "plain products, which hold all scores",
}
_FLASH3 = "flash_attn_interface"
"""The module of FlashAttention 3's package."""
_HOPPER = 9
"""The compute capability that it is written for."""
_FLEX_BLOCK = 128


def attention_kernel(config: Config, device: torch.device) -> str:
    """The kernel that will compute attention on this device, for people.

    Raises:
        ConfigError: the kernel that the job names can't run here; with torch's reason.
    """
    backend = config.attention.backend
    if device.type == "cpu":
        if backend not in ("auto", "flash2"):
            raise _refusal(backend, 'it runs on GPUs only, and this run is on a CPU; set "auto" or "flash2"')
        return "torch's kernel for CPUs"
    by_hand = config.mesh.cp > 1 and config.context.method != "all_to_all"
    if backend == "auto":
        own = _own_choice(config) if by_hand or config.data.document_mask else _NAMES[_torchs_choice(config, device)]
        return f'{own} (attention.backend = "auto")'
    if backend == "flex":
        return "flex attention, compiled"
    if backend == "flash3" and importlib.util.find_spec(_FLASH3) is None:
        raise _refusal(backend, f"the package {_FLASH3} (FlashAttention 3) is not installed")
    if backend == "flash3" and torch.cuda.get_device_capability(device)[0] != _HOPPER:
        name = torch.cuda.get_device_name(device)
        raise _refusal(backend, f'FlashAttention 3 is for Hopper GPUs, and this one is {name}; set "flash2"')
    if reason := _why_not(config, device, _SDPA[backend]):
        raise _refusal(backend, reason)
    return "FlashAttention 3" if backend == "flash3" else _NAMES[_SDPA[backend]]


def _refusal(backend: str, reason: str) -> ConfigError:
    return ConfigError(f'attention.backend is "{backend}": {reason}')


def _own_choice(config: Config) -> str:
    """What `blocked.py` and the model's kernel for documents use on a GPU."""
    takes = config.training.compute_dtype == "bfloat16" and head_dim(config.model) in range(8, 257, 8)
    return _NAMES[SDPBackend.FLASH_ATTENTION if takes else SDPBackend.MATH]


def _torchs_choice(config: Config, device: torch.device) -> SDPBackend:
    q, k = _example(config, device)
    return SDPBackend(torch._fused_sdp_choice(q, k, k, None, 0.0, True, enable_gqa=q.shape[1] != k.shape[1]))


def _why_not(config: Config, device: torch.device, kernel: SDPBackend) -> str:
    """Why torch would not compute the job's attention with a kernel; empty if it would."""
    with sdpa_kernel(kernel), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        try:
            _torchs_choice(config, device)
        except RuntimeError:  # it warns of the reasons
            reasons = [str(warning.message).partition(" (Triggered internally")[0] for warning in said]
            of_this_one = [
                reason for reason in reasons if "not used because" not in reason and "disabled" not in reason
            ]
            return f"torch can't use it for this job. {' '.join(of_this_one)}"
    return ""


def _example(config: Config, device: torch.device) -> tuple[Tensor, Tensor]:
    """Queries and keys of one sequence of the job."""
    dtype = getattr(torch, config.training.compute_dtype)
    width = head_dim(config.model)
    q, k = (
        torch.empty(1, heads, config.training.seq_len, width, device=device, dtype=dtype, requires_grad=True)
        for heads in (config.model.n_heads, n_kv_heads(config.model))
    )
    return q, k


# --------------------------------------------------------------------------- in the model


def apply_attention_backend(model: nn.Module, config: Config, device: torch.device) -> None:
    """Let the plan's attention modules use the job's kernel; call it before techniques that replace their `attend`.

    FlashAttention 3 replaces FlashAttention 2 in the whole process.
    """
    backend = config.attention.backend
    if backend == "auto":
        return
    if backend == "flash3" and device.type == "cuda":
        activate_flash_attention_impl("FA3")
    blocks = causal_blocks(config.training.seq_len, device) if backend == "flex" else None
    for module in attention_of(model):
        # Not closures, each of which the compiler would take for another function, and compile the block again.
        if blocks:
            module.attend = partial(_by_flex, blocks=blocks)
        else:
            module.attend = partial(_by_kernel, attend=module.attend, kernel=_SDPA[backend])


def _by_kernel(q: Tensor, k: Tensor, v: Tensor, mask: Any, attend: Attend, kernel: SDPBackend) -> Tensor:
    with sdpa_kernel(kernel):
        return attend(q, k, v, mask)


def _by_flex(q: Tensor, k: Tensor, v: Tensor, _mask: None, blocks: BlockMask) -> Tensor:
    """Causal attention; the config's checks refuse masks."""
    return flex_attention(q, k, v, block_mask=blocks, enable_gqa=q.shape[1] != k.shape[1])  # type: ignore[return-value]


def causal_blocks(seq_len: int, device: torch.device) -> BlockMask:
    """The causal mask in blocks: those below the diagonal are whole, those on it are masked inside."""
    n = ceil(seq_len / _FLEX_BLOCK)
    numbers = torch.arange(n, dtype=torch.int32, device=device)
    on_diagonal = numbers[:, None].expand(n, n).contiguous()  # of each row, only the first index counts
    below = numbers.expand(n, n).contiguous()
    return BlockMask.from_kv_blocks(
        torch.ones_like(numbers)[None, None],
        on_diagonal[None, None],
        numbers[None, None],
        below[None, None],
        BLOCK_SIZE=_FLEX_BLOCK,
        mask_mod=_is_past,
        seq_lengths=(seq_len, seq_len),
    )


def _is_past(_batch: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


# --------------------------------------------------------------------------- block by block


def fused(q: Tensor, k: Tensor, v: Tensor, causal: bool, kernel: str) -> tuple[Tensor, Tensor]:
    """Attention to one block of keys by a kernel that returns the logsumexp; as in `blocked.attend`."""
    if q.device.type == "cpu":
        return aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, 0.0, causal)
    if kernel == "cudnn":
        out, logsumexp, *_ = aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal)
        return out, logsumexp.squeeze(-1)
    return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal)[:2]


def fused_backward(
    grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, logsumexp: Tensor, causal: bool, kernel: str
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v; as in `blocked.attend_backward`, with a contiguous logsumexp."""
    if q.device.type == "cpu":
        op = aten._scaled_dot_product_flash_attention_for_cpu_backward
        return op(grad, q, k, v, out, logsumexp, 0.0, causal)
    lengths = None, None, q.shape[2], k.shape[2]  # cumulative lengths are for packed batches only
    if kernel == "cudnn":
        seed = torch.zeros(1, dtype=torch.int64, device=q.device)  # of the dropout, which there is none of
        op = aten._scaled_dot_product_cudnn_attention_backward
        return op(grad, q, k, v, out, logsumexp.unsqueeze(-1), seed, seed, None, *lengths, 0.0, causal)
    random = torch.zeros(2, dtype=torch.uint64, device=q.device)  # the dropout's state; there is no dropout
    op = aten._scaled_dot_product_flash_attention_backward
    return op(grad, q, k, v, out, logsumexp, *lengths, 0.0, causal, random, random)
