"""What a token costs: parameters, FLOPs, and the share of the device's peak that they make (MFU). No torch.

Forward and backward of one token cost, as in appendix B of PaLM (Chowdhery et al. 2022),

    6 * matrix elements + 12 * layers * heads * head_dim * seq_len        [full]

A matrix costs 2 FLOPs an element forward and 4 backward; of a mixture of experts those count that a token is sent to
(none is dropped, so all are computed). The embedding is looked up, not multiplied, and not counted
unless the head is tied to it; attention multiplies queries by keys, and scores by values. Norms, rotary positions,
softmax and SwiGLU's product are left out, and so is what activation checkpointing computes twice.

The formula counts all of the seq_len x seq_len scores, but a causal model needs (and a flash kernel computes) half:

    6 * matrix elements +  6 * layers * heads * head_dim * seq_len        [causal]

Keel's `mfu` and `tflops` are the *causal* ones: they never count work that nobody does, and so cannot flatter long
sequences. The figures that PaLM, llm-foundry and torchtitan publish are full ones (early torchtitan's count the
embedding besides); multiply `mfu` by full / causal, both in the start-up summary, to compare. What
`data.document_mask` hides is counted in either.
"""

from dataclasses import dataclass

from configs.layout import active_matrices, head_dim
from configs.schema import Model


@dataclass(frozen=True)
class TokenFlops:
    """FLOPs of the forward and backward pass of one token."""

    causal: int
    """With half of the attention scores: what `mfu` and `tflops` count."""
    full: int
    """With all of them: what PaLM's formula counts."""


def flops_per_token(model: Model, seq_len: int) -> TokenFlops:
    """FLOPs a token of a sequence of `seq_len`, by the formulas at the top of this file."""
    head = model.vocab_size * model.dim
    matrices = sum(active_matrices(model, layer) for layer in range(model.n_layers)) + head
    attention = model.n_layers * model.n_heads * head_dim(model) * seq_len
    return TokenFlops(causal=6 * matrices + 6 * attention, full=6 * matrices + 12 * attention)


# --------------------------------------------------------------------------- devices


@dataclass(frozen=True)
class _Peak:
    """Dense (not 2:4 sparse) TFLOP/s of NVIDIA's data sheets."""

    bfloat16: float
    tf32: float
    float32: float


_H100_SXM = _Peak(989.5, 494.5, 67.0)
_H100_PCIE = _Peak(756.5, 378.0, 51.0)
_HOPPER_NVL = _Peak(835.5, 417.5, 60.0)
_A100 = _Peak(312.0, 156.0, 19.5)

# By the exact name that torch.cuda.get_device_name gives: "GH200", "A100-SXM-64GB" (a cut of its own) or a MIG slice
# ("H100 80GB HBM3 MIG 1g.10gb") contain a known name, yet have another peak.
_PEAKS = {
    "NVIDIA A100-SXM4-40GB": _A100,
    "NVIDIA A100-SXM4-80GB": _A100,
    "NVIDIA A100-PCIE-40GB": _A100,
    "NVIDIA A100 80GB PCIe": _A100,
    "NVIDIA H100 80GB HBM3": _H100_SXM,
    "NVIDIA H100 PCIe": _H100_PCIE,
    "NVIDIA H100 NVL": _HOPPER_NVL,
    "NVIDIA H200": _H100_SXM,
    "NVIDIA H200 NVL": _HOPPER_NVL,
    "NVIDIA B200": _Peak(2250.0, 1125.0, 75.0),
}


def peak_flops(device_name: str, compute_dtype: str, tf32: bool = False) -> float | None:
    """Peak FLOP/s of a device for matrix products, dense; None if it is not known for certain, as for any CPU.

    Args:
        device_name: what `torch.cuda.get_device_name()` says, or "cpu".
        compute_dtype: `training.compute_dtype`.
        tf32: whether float32 products run on the tensor cores (`torch.get_float32_matmul_precision() != "highest"`).
    """
    peak = _PEAKS.get(device_name)
    if peak is None or compute_dtype == "float64":
        return None
    if compute_dtype == "bfloat16":
        return peak.bfloat16 * 1e12
    return (peak.tf32 if tf32 else peak.float32) * 1e12


def tflops_per_device(tokens_per_second: float | None, flops_a_token: int, world_size: int) -> float | None:
    """Model TFLOP/s that each device does on average; None if the speed is unknown."""
    return None if tokens_per_second is None else tokens_per_second * flops_a_token / world_size / 1e12


def mfu(tflops: float | None, peak: float | None) -> float | None:
    """Model FLOPs utilization, 0 to 1, of `tflops_per_device` and `peak_flops`; None if either is unknown."""
    return None if tflops is None or peak is None else tflops * 1e12 / peak
