"""The hash of a tensor's bytes that tells whether copies are equal."""

import numpy as np
import pytest
import torch

from parallelisms.guards import replicas
from parallelisms.guards.replicas import digest

DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64]


def drawn(n, dtype=torch.float32):
    return (torch.randn(n, generator=torch.Generator().manual_seed(1)) * 100).to(dtype)


def by_numpy(tensor):
    """The formula of the docstring, in wrapping uint64 arithmetic."""
    raw = tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes()
    words = np.frombuffer(raw + bytes(-len(raw) % 8), dtype=np.int64)
    factors = replicas._factors(tensor.device).numpy().view(np.uint64)
    total = np.uint64(0)
    with np.errstate(over="ignore"):
        for first in range(0, len(words), len(factors)):
            piece = words[first : first + len(factors)]
            mixed = (piece + (piece >> 32) * np.int64(replicas._FOLD)).view(np.uint64)
            total = total * np.uint64(replicas._HORNER % 2**64) + (mixed * factors[: len(piece)]).sum(dtype=np.uint64)
    return int(total.view(np.int64))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [0, 1, 5, 4096, replicas.CPU_PIECE * 2 + 3])
def test_it_is_the_formula(dtype, n):
    assert digest(drawn(n, dtype)).item() == by_numpy(drawn(n, dtype))


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_bit_counts(dtype):
    tensor = drawn(7, dtype)  # of bfloat16 14 bytes: the last word is filled up
    whole, raw = digest(tensor).item(), tensor.view(torch.uint8)
    digests = {whole}
    for byte in range(len(raw)):
        for bit in range(8):
            raw[byte] ^= 1 << bit
            digests.add(digest(tensor).item())
            raw[byte] ^= 1 << bit
    assert len(digests) == 1 + 8 * len(raw)
    assert digest(tensor).item() == whole


def test_places_and_pairs_of_signs_count():
    tensor = drawn(replicas.CPU_PIECE * 4)
    digests = {digest(tensor).item(), digest(-tensor).item(), digest(tensor.flip(0)).item()}
    for i in (2, 3, 2 * replicas.CPU_PIECE, len(tensor) - 1):
        both = tensor.clone()
        both[[0, i]] *= -1
        digests.add(digest(both).item())
    assert len(digests) == 7
    zero = torch.zeros(4)
    assert digest(zero).item() != digest(-zero).item()  # bytes, not values


def test_layout_in_memory_does_not_count():
    tensor = drawn(60).view(6, 10)
    assert digest(tensor.T).item() == digest(tensor.T.contiguous()).item()
    assert digest(tensor.flatten()[1:]).item() == digest(tensor.flatten()[1:].clone()).item()
    assert digest(torch.tensor(3.0)).item() == digest(torch.tensor([3.0])).item()
