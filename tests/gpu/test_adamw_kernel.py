"""The optimizer's kernel on a real GPU: the bits of separate operations on a CPU."""

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="this build of torch has no Triton")

from tests.null_gpu.test_adamw_kernel import RATES, copied, made
from trainer.kernels import adamw, separate


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divisor", [None, 1.7])
def test_what_is_in_bfloat16_has_the_bits_of_a_cpu(divisor, dtype):
    before = made(adamw, keyed=True, copies=dtype == torch.float32, dtype=dtype)
    tensors = [
        replace(
            each, **{f.name: value.cuda() for f in fields(each) if isinstance(value := getattr(each, f.name), Tensor)}
        )
        for each in copied(before)
    ]
    divide = None if divisor is None else torch.tensor(divisor)
    adamw.Group().update(tensors, RATES, torch.tensor(0.0).cuda(), None if divide is None else divide.cuda())
    for found, old in zip(tensors, before, strict=True):
        gradient = old.gradient.float() * (1.0 if divide is None else 1.0 / divide)
        separate.update(old.parameter, gradient, old.exp_avg, old.exp_avg_sq, 4, old.key, RATES)
        for name in ("parameter", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(found, name).cpu(), getattr(old, name)), name
        if found.copy is not None:
            assert torch.equal(found.copy, found.parameter.bfloat16())
