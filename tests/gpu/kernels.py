"""What the device does at its best, and whether kernels that take raw pointers are given what they read."""

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn import Parameter
from torch.nn.attention import SDPBackend, sdpa_kernel

from configs.architectures.llama_keys import Delta
from configs.schema import Optimizer
from models.delta import outputs
from parallelisms.attention.blocked import attend, attend_backward
from parallelisms.attention.delta import by_kernels
from scripts.calibration import delta_inputs
from trainer.loss import _add_product_
from trainer.optimizers.build import build_optimizer

BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention": SDPBackend.FLASH_ATTENTION}


def milliseconds(work: Callable[[], object], times: int = 20) -> float:
    """Median time of `work` on the device."""
    for _ in range(3):
        work()
    each = []
    for _ in range(times):
        started, ended = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        started.record()
        work()
        ended.record()
        ended.synchronize()
        each.append(started.elapsed_time(ended))
    return statistics.median(each)


def matmul_tflops(size: int = 8192) -> float:
    """TFLOP/s of a square product in bfloat16, of random values: zeros are faster."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    return 2 * size**3 / milliseconds(lambda: a @ b) / 1e9


def copy_terabytes_per_second(n_bytes: int = 2**31) -> float:
    """Bytes read and written."""
    source = torch.empty(n_bytes, device="cuda", dtype=torch.uint8)
    target = torch.empty_like(source)
    return 2 * n_bytes / milliseconds(lambda: target.copy_(source)) / 1e9


NARROW: dict[str, tuple[dict[str, str], torch.dtype, int]] = {
    "nothing": ({}, torch.float32, 28),
    "moments": ({"moments_dtype": "bfloat16"}, torch.float32, 20),
    "weights": ({"rounding": "stochastic"}, torch.bfloat16, 14),
}
"""What AdamW keeps in bfloat16: its settings, the type of weights, the bytes of an element that it reads and writes."""


def update_terabytes_per_second(narrow: str, kernel: str, n_elements: int = 2**28) -> float:
    """Bytes that AdamW must read and write, of 16 matrices."""
    settings, dtype, n_bytes = NARROW[narrow]
    shape = (n_elements // 16 // 4096, 4096)
    parameters = [Parameter(torch.randn(shape, device="cuda", dtype=dtype)) for _ in range(16)]
    config = Optimizer.model_validate({"lr": 1e-3, "kernel": kernel, **settings})
    optimizer = build_optimizer(config, [(str(number), p) for number, p in enumerate(parameters)])
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    skip, divisor = torch.zeros((), device="cuda"), torch.ones((), device="cuda")
    return n_bytes * n_elements / milliseconds(lambda: optimizer.step(skip=skip, divisor=divisor)) / 1e9


def attention_tflops(backend: str, seq_len: int, head_dim: int) -> tuple[float, float]:
    """TFLOP/s of causal attention forward and backward, of 32 heads in 8 groups and 16,384 tokens; half is counted."""
    batch = 16384 // seq_len
    q, k, v = (_heads(batch, n, seq_len, head_dim).requires_grad_() for n in (32, 8, 8))
    grad, flops = torch.randn_like(q), 2 * batch * 32 * seq_len**2 * head_dim

    def forward() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    with sdpa_kernel(BACKENDS[backend]):
        out, ahead = forward(), milliseconds(forward)
    back = milliseconds(lambda: torch.autograd.grad(out, (q, k, v), grad, retain_graph=True))
    return flops / ahead / 1e9, 2.5 * flops / back / 1e9


def context_gradient_error(kernel: str = "auto") -> float:
    """Largest relative error of context parallelism's gradients, for queries whose logsumexp is a part of a whole.

    The reference is plain attention in float32. FlashAttention's backward reads the logsumexp by a bare pointer.

    Args:
        kernel: `attention.backend`.
    """
    q, k, v, grad = (_heads(2, 8, 1024, 64) for _ in range(4))
    half = slice(512, None)  # strided, as a rank's second chunk is
    out, logsumexp = attend(q, k, v, None, False, kernel)
    out = out.to(q.dtype)
    parts = grad[:, :, half], q[:, :, half], k, v, out[:, :, half], logsumexp[:, :, half]
    ours = attend_backward(*parts, None, False, kernel)
    exact = [t.float().requires_grad_() for t in (q[:, :, half], k, v)]
    with sdpa_kernel(SDPBackend.MATH):
        reference = F.scaled_dot_product_attention(*exact)
    gradients = torch.autograd.grad(reference, exact, grad[:, :, half].float())
    errors = [(a.float() - b).norm() / b.norm() for a, b in zip(ours, gradients, strict=True)]
    return max(error.item() for error in errors)


def head_gradient_error() -> float:
    """Largest error of the head's gradient, added up over chunks of bfloat16, relative to its largest value."""
    chunks = [(torch.randn(512, 1000, device="cuda"), torch.randn(512, 256, device="cuda")) for _ in range(4)]
    rounded = [(a.bfloat16(), b.bfloat16()) for a, b in chunks]
    total = torch.zeros(1000, 256, device="cuda")
    for a, b in rounded:
        _add_product_(total, a.T, b)
    exact = sum(a.double().T @ b.double() for a, b in rounded)
    return ((total - exact).abs().max() / exact.abs().max()).item()


def delta_milliseconds(rule: str, seq_len: int = 4096) -> tuple[float, float]:
    """Time of a layer of Gated DeltaNet of Qwen3-Next forward and backward, without its convolution; 16,384 tokens.

    Args:
        rule: an `attention.delta_backend`, torch or fla.
        seq_len: tokens of a sequence.
    """
    given = delta_inputs(16384 // seq_len, seq_len, 16, Delta())
    compute = {"torch": outputs, "fla": by_kernels}[rule]
    out, ahead = compute(*given, None), milliseconds(lambda: compute(*given, None), 10)
    grad = torch.randn_like(out)
    return ahead, milliseconds(lambda: torch.autograd.grad(out, given, grad, retain_graph=True), 10)


def _heads(batch: int, heads: int, seq_len: int, head_dim: int) -> Tensor:
    """(batch, heads, seq, head_dim), laid out as a projection's output is."""
    shape = (batch, seq_len, heads, head_dim)
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16).transpose(1, 2).detach()
