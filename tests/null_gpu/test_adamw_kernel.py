"""The Triton kernel of AdamW: its values in Triton's interpreter, its machine code for Hopper; no GPU is needed."""

import importlib.util
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from parallelisms.part import Part
from trainer.kernels import separate
from trainer.kernels.keyed import key_of
from trainer.kernels.separate import Rates

triton = pytest.importorskip("triton", reason="this build of torch has no Triton")

from trainer.kernels import adamw as compiled  # noqa: E402 - it needs Triton

RATES = Rates(lr=1e-2, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
CHUNK, BLOCK = 128, 64
SIZES = (128, 129, 1, 300, 144, 31)
PARTS = (
    Part(0, 1, 128, 0, 0),
    Part(2**32 - 60, 1, 129, 0, 0),  # numbers of more than 32 bits
    Part(9, 1, 1, 0, 0),
    Part(2**33, 30, 10, 0, 17),  # columns of a matrix
    Part(5, 8, 6, 1000, 11),  # columns of a stack of matrices
    Part(3, 1, 31, 0, 0),
)


@pytest.fixture(scope="module")
def kernels() -> Iterator[ModuleType]:
    """The kernel's file, loaded as a second module, whose kernels numpy computes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        spec = importlib.util.spec_from_file_location("interpreted_adamw", compiled.__file__)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        patch.setattr(module, "CHUNK", CHUNK)
        patch.setattr(module, "BLOCK", BLOCK)
        yield module


def made(kernels: ModuleType, keyed: bool, copies: bool = True, dtype: torch.dtype = torch.float32) -> list:
    """Parameters in the middle of a run, after three updates."""
    generator = torch.Generator().manual_seed(4)

    def draw(n: int, scale: float) -> Tensor:
        return torch.randn(n, generator=generator) * scale

    tensors = []
    for place, (n, part) in enumerate(zip(SIZES, PARTS, strict=True)):
        m, v = draw(n, 0.01), draw(n, 0.01).square()
        if keyed:
            m, v = m.bfloat16(), v.bfloat16()
        key = key_of(1, str(place), part) if keyed else None
        copy = torch.zeros(n, dtype=torch.bfloat16) if copies and place != 2 else None
        weight, gradient = draw(n, 1.0).to(dtype), draw(n, 0.1).to(dtype)
        tensors.append(kernels.Updated(weight, gradient, m, v, torch.tensor(3.0), key, copy))
    return tensors


def copied(tensors: list) -> list:
    def copy(value: object) -> object:
        return value.clone() if isinstance(value, Tensor) else value

    return [
        replace(each, **{field.name: copy(getattr(each, field.name)) for field in fields(each)}) for each in tensors
    ]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("divisor", [None, 1.7])
def test_what_is_in_bfloat16_is_that_of_separate_operations_bit_for_bit(kernels, divisor, dtype):
    tensors = made(kernels, keyed=True, copies=dtype == torch.float32, dtype=dtype)
    before = copied(tensors)
    divide = None if divisor is None else torch.tensor(divisor)
    kernels.Group().update(tensors, RATES, torch.tensor(0.0), divide)
    for found, old in zip(tensors, before, strict=True):
        gradient = old.gradient.float() * (1.0 if divide is None else 1.0 / divide)
        separate.update(old.parameter, gradient, old.exp_avg, old.exp_avg_sq, 4, old.key, RATES)
        for name in ("parameter", "exp_avg", "exp_avg_sq"):
            assert torch.equal(getattr(found, name), getattr(old, name)), name
        assert found.step == 4
        if found.copy is not None:
            assert torch.equal(found.copy, found.parameter.bfloat16())


def test_moments_in_float32_are_those_of_torch_to_some_ulps(kernels):
    """torch's kernels fuse products and sums, each in its own way; against the formula in float64, ours is as exact."""
    tensors = made(kernels, keyed=False)
    before, by_torch = copied(tensors), copied(tensors)
    divisor = torch.tensor(1.7)
    kernels.Group().update(tensors, RATES, torch.tensor(0.0), divisor)
    for found, old, theirs in zip(tensors, before, by_torch, strict=True):
        torch._fused_adamw_(
            [theirs.parameter],
            [theirs.gradient.clone()],
            [theirs.exp_avg],
            [theirs.exp_avg_sq],
            [],
            [theirs.step + 1],
            lr=1e-2,
            beta1=0.9,
            beta2=0.95,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=divisor,
        )
        p, g, m, v = (x.double() for x in (old.parameter, old.gradient / divisor, old.exp_avg, old.exp_avg_sq))
        m, v = 0.9 * m + 0.1 * g, 0.95 * v + 0.05 * g**2
        p = p - 1e-3 * p - 1e-2 * (m / (1 - 0.9**4)) / ((v / (1 - 0.95**4)).sqrt() + 1e-8)
        for name, exact, size in (("parameter", p, 1.0), ("exp_avg", m, 0.05), ("exp_avg_sq", v, 1e-3)):
            ulp = torch.finfo(torch.float32).eps * max(size, exact.abs().max().item())
            ours = (getattr(found, name) - exact).abs().max().item()
            assert ours <= 2 * ulp, (name, ours / ulp)
            assert (getattr(found, name) - getattr(theirs, name)).abs().max().item() <= 4 * ulp
        if found.copy is not None:
            assert torch.equal(found.copy, found.parameter.bfloat16())


@pytest.mark.parametrize("keyed", [False, True])
def test_a_skipped_update_changes_nothing(kernels, keyed):
    tensors = made(kernels, keyed)
    tensors[0].gradient.fill_(torch.nan)
    before = copied(tensors)
    kernels.Group().update(tensors, RATES, torch.tensor(1.0), torch.tensor(2.0))
    for found, old in zip(tensors, before, strict=True):
        for name in ("parameter", "exp_avg", "exp_avg_sq", "step", "copy"):
            value = getattr(found, name)
            assert value is None or torch.equal(value, getattr(old, name)), name


def test_the_table_follows_gradients_that_move(kernels):
    """The second update has its gradients elsewhere, and fewer parameters; without weight decay, skip and divisor."""
    group, rates = kernels.Group(), replace(RATES, weight_decay=0.0)
    tensors = made(kernels, keyed=True, copies=False)
    expected = copied(tensors)
    group.update(tensors, rates, None, None)
    kept = [replace(each, gradient=each.gradient * 2) for each in tensors[1:]]
    group.update(kept, rates, None, None)
    for place, (found, old) in enumerate(zip(tensors, expected, strict=True)):
        separate.update(old.parameter, old.gradient, old.exp_avg, old.exp_avg_sq, 4, old.key, rates)
        if place:
            separate.update(old.parameter, old.gradient * 2, old.exp_avg, old.exp_avg_sq, 5, old.key, rates)
        assert torch.equal(found.parameter, old.parameter)
        assert torch.equal(found.exp_avg_sq, old.exp_avg_sq)


# Registers, and instructions in all: what ptxas makes of the kernel for sm_90 (Triton 3.6), with a margin of a tenth,
# or with Triton 3.9, 105 and 113. An SM holds as many blocks with up to 128.
MACHINE_CODE = {
    # moments in bfloat16, parameters, levels of the parts, copies: registers, instructions
    "bfloat16": ((True, False, 1, True), 112, 2600),
    "bfloat16, cut by columns": ((True, False, 2, True), 104, 3000),
    "bfloat16, cut twice": ((True, False, 3, True), 120, 3300),
    "parameters in bfloat16": ((True, True, 1, False), 112, 2600),
    "parameters in bfloat16, cut twice": ((True, True, 3, False), 120, 3300),
    "float32": ((False, False, 1, True), 104, 2000),
    "float32, without copies": ((False, False, 1, False), 72, 1800),
}


@pytest.mark.parametrize("name", MACHINE_CODE)
def test_machine_code_for_hopper_spills_nothing(tmp_path, monkeypatch, name):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    (keyed, narrow, levels, copies), registers, instructions = MACHINE_CODE[name]
    constants = {"BETA1": 0.9, "BETA2": 0.95, "KEYED": keyed, "NARROW": narrow, "LEVELS": levels, "COPIES": copies}
    constants |= {"ALIGNED": True, "CHUNK": compiled.CHUNK, "BLOCK": compiled.BLOCK}
    types = {"table": "*i64", "tensor_of_chunk": "*i32", "skip": "*fp32", "divisor": "*fp32"}
    types |= dict.fromkeys(("lr", "decay", "eps"), "fp32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        compiled.adamw,
        types,
        {(list(types).index(key),): value for key, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place in range(4)},
    )
    options = {"num_warps": compiled.N_WARPS, "enable_fp_fusion": False}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    tools, cubin = Path(triton.__file__).parent / "backends" / "nvidia" / "bin", tmp_path / "adamw.cubin"
    cubin.write_bytes(kernel.asm["cubin"])

    def said(*command: str) -> str:
        return subprocess.run([tools / command[0], *command[1:], cubin], capture_output=True, text=True).stdout

    usage = said("cuobjdump", "-res-usage")
    assert "STACK:0 " in usage, usage  # where a register would be spilled to
    assert "LOCAL:0 " in usage, usage
    [used] = re.findall(r"REG:(\d+)", usage)
    assert int(used) <= registers
    n = len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/", said("nvdisasm", "-c"), re.MULTILINE))
    assert 0 < n <= instructions
    ptx = kernel.asm["ptx"]
    assert ptx.count("ld.global.v4.b32") == 8 - 2 * keyed - 2 * narrow  # 16 bytes at once
    assert "fma.rn.f32" not in ptx  # other bits than those of separate operations
    assert "sqrt.rn.f32" in ptx
    assert "div.rn.f32" in ptx
