"""attention.backend: the kernel that is named computes, and what can't run is refused with the reason."""

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.profiler import profile

from configs.errors import ConfigError
from configs.load import load
from configs.schema import ActivationCheckpoint, is_run_key
from models import build_model
from parallelisms.activation_checkpoint import apply_activation_checkpoint
from parallelisms.attention.backend import apply_attention_backend, attention_kernel, causal_blocks
from tests.end_to_end.launch import curve, launch_here

CPU = torch.device("cpu")
FLASH = "aten::_scaled_dot_product_flash_attention_for_cpu"


def loss_and_gradients(backend, compiled=False, dtype=torch.float64):
    config = load("parity.toml", ("--attention.backend", backend, "--model.n_layers", "2")).config
    torch.manual_seed(0)
    model = build_model(config.model).to(dtype)
    apply_attention_backend(model, config, CPU)
    apply_activation_checkpoint(model, ActivationCheckpoint(mode="selective"))
    for block in model.layers.values() if compiled else ():
        block.forward = torch.compile(block.forward, fullgraph=True, backend="aot_eager")
    tokens = torch.randint(0, 512, (2, 32), generator=torch.Generator().manual_seed(1))
    loss = model(tokens).square().mean()
    return loss, torch.autograd.grad(loss, list(model.parameters()))


def test_the_kernel_that_is_named_is_used_whatever_torch_would_take():
    with sdpa_kernel(SDPBackend.MATH), profile() as plain:
        expected = loss_and_gradients("auto")
    with sdpa_kernel(SDPBackend.MATH), profile() as named:
        found = loss_and_gradients("flash2")
    called = [{event.key for event in each.key_averages()} for each in (plain, named)]
    assert FLASH not in called[0]
    assert FLASH in called[1]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.slow
def test_one_graph_serves_all_compiled_blocks():
    expected = loss_and_gradients("flash2", dtype=torch.float32)
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    found = loss_and_gradients("flash2", compiled=True, dtype=torch.float32)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("seq_len", [1, 100, 128, 300, 512])
def test_flexs_blocks_are_the_causal_mask(seq_len):
    torch_made = create_block_mask(lambda _b, _h, q, k: q >= k, None, None, seq_len, seq_len, device="cpu")
    assert torch.equal(causal_blocks(seq_len, CPU).to_dense(), torch_made.to_dense())
    q, k, v = (torch.randn(2, heads, seq_len, 16, dtype=torch.float64) for heads in (4, 2, 2))
    out = flex_attention(q, k, v, block_mask=causal_blocks(seq_len, CPU), enable_gqa=True)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("cudnn", "--job.device", "cpu"), 'backend "cudnn" runs on GPUs only, and job.device is "cpu"'),
        (("cudnn", "--data.document_mask", "true"), "does not take packed documents"),
        (("cudnn", "--training.deterministic", "true"), "which training.deterministic forbids"),
        (("flex", "--compile.enable", "false"), "set compile.enable = true"),
        (("flex", "--mesh.cp", "2"), 'has no form for context.method = "gather"'),
        (("flesh2",), 'did you mean "flash2"?'),
    ],
)
def test_what_contradicts_the_job_is_refused(words, reason):
    with pytest.raises(ConfigError) as error:
        load("llama_1b.toml", ("--attention.backend", *words), 2)
    assert reason in str(error.value)


@pytest.mark.parametrize("backend", ["cudnn", "flash3", "flex"])
def test_what_needs_a_gpu_is_refused_on_a_cpu(backend):
    words = ("--job.device", "auto", "--attention.backend", backend, "--compile.enable", "true")
    with pytest.raises(ConfigError, match=f'"{backend}": it runs on GPUs only, and this run is on a CPU'):
        attention_kernel(load("llama_1b.toml", words).config, CPU)


@pytest.mark.slow
def test_a_run_says_its_kernel_and_may_change_it(tmp_path, capsys):
    assert launch_here(tmp_path / "auto") == 0
    assert "torch's kernel for CPUs" in capsys.readouterr().out
    assert launch_here(tmp_path / "named", "--training.steps", "5") == 0
    assert launch_here(tmp_path / "named", "--attention.backend", "flash2") == 0
    assert curve(tmp_path / "named" / "run") == curve(tmp_path / "auto" / "run")
    assert not is_run_key("attention.backend")
    capsys.readouterr()
    assert launch_here(tmp_path / "refused", "--job.device", "auto", "--attention.backend", "cudnn") == 78
    said = capsys.readouterr().err
    assert 'attention.backend is "cudnn": it runs on GPUs only' in said
    assert "Traceback" not in said
