"""Float8 matmuls: what a job may ask for, and torchao's values beside a second implementation."""

import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from configs.errors import ConfigError
from configs.float8 import choose
from configs.layout import mesh_sizes
from configs.load import load
from configs.run_change import run_key_diff
from configs.schema import Float8, further_run_keys, is_run_key
from models import build_model
from parallelisms.fake_ranks import fake_ranks
from parallelisms.float8 import _even_shard, apply_float8, check_float8, choice_of
from scripts import export_hf
from scripts.parity_float8 import E4M3, E5M2, in_8_bits, to_format
from tests.end_to_end.launch import curve, launch_here
from trainer.planning.float8 import float8_products
from trainer.planning.memory import estimate_memory
from trainer.planning.skeleton import skeleton

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
EMULATED = ("--float8.recipe", "tensorwise", "--float8.emulate", "true")


def config(*words, ranks=1, job="parity.toml"):
    return load(job, words, ranks).config


@pytest.fixture
def torchao():
    return pytest.importorskip("torchao", reason="needs the package torchao")


# --------------------------------------------------------------------------- which matrices


def chosen(*words, job="parity.toml"):
    job = config(*EMULATED, *words, job=job)
    model = skeleton(job.model)
    return choose(model.shapes, model.plan, job)


def test_all_matrices_of_the_blocks_are_chosen_but_neither_embedding_nor_head():
    choice = chosen()
    assert len(choice.converted) == 4 * 7
    assert all(name.startswith("layers.") for name in choice.converted)
    assert str(choice) == "28 of the blocks' 28 matrices"


def test_filters_skip_by_name():
    choice = chosen("--float8.skip", '["layers.0.*", "*.o_proj"]')
    assert len(choice.skipped) == 7 + 3
    assert len(choice.converted) == 28 - 10
    assert "10 skipped by float8.skip" in str(choice)
    with pytest.raises(
        ConfigError, match=r'"lm_head" matches no matrix of the blocks \(such as layers.0.self_attn.q_proj'
    ):
        chosen("--float8.skip", '["lm_head"]')


def test_matrices_that_a_gpu_cannot_multiply_in_8_bits_stay_with_a_word():
    choice = chosen("--model.ffn_dim", "136")
    assert len(choice.odd) == 4 * 3
    assert "12 have dimensions that are no multiples of 16" in str(choice)
    with pytest.raises(ConfigError, match="no matrix is left"):
        chosen("--model.ffn_dim", "136", "--float8.skip", '["*.self_attn.*"]')


def test_pieces_of_tensor_parallelism_must_fit_too():
    job = config(*EMULATED, "--mesh.tp", "4", ranks=4)
    model = skeleton(job.model)
    with pytest.raises(ConfigError, match=r"mesh.tp 4 cuts layers.0.self_attn.k_proj into pieces of 32 / 4 = 8"):
        choose(model.shapes, model.plan, job)


def test_a_mixture_keeps_its_experts_and_its_router():
    choice = chosen("--model.n_experts", "4", "--model.n_shared_experts", "1", "--model.n_dense_layers", "1")
    assert len(choice.converted) == 4 * 4 + 3
    assert not any("expert" in name or "router" in name for name in choice.converted)


MIXTURE = ("--model.n_experts", "4", "--model.expert_dim", "64", "--model.n_dense_layers", "1")
WITH_EXPERTS = (*MIXTURE, "--float8.recipe", "rowwise_with_gw_hp", "--float8.experts", "true")


def test_experts_are_chosen_where_the_job_says_so():
    choice = chosen(*WITH_EXPERTS)
    assert len(choice.converted) == 4 * 4 + 3 + 3 * 3
    assert "layers.1.mlp.experts.down_proj" in choice.converted
    assert str(choice) == "28 of the blocks' 28 matrices, 9 of them stacks of experts'"


def test_filters_skip_projections_of_experts():
    choice = chosen(*WITH_EXPERTS, "--float8.skip", '["*.experts.up_proj", "layers.3.*"]')
    assert len(choice.skipped) == 2 + 4 + 3
    assert "layers.2.mlp.experts.up_proj" in choice.skipped
    assert str(choice).startswith("19 of the blocks' 28 matrices, 4 of them stacks of experts', 9 skipped")
    with pytest.raises(ConfigError, match=r'"\*.experts.up_proj" matches no matrix of the blocks'):
        chosen(*MIXTURE, "--float8.skip", '["*.experts.up_proj"]')


def test_experts_that_a_gpu_cannot_multiply_in_8_bits_stay():
    choice = chosen(*WITH_EXPERTS, "--model.expert_dim", "72")
    assert len(choice.odd) == 3 * 3
    job = config(*EMULATED, *WITH_EXPERTS, "--model.expert_dim", "48", "--mesh.tp", "2", ranks=2)
    model = skeleton(job.model)
    with pytest.raises(ConfigError, match=r"cuts layers.1.mlp.experts.gate_proj into pieces of 48 / 2 = 24"):
        choose(model.shapes, model.plan, job)


