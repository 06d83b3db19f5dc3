"""AdamW with moments in bfloat16 as separate torch operations, for every device and for parameters of any type.

Parameters in bfloat16 are updated in float32 and rounded stochastically, as the moments are.

The operations are single additions, products, quotients and square roots, each correctly rounded, so a device or an
element's place in a tensor changes no bit, and `adamw.py` computes the same bits in Triton. (torch's square root of a
float32 on a CPU is not correctly rounded; numpy's is.) On a CPU, each operation is a pass over memory: blocks that fit
into the cache and operations in place make it two to three times as fast.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from trainer.kernels.keyed import Key, blocks, further_bits, random_bits, rounded

STEP_BITS = 24
"""Updates are counted in float32, which counts to 2^24."""


@dataclass(frozen=True)
class Rates:
    """AdamW's settings for an update."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float


def power(base: float, exponent: int) -> float:
    """base ** exponent in float64, by squaring: the same bits on every device."""
    result = 1.0
    for bit in range(STEP_BITS):
        result = result * base if exponent >> bit & 1 else result
        base *= base
    return result


@torch.no_grad()
def update(
    parameter: Tensor, gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, step: int, key: Key, rates: Rates
) -> None:
    """Update this rank's part of a parameter, and its moments, in place.

    Args:
        parameter, gradient: the part, float32, float64 or bfloat16.
        exp_avg, exp_avg_sq: the part's moments, bfloat16.
        step: number of this update, from 1.
        key: of the parameter.
        rates: AdamW's settings.
    """
    p, m, v = (tensor.view(-1) for tensor in (parameter, exp_avg, exp_avg_sq))
    g = gradient.reshape(-1)
    dtype = torch.promote_types(p.dtype, torch.float32)
    lr = torch.tensor(rates.lr, dtype=dtype).item()
    step_size = lr / (1.0 - power(rates.beta1, step))
    scale = 1.0 / math.sqrt(1.0 - power(rates.beta2, step))
    for at in blocks(len(p), p.device):
        slope = g[at].to(dtype)
        mean = m[at].to(dtype).mul_(rates.beta1).add_(slope * (1.0 - rates.beta1))
        square = v[at].to(dtype).mul_(rates.beta2).add_((slope * slope).mul_(1.0 - rates.beta2))
        change = (mean * step_size).div_(_root(square).mul_(scale).add_(rates.eps))
        moved = p[at].to(dtype)  # the parameter's own memory, unless it is in bfloat16
        moved.sub_(moved * (rates.lr * rates.weight_decay)).sub_(change)
        bits = random_bits(key, step, at.start, at.stop, p.device)
        if p.dtype == torch.bfloat16:
            p[at] = rounded(moved, further_bits(bits) & 0xFFFF)
        m[at] = rounded(mean.float(), bits & 0xFFFF)
        v[at] = rounded(square.float(), bits.bitwise_right_shift_(16).bitwise_and_(0xFFFF))


def _root(values: Tensor) -> Tensor:
    """The square root, of float32 correctly rounded; the float64's is so near that rounding it is correct."""
    if values.device.type == "cpu" and values.dtype == torch.float32:
        return torch.from_numpy(np.sqrt(values.numpy()))
    return values.double().sqrt().to(values.dtype)
