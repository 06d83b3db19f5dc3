"""The largest logit of each head as one Triton kernel, which keeps products in registers.

Each program multiplies a block of queries with one block of keys after the other, as FlashAttention does, and keeps the
maximum. Import this file only where Triton is installed.
"""

# Types of a kernel's arguments are Triton's.
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN201, N803

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 128
"""Queries of a program."""
KEYS = 64
"""Keys that it multiplies them with at a time."""
N_WARPS = 4
N_STAGES = 3

_F32, _I64 = map(tl.constexpr, (tl.float32, tl.int64))


@triton.jit
def largest_products(
    q,
    k,
    numbers,
    found,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    first,
    n_rows,
    seq_len,
    n_heads,
    heads_of_key,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    WINDOW: tl.constexpr,
    DOCUMENTS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
):
    """found[batch * n_heads + head, block of queries] = the largest product of the block's queries and keys they see.

    Queries are the tokens from `first` on of sequences of `seq_len`; the three strides of each are of its dimensions.
    """
    block = tl.program_id(0)
    batch = tl.program_id(1) // n_heads
    head = tl.program_id(1) % n_heads
    rows = block * ROWS + tl.arange(0, ROWS)
    at = first + rows
    features = tl.arange(0, WIDTH)
    q += batch.to(_I64) * q_batch + head.to(_I64) * q_head
    k += batch.to(_I64) * k_batch + (head // heads_of_key).to(_I64) * k_head
    is_row = rows < n_rows
    is_feature = features < HEAD_DIM
    queries = tl.load(
        q + rows[:, None].to(_I64) * q_row + features[None, :], mask=is_row[:, None] & is_feature[None, :], other=0.0
    )
    own = tl.zeros((ROWS,), tl.int32)
    if DOCUMENTS:
        own = tl.load(numbers + batch * seq_len + at, mask=is_row, other=-1)
    largest = tl.full((ROWS,), float("-inf"), _F32)
    begin = 0
    if WINDOW:
        begin = tl.maximum(first + block * ROWS - WINDOW + 1, 0) // KEYS * KEYS
    for start in range(begin, first + tl.minimum(block * ROWS + ROWS, n_rows), KEYS):
        keys = start + tl.arange(0, KEYS)
        is_key = keys < seq_len
        there = tl.load(
            k + keys[None, :].to(_I64) * k_row + features[:, None],
            mask=is_key[None, :] & is_feature[:, None],
            other=0.0,
        )
        products = tl.dot(queries, there)
        seen = (keys[None, :] <= at[:, None]) & is_row[:, None]
        if WINDOW:
            seen = seen & (keys[None, :] > at[:, None] - WINDOW)
        if DOCUMENTS:
            theirs = tl.load(numbers + batch * seq_len + keys, mask=is_key, other=-2)
            seen = seen & (theirs[None, :] == own[:, None])
        largest = tl.maximum(largest, tl.max(tl.where(seen, products, float("-inf")), 1))
    tl.store(found + tl.program_id(1) * tl.num_programs(0) + block, tl.max(largest, 0))


def largest_of_heads(q: Tensor, k: Tensor, numbers: Tensor | None, first: int, window: int) -> Tensor:
    """The largest product of a query and a key of each head, (heads,) float32.

    Args:
        q: (batch, heads, rows, head_dim), bfloat16 or float16: the tokens from `first` on.
        k: (batch, heads or fewer, seq, head_dim): whole sequences.
        numbers: (batch, seq), int32: documents; None: each sequence is one.
        first: the place of the first query in the whole sequence.
        window: the number of last tokens that a token sees; 0: all.
    """
    q, k = (each if each.stride(-1) == 1 else each.contiguous() for each in (q, k))
    batch, n_heads, n_rows, head_dim = q.shape
    seq_len = k.shape[2]
    blocks = triton.cdiv(n_rows, ROWS)
    found = torch.empty(batch, n_heads, blocks, dtype=torch.float32, device=q.device)
    largest_products[(blocks, batch * n_heads)](
        q,
        k,
        q if numbers is None else numbers.contiguous(),
        found,
        *q.stride()[:3],
        *k.stride()[:3],
        first,
        n_rows,
        seq_len,
        n_heads,
        n_heads // k.shape[1],
        HEAD_DIM=head_dim,
        WIDTH=max(16, triton.next_power_of_2(head_dim)),
        WINDOW=window,
        DOCUMENTS=numbers is not None,
        ROWS=ROWS,
        KEYS=KEYS,
        num_warps=N_WARPS,
        num_stages=N_STAGES,
        enable_fp_fusion=True,  # Triton's default up to 3.9, which announces that another comes
    )
    return found.amax((0, 2))
