"""flash-linear-attention's kernels, run by Triton's interpreter, against Keel's recurrence in float64: errors as JSON.

The interpreter computes on a CPU, but not in bfloat16, so that the kernels take float32 here. It needs a driver, a
choice among the kernels' configurations, which are timed otherwise, and integers of loops that can be converted.
"""

import json
import os
import sys
from types import SimpleNamespace

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from triton.backends.compiler import GPUTarget
from triton.runtime.autotuner import Autotuner

from models.delta import outputs

triton.runtime.driver.set_active(
    SimpleNamespace(
        get_benchmarker=lambda: None,
        get_current_target=lambda: GPUTarget("cpu", 0, 32),
        get_current_device=lambda: 0,
        get_active_torch_device=lambda: torch.device("cpu"),
    )
)


def run_first(self, *arguments, **named):
    self.nargs = dict(zip(self.arg_names, arguments, strict=False))
    return self.fn.run(*arguments, **named, **self.configs[0].all_kwargs())


Autotuner.run = run_first

import fla.ops.common.chunk_delta_h as loops  # noqa: E402

from parallelisms.attention import delta  # noqa: E402

BATCH, SEQ_LEN, KEY_HEADS, SHARING, KEY_DIM, VALUE_DIM = 2, 150, 2, 2, 32, 16


class Number(int):
    def to(self, _):
        return self


def main() -> None:
    loops.range = lambda *bounds: map(Number, range(*(int(bound) for bound in bounds)))
    delta._DTYPE = torch.float32
    torch.manual_seed(0)
    heads = (BATCH, SEQ_LEN, KEY_HEADS)
    q, k = (F.normalize(torch.randn(*heads, KEY_DIM), dim=-1) for _ in range(2))
    v = torch.randn(*heads, SHARING, VALUE_DIM)
    log_decay, strength = -0.5 * torch.rand(*heads, SHARING), torch.rand(*heads, SHARING)
    given = [q * KEY_DIM**-0.5, k, v, log_decay, strength]
    start = torch.randn(BATCH, KEY_HEADS, SHARING, KEY_DIM, VALUE_DIM)

    def memory(kept, gained):
        """A memory before the tokens that depends on all that they make of it."""
        return kept @ start.to(kept.dtype) + gained

    found = {}
    for length, before in ((None, None), (20, None), (3, None), (None, memory), (20, memory)):
        documents = None
        if length:
            documents = (torch.rand(BATCH, SEQ_LEN) < 1 / length).cumsum(1, dtype=torch.int32)
        weights = torch.randn_like(v)
        ours = _with_gradients(delta.by_kernels, given, documents, before, weights)
        exact = _with_gradients(outputs, [each.double() for each in given], documents, before, weights.double())
        errors = [((a.double() - b).norm() / b.norm()).item() for a, b in zip(ours, exact, strict=True)]
        names = ("outputs", "q", "k", "v", "log_decay", "strength")
        found[f"{length}, {'a memory' if before else 'zeros'} before"] = dict(zip(names, errors, strict=True))
    json.dump(found, sys.stdout)


def _with_gradients(rule, given, documents, memory, weights) -> list[Tensor]:
    leaves = [each.detach().clone().requires_grad_() for each in given]
    out = rule(*leaves, documents, memory)
    return [out, *torch.autograd.grad(out, leaves, weights)]


if __name__ == "__main__":
    main()
