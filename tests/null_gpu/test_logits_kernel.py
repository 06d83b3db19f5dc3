"""The Triton kernel of the largest logits: its values in Triton's interpreter, its machine code for Hopper; no GPU."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launch import ROOT

triton = pytest.importorskip("triton", reason="this build of torch has no Triton")

from parallelisms.attention import logits_kernel as compiled  # noqa: E402 - it needs Triton


def test_values():
    """Of whole sequences and parts, with windows and documents: as all products have them."""
    command = [sys.executable, "-m", "tests.null_gpu.logits_by_kernel"]
    results = json.loads(subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout)
    assert len(results) == 6
    for name, (found, expected) in results.items():
        assert found == pytest.approx(expected, rel=1e-6), name


@pytest.mark.parametrize(("head_dim", "registers"), [(64, 128), (128, 168), (192, 255)])
def test_machine_code_for_hopper_spills_nothing(tmp_path, monkeypatch, head_dim, registers):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    constants = {"HEAD_DIM": head_dim, "WIDTH": triton.next_power_of_2(head_dim), "WINDOW": 0, "DOCUMENTS": True}
    constants |= {"ROWS": compiled.ROWS, "KEYS": compiled.KEYS}
    types = {"q": "*bf16", "k": "*bf16", "numbers": "*i32", "found": "*fp32"}
    numbers = ("q_batch", "q_head", "q_row", "k_batch", "k_head", "k_row", "first", "n_rows", "seq_len", "n_heads")
    types |= dict.fromkeys((*numbers, "heads_of_key"), "i32") | dict.fromkeys(constants, "constexpr")
    source = ASTSource(
        compiled.largest_products,
        types,
        {(list(types).index(key),): value for key, value in constants.items()},
        {(place,): [["tt.divisibility", 16]] for place in range(10)},
    )
    options = {"num_warps": compiled.N_WARPS, "num_stages": compiled.N_STAGES}
    kernel = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    assert kernel.metadata.shared <= 227 * 1024
    tools, cubin = Path(triton.__file__).parent / "backends" / "nvidia" / "bin", tmp_path / "logits.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [tools / "cuobjdump", "-res-usage", cubin]
    usage = subprocess.run(command, capture_output=True, text=True).stdout
    assert "STACK:0 " in usage, usage  # where a register would be spilled to
    [used] = re.findall(r"REG:(\d+)", usage)
    assert int(used) <= registers, usage
    assert "wgmma" in kernel.asm["ptx"]  # Hopper's tensor cores
