"""AdamW as one Triton kernel over many tensors.

A launch updates a whole parameter group: each program finds its tensor and its chunk in a table of addresses. For a
parameter it reads and writes the float32 weight and both moments, reads the gradient, and, if asked, writes the copy
that modules compute with: 28 bytes with moments in float32, 20 in bfloat16, and 2 for the copy; 14 with all of them
in bfloat16. torch's kernel needs a launch for every 36 tensors or 21 million elements, also writes the clipped
gradient, and refuses moments of another type. Whether to update at all, the factor that clips, and the number of the
update are read from device memory.

The operations, and so the bits, are those of `separate.py`; products and sums are not fused. Import this file only
where Triton is installed.
"""

# Types of a kernel's arguments are Triton's; an `if` on a constant is decided when the kernel is compiled, so it stays
# apart from one on a value.
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False, disallow-incomplete-defs=False
# ruff: noqa: ANN001, ANN201, N803, SIM102

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from trainer.kernels.keyed import FACTORS, GOLDEN, Key
from trainer.kernels.separate import STEP_BITS, Rates

CHUNK = 1 << 14
"""Elements of one program: so many that finding them costs little, so few that a matrix occupies the whole device."""
BLOCK = 1 << 10
N_WARPS = 4
ALIGNMENT = 16
"""Bytes: the widest load of a thread."""

# Columns of the table.
_P, _G, _M, _V, _COPY, _STEP, _SIZE, _FIRST_CHUNK, _WORD, _FIRST, _ROWS, _RUN, _OUTER, _INNER = map(
    tl.constexpr, range(14)
)
_WIDTH = tl.constexpr(16)
_BITS = tl.constexpr(STEP_BITS)
_GOLDEN = tl.constexpr(GOLDEN)
_F32, _U16, _ALIGNMENT = map(tl.constexpr, (tl.float32, tl.uint16, ALIGNMENT))
_FACTOR_1, _FACTOR_2 = map(tl.constexpr, FACTORS)


@triton.jit
def _mixed(x):
    """`keyed.mixed`, of uint32."""
    x ^= x >> 16
    x *= _FACTOR_1
    x ^= x >> 15
    x *= _FACTOR_2
    return x ^ (x >> 16)


@triton.jit
def _power(base: tl.constexpr, exponent):
    """`separate.power`, float64."""
    result = tl.full((), 1.0, tl.float64)
    square = tl.full((), base, tl.float64)
    for bit in range(_BITS):
        result = tl.where((exponent >> bit) & 1 == 1, result * square, result)
        square *= square
    return result


@triton.jit
def _rounded(x, bits):
    """`keyed.rounded`, as the upper 16 bits."""
    pattern = x.to(tl.uint32, bitcast=True)
    pattern += tl.where((pattern & 0x7FFFFFFF) < 0x7F800000, bits, 0)
    return (pattern >> 16).to(tl.uint16)


@triton.jit
def _nearest(x):
    """bfloat16 nearest to a finite float32, to even in the middle, as the upper 16 bits."""
    pattern = x.to(tl.uint32, bitcast=True)
    pattern += 0x7FFF + ((pattern >> 16) & 1)
    return (pattern >> 16).to(tl.uint16)


@triton.jit
def _widened(x):
    """float32 of the bits of a bfloat16."""
    return (x.to(tl.uint32) << 16).to(tl.float32, bitcast=True)