def test_only_the_chosen_projections_of_experts_round(torchao):
    job = config(*EMULATED, *WITH_EXPERTS, "--float8.skip", '["*.self_attn.*", "layers.0.*", "*.experts.up_proj"]')
    model = build_model(job.model)
    apply_float8(model, choice_of(model, job), job.float8)
    assert [layer.mlp.experts.products.keys() for layer in list(model.layers.values())[1:]] == [
        {"gate_proj", "down_proj"}
    ] * 3


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--float8.recipe", "tensorwise"), "a CPU has no float8 matmuls"),
        (("--float8.recipe", "tensorwise", "--job.device", "auto"), "float8 matmuls have no float64 sums"),
        (("--float8.recipe", "rowwise", "--job.device", "auto", "--training.seq_len", "40"), "= 40 tokens, which must"),
        ((*EMULATED, "--float8.fsdp_all_gather", "true", "--fsdp.partition", "owner"), "gathers nothing"),
        ((*WITH_EXPERTS[6:], "--float8.emulate", "true"), "the model has no experts"),
        ((*WITH_EXPERTS, "--job.device", "auto", "--training.compute_dtype", "float32"), 'only for compute_dtype "bf'),
    ],
)
def test_what_contradicts_the_job_is_refused(words, reason):
    with pytest.raises(ConfigError) as error:
        config(*words)
    assert reason in " ".join(str(error.value).split())


def test_hardware_without_8_bit_products_is_refused_with_the_reason(torchao, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "an old GPU")
    for capability, recipe, reason in [
        ((8, 0), "tensorwise", "an old GPU has compute capability 8.0, and it needs 8.9"),
        ((8, 9), "rowwise", "has compute capability 8.9, and it needs 9.0"),
    ]:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _, has=capability: has)
        with pytest.raises(ConfigError, match=reason):
            check_float8(Float8(recipe=recipe), GPU)
        check_float8(Float8(recipe=recipe, emulate=True), GPU)
    check_float8(Float8(recipe="tensorwise"), GPU)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (10, 0))
    for_experts = Float8(recipe="rowwise_with_gw_hp", experts=True)
    with pytest.raises(
        ConfigError, match=r"only on NVIDIA GPUs of compute capability 9.0 \(Hopper\), and this is an old"
    ):
        check_float8(for_experts, GPU)
    check_float8(for_experts.model_copy(update={"emulate": True}), GPU)
    check_float8(for_experts.model_copy(update={"experts": False}), GPU)
    with pytest.raises(ConfigError, match=r"this run is on a CPU.*set float8.emulate = true"):
        check_float8(Float8(recipe="tensorwise"), CPU)


def test_without_torchao_one_message_says_how_to_install_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "torchao", None)
    monkeypatch.setitem(sys.modules, "torchao.float8", None)
    with pytest.raises(ConfigError, match=r"needs the package torchao.*: pip install 'torchao>=0.18'"):
        check_float8(Float8(recipe="tensorwise", emulate=True), CPU)


def test_experts_are_for_the_recipe_with_scales_of_single_tokens():
    found = load("parity.toml", [*EMULATED, *MIXTURE, "--float8.experts", "true"], 1)
    assert 'float8.experts does nothing with recipe = "tensorwise"' in " ".join(found.warnings)


def test_its_keys_are_run_keys_but_for_how_it_is_computed():
    assert is_run_key("float8.recipe")
    assert is_run_key("float8.fsdp_all_gather")
    assert is_run_key("float8.experts")
    assert not is_run_key("float8.emulate")
    by_micro_batch, by_token = ({"float8": {"recipe": recipe}} for recipe in ("rowwise", "rowwise_with_gw_hp"))
    assert set(further_run_keys(by_micro_batch)) == {"training.micro_batch_size", "mesh.cp"}
    assert not further_run_keys(by_token)
    assert not further_run_keys({})


@pytest.mark.parametrize(("recipe", "refused"), [("tensorwise", True), ("rowwise_with_gw_hp", False)])
def test_another_micro_batch_is_another_run_where_it_decides_scales(recipe, refused):
    words = ("--float8.recipe", recipe, "--float8.emulate", "true")
    old, new = (config(*words, "--training.micro_batch_size", n).model_dump() for n in ("1", "2"))
    assert bool(run_key_diff(old, new)) == refused


def test_the_estimate_counts_8_bits_where_fsdp_gathers_them():
    words = ("--mesh.dp_shard", "8", "--float8.recipe", "tensorwise", "--fsdp.zero_stage", "2")
    peaks = []
    for gather in ("false", "true"):
        job = config(*words, "--float8.fsdp_all_gather", gather, job="llama_7b.toml", ranks=8)
        peaks.append(estimate_memory(job, mesh_sizes(job, 8), "cuda").peak.gathered)
    assert 0.5 < peaks[1] / peaks[0] < 0.9


