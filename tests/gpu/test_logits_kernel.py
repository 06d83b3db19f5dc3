"""The kernel of the largest logits on a real GPU, against all products."""

import pytest
import torch

from tests.null_gpu.brute_force import CASES, brute_force, case

pytest.importorskip("triton", reason="this build of torch has no Triton")

from parallelisms.attention.logits_kernel import largest_of_heads


@pytest.mark.parametrize("head_dim", [64, 80, 128, 192, 256])
@pytest.mark.parametrize("name", CASES)
def test_values(name, head_dim):
    q, k, *rest = case(name, times=30, head_dim=head_dim)
    numbers, first, window = rest
    q, k = q.bfloat16(), k.bfloat16()
    on_gpu = None if numbers is None else numbers.cuda()
    found = largest_of_heads(q.cuda(), k.cuda(), on_gpu, first, window)
    # Products of bfloat16 are exact in float32; their sums differ in order.
    torch.testing.assert_close(found.cpu(), brute_force(q.float(), k.float(), *rest), rtol=1e-5, atol=0)