@triton.jit
def _random(elements, salts, place, LEVELS: tl.constexpr):
    """`keyed.random_bits` of elements of a chunk; `place` is what `_place` returns."""
    first, start_of_run, run, first_run, rows, outer, inner = place
    if LEVELS == 1:
        numbers = first + elements.to(tl.int64)
    else:
        within = start_of_run + elements.to(tl.uint32)
        runs = first_run + within // run
        numbers = first + (within % run).to(tl.int64)
        if LEVELS == 3:
            numbers += (runs // rows).to(tl.int64) * outer
            runs = runs % rows
        numbers += runs.to(tl.int64) * inner
    low = numbers.to(tl.uint32)
    high = (numbers >> 32).to(tl.uint32)
    return _mixed(_mixed(low ^ salts[0]) ^ (high * _GOLDEN + salts[1]))


@triton.jit
def _place(row, start, LEVELS: tl.constexpr):
    """Where the chunk that begins at the part's element `start` lies in the whole."""
    first = tl.load(row + _FIRST)
    if LEVELS == 1:
        zero = tl.full((), 0, tl.uint32)
        return first + start, zero, zero, zero, zero, first, first
    run = tl.load(row + _RUN)
    outer = tl.load(row + _OUTER)
    inner = tl.load(row + _INNER)
    rows = tl.load(row + _ROWS).to(tl.uint32)
    return first, (start % run).to(tl.uint32), run.to(tl.uint32), (start // run).to(tl.uint32), rows, outer, inner


@triton.jit
def _address(row, column, dtype: tl.constexpr, start, ALIGNED: tl.constexpr):
    """Where a tensor's chunk is."""
    pointer = tl.load(row + column).to(tl.pointer_type(dtype))
    if ALIGNED:
        pointer = tl.multiple_of(pointer, _ALIGNMENT)
    return pointer + start


@triton.jit
def _update(
    tensors,
    elements,
    mask,
    rates,
    salts,
    place,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    KEYED: tl.constexpr,
    NARROW: tl.constexpr,
    LEVELS: tl.constexpr,
    COPIES: tl.constexpr,
):
    """`separate.update`, of elements of a chunk; without a mask, of all of them."""
    p_at, g_at, m_at, v_at, copy_at, has_copy = tensors
    inverse, step_size, scale, decay, eps = rates
    p = tl.load(p_at + elements, mask=mask)
    g = tl.load(g_at + elements, mask=mask)
    m = tl.load(m_at + elements, mask=mask)
    v = tl.load(v_at + elements, mask=mask)
    if NARROW:
        p = _widened(p)
        g = _widened(g)
    g = g * inverse
    if KEYED:
        m = _widened(m)
        v = _widened(v)
    m = m * BETA1 + g * (1.0 - BETA1)
    v = v * BETA2 + g * g * (1.0 - BETA2)
    p = p - p * decay - tl.div_rn(m * step_size, tl.sqrt_rn(v) * scale + eps)
    if not NARROW:
        tl.store(p_at + elements, p, mask=mask)
    if KEYED:
        bits = _random(elements, salts, place, LEVELS)
        if NARROW:
            tl.store(p_at + elements, _rounded(p, _mixed(bits + _GOLDEN) & 0xFFFF), mask=mask)
        tl.store(m_at + elements, _rounded(m, bits & 0xFFFF), mask=mask)
        tl.store(v_at + elements, _rounded(v, bits >> 16), mask=mask)
    else:
        tl.store(m_at + elements, m, mask=mask)
        tl.store(v_at + elements, v, mask=mask)
    if COPIES:
        if has_copy:
            tl.store(copy_at + elements, _nearest(p), mask=mask)


@triton.jit
def count_updates(table, skip, n, N: tl.constexpr):
    """Add 1 to each tensor's number of updates, unless `skip` is 1."""
    i = tl.arange(0, N)
    mask = i < n
    steps = tl.load(table + i * _WIDTH + _STEP, mask=mask).to(tl.pointer_type(tl.float32))
    added = 1.0
    if skip is not None:
        added = tl.where(tl.load(skip) == 1.0, 0.0, 1.0)
    tl.store(steps, tl.load(steps, mask=mask) + added, mask=mask)


@triton.jit
def adamw(
    table,
    tensor_of_chunk,
    skip,
    divisor,
    lr,
    decay,
    eps,
    BETA1: tl.constexpr,
    BETA2: tl.constexpr,
    KEYED: tl.constexpr,
    NARROW: tl.constexpr,
    LEVELS: tl.constexpr,
    COPIES: tl.constexpr,
    ALIGNED: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Update one chunk of one tensor, whose updates `count_updates` has counted.

    Args:
        table: int64 (tensors, _WIDTH).
        tensor_of_chunk: int32 (programs,).
        skip, divisor: None, or a float32 scalar on the device.
        lr, eps: AdamW's.
        decay: lr x weight decay.
        KEYED: moments are bfloat16, otherwise float32.
        NARROW: parameters and gradients are bfloat16, otherwise float32; only with KEYED.
        LEVELS: the most that a tensor's part has, see `Part`.
        COPIES: some tensors have copies in bfloat16.
        ALIGNED: all tensors begin at multiples of ALIGNMENT.
    """
    chunk = tl.program_id(0).to(tl.int64)
    row = table + tl.load(tensor_of_chunk + chunk).to(tl.int64) * _WIDTH
    start = (chunk - tl.load(row + _FIRST_CHUNK)) * CHUNK
    count = tl.minimum(tl.load(row + _SIZE) - start, CHUNK).to(tl.int32)
    if skip is not None:
        count = tl.where(tl.load(skip) == 1.0, 0, count)
    inverse = 1.0
    if divisor is not None:
        inverse = tl.div_rn(1.0, tl.load(divisor))
    step = tl.load(tl.load(row + _STEP).to(tl.pointer_type(tl.float32))).to(tl.int32)
    step_size = (tl.full((), lr, tl.float32).to(tl.float64) / (1.0 - _power(BETA1, step))).to(tl.float32)
    scale = (1.0 / tl.sqrt(1.0 - _power(BETA2, step))).to(tl.float32)
    rates = inverse, step_size, scale, decay, eps
    word = tl.load(row + _WORD)
    salt = _mixed(word.to(tl.uint32) ^ (step.to(tl.uint32) * _GOLDEN))
    salts = salt, _mixed((word >> 32).to(tl.uint32) ^ salt)
    place = _place(row, start, LEVELS)
    p_at = _address(row, _P, _U16 if NARROW else _F32, start, ALIGNED)
    g_at = _address(row, _G, _U16 if NARROW else _F32, start, ALIGNED)
    m_at = _address(row, _M, _U16 if KEYED else _F32, start, ALIGNED)
    v_at = _address(row, _V, _U16 if KEYED else _F32, start, ALIGNED)
    has_copy = tl.load(row + _COPY) != 0
    tensors = p_at, g_at, m_at, v_at, _address(row, _COPY, _U16, start, ALIGNED), has_copy
    if count == CHUNK:  # without a mask, whose edge could be anywhere, a thread loads 16 bytes at once
        for begin in range(0, CHUNK, BLOCK):
            elements = begin + tl.arange(0, BLOCK)
            _update(tensors, elements, None, rates, salts, place, BETA1, BETA2, KEYED, NARROW, LEVELS, COPIES)
    else:
        for begin in range(0, CHUNK, BLOCK):
            elements = begin + tl.arange(0, BLOCK)
            mask = elements < count
            _update(tensors, elements, mask, rates, salts, place, BETA1, BETA2, KEYED, NARROW, LEVELS, COPIES)


@dataclass(frozen=True)
class Updated:
    """One parameter's tensors of a step, each this rank's part, without gaps, on one device."""

    parameter: Tensor
    """float32, or bfloat16 with a key; `gradient` likewise."""
    gradient: Tensor
    exp_avg: Tensor
    """float32, or bfloat16 with a key; `exp_avg_sq` likewise."""
    exp_avg_sq: Tensor
    step: Tensor
    """Number of its updates, a float32 scalar."""
    key: Key | None
    copy: Tensor | None
    """bfloat16; becomes the rounded parameter."""


class Group:
    """Updates a parameter group; keeps its table on the device for as long as the addresses stay."""

    def __init__(self) -> None:
        self._rows: list[list[int]] = []
        self._table = self._tensor_of_chunk = torch.empty(0)

    def update(self, tensors: Sequence[Updated], rates: Rates, skip: Tensor | None, divisor: Tensor | None) -> None:
        """Update the parameters, their moments, copies and numbers of updates, without waiting for the device.

        Args:
            tensors: the parameters that have gradients; at least one.
            rates: AdamW's settings.
            skip, divisor: as for `RowAdamW.step`.
        """
        self._find(tensors)
        levels = max((each.key.part.levels for each in tensors if each.key), default=1)
        addresses = (address for row in self._rows for address in row[: _STEP.value])
        n = len(self._rows)
        count_updates[(1,)](self._table, skip, n, N=triton.next_power_of_2(n), enable_fp_fusion=False)
        settings: dict[str, Any] = {
            "KEYED": tensors[0].key is not None,
            "NARROW": tensors[0].parameter.dtype == torch.bfloat16,
            "LEVELS": levels,
            "COPIES": any(each.copy is not None for each in tensors),
            "ALIGNED": not any(address % ALIGNMENT for address in addresses),
        }
        adamw[(len(self._tensor_of_chunk),)](
            self._table,
            self._tensor_of_chunk,
            skip,
            divisor,
            rates.lr,
            rates.lr * rates.weight_decay,
            rates.eps,
            BETA1=rates.beta1,
            BETA2=rates.beta2,
            CHUNK=CHUNK,
            BLOCK=BLOCK,
            num_warps=N_WARPS,
            enable_fp_fusion=False,
            **settings,
        )

    def _find(self, tensors: Sequence[Updated]) -> None:
        """Bring the addresses of the tensors to the device, if they have changed."""
        rows = []
        chunks = 0
        for each in tensors:
            rows.append(_row(each, chunks))
            chunks += triton.cdiv(each.parameter.numel(), CHUNK)
        if rows != self._rows:
            device = tensors[0].parameter.device
            if [row[_SIZE.value] for row in rows] != [row[_SIZE.value] for row in self._rows]:
                sizes = torch.tensor([triton.cdiv(row[_SIZE.value], CHUNK) for row in rows])
                self._tensor_of_chunk = torch.arange(len(rows), dtype=torch.int32).repeat_interleave(sizes).to(device)
            # From pinned memory, which torch keeps until the copy is done: the host does not wait for it.
            self._table = torch.tensor(rows, pin_memory=device.type == "cuda").to(device, non_blocking=True)
            self._rows = rows


def _row(each: Updated, first_chunk: int) -> list[int]:
    """A row of the table."""
    tensors = (each.parameter, each.gradient, each.exp_avg, each.exp_avg_sq, each.copy, each.step)
    assert all(tensor is None or tensor.is_contiguous() for tensor in tensors)
    row = [0 if tensor is None else tensor.data_ptr() for tensor in tensors] + [each.parameter.numel(), first_chunk]
    if each.key:
        part = each.key.part
        assert part.levels == 1 or each.parameter.numel() // part.run < 2**31 > part.run + CHUNK, part
        word = each.key.word - (each.key.word >> 63 << 64)
        row += [word, part.first, part.rows, part.run, part.outer, part.inner]
    return row + [0] * (_WIDTH.value - len(row))