# --------------------------------------------------------------------------- values


@pytest.mark.parametrize(("kind", "dtype"), [(E4M3, torch.float8_e4m3fn), (E5M2, torch.float8_e5m2)])
def test_the_second_implementation_rounds_as_torchs_types_do(kind, dtype):
    every = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    every = every[every.isfinite()]
    middles = (every.sort().values[1:] + every.sort().values[:-1]) / 2  # ties
    random = torch.randn(100_000, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 100_000)
    for values in (every, middles, random):
        values = values.clamp(-kind.largest, kind.largest)
        torch.testing.assert_close(to_format(values, kind), values.to(dtype).float(), rtol=0, atol=0)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", ["float64", "bfloat16"])
def test_one_layer_has_the_second_implementations_bits(torchao, recipe, dtype):
    job = config("--float8.recipe", recipe, "--float8.emulate", "true", "--model.n_layers", "1")
    x = torch.randn(2, 32, 64, generator=torch.Generator().manual_seed(2)).to(getattr(torch, dtype))
    weight, grad = torch.randn(128, 64).to(x), torch.randn(2, 32, 128).to(x)
    found = []
    for convert in (lambda m: apply_float8(m, choice_of(m, job), job.float8), lambda m: in_8_bits(m, job.float8)):
        model = build_model(job.model).to(x.dtype)
        convert(model)
        linear = model.layers["0"].mlp.up_proj
        linear.weight = nn.Parameter(weight.clone())
        given = x.clone().requires_grad_()
        y = linear(given)
        y.backward(grad)
        found.append((y.detach(), given.grad, linear.weight.grad))
    exact = x @ weight.T
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
    error = ((found[0][0] - exact).norm() / exact.norm()).item()
    assert 0.01 < error < 0.06  # two factors of 3 bits: each is off by 2 ** -4 at most, 0.026 in the mean square


@pytest.mark.slow
def test_a_run_in_8_bits_is_said_resumed_and_exported_in_full_precision(torchao, tmp_path, capsys):
    words = (*EMULATED, "--checkpoint.interval", "10", "--training.steps")
    assert launch_here(tmp_path / "whole", *words, "20") == 0
    assert "14 of the blocks' 14 matrices; one scale for a tensor; emulated, slowly" in " ".join(
        capsys.readouterr().out.replace("│", " ").split()
    )
    assert launch_here(tmp_path / "stopped", *words, "10") == 0
    assert launch_here(tmp_path / "stopped", *words, "20") == 0
    assert curve(tmp_path / "stopped" / "run") == curve(tmp_path / "whole" / "run")
    assert launch_here(tmp_path / "plain", "--training.steps", "20") == 0
    assert curve(tmp_path / "plain" / "run") != curve(tmp_path / "whole" / "run")
    capsys.readouterr()
    assert launch_here(tmp_path / "stopped", "--training.steps", "30") == 78
    assert 'float8.recipe: "tensorwise" -> "none"' in capsys.readouterr().err
    from safetensors.torch import load_file

    assert export_hf.main([str(tmp_path / "stopped" / "run"), str(tmp_path / "hf"), "--tokenizer", "none"]) == 0
    weights = load_file(tmp_path / "hf" / "model.safetensors")
    assert all(weight.dtype == torch.float32 for weight in weights.values())
    assert "model.layers.0.mlp.up_proj.weight" in weights


def test_a_cpu_without_emulation_ends_in_one_message(torchao, tmp_path, capsys):
    words = ("--job.device", "auto", "--float8.recipe", "tensorwise")
    assert launch_here(tmp_path, *words) == 78
    said = capsys.readouterr().err
    assert "this run is on a CPU, which has no float8 matmuls" in said
    assert "Traceback" not in said


def test_the_summary_names_what_the_recipe_does(torchao):
    job = config("--float8.recipe", "rowwise_with_gw_hp", "--float8.emulate", "true", "--float8.skip", '["layers.3.*"]')
    assert float8_products(job, CPU) == (
        "21 of the blocks' 28 matrices, 7 skipped by float8.skip; a scale for each row, the weights' gradients in "
        "compute_dtype; emulated, slowly (float8.emulate)"
    )
    assert float8_products(config(), CPU) == ""


@pytest.mark.parametrize(("fsdp", "is_refused"), [(3, True), (2, False)])
def test_rows_that_tensor_parallelism_cuts_first_must_be_cut_evenly_by_fsdp(fsdp, is_refused):
    with fake_ranks(fsdp * 2):
        mesh = init_device_mesh("cpu", (fsdp, 2), mesh_dim_names=("shard", "tp"))
        linear = parallelize_module(nn.Linear(8, 32, bias=False), mesh["tp"], ColwiseParallel())
        fully_shard(linear, mesh=mesh["shard"])
        refused = pytest.raises(ConfigError, match="6 ranks cannot cut the 32 rows of up_proj evenly")
        with refused if is_refused else nullcontext():
            _even_shard("up_proj", linear.weight)
