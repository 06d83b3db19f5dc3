"""Whole runs of Hugging Face's models: debug.toml with architecture "hf", stopped, moved to another mesh, exported.

All is computed in float64, norms included (tests/end_to_end/without_casts.py): meshes differ by its round-off only.
"""

import json
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from scripts import export_hf, sample
from scripts.sampling.cache import CachedModel
from scripts.sampling.draw import Distribution, generators
from scripts.sampling.generate import generate
from scripts.sampling.load import load_trained
from scripts.sampling.text import prompt_tokens
from tests.end_to_end.launch import ROOT, finish, launch, records, start, status
from tests.end_to_end.signals import signal_at_step
from tests.hf_families import NEEDS_TRANSFORMERS

# tests/distributed/test_hf_models.py moves these models between meshes in a quarter of the time.
pytestmark = [NEEDS_TRANSFORMERS, pytest.mark.long]

DEBUG = ROOT / "configs" / "debug.toml"
PROGRAM = Path(__file__).with_name("without_casts.py")
STEPS = 40
SMALL = {
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 384,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
}
FAMILIES = {
    "qwen3": {"tie_word_embeddings": True},
    "gemma3_text": {"sliding_window": 16, "query_pre_attn_scalar": 32},
    "untied": {"model_type": "qwen3", "tie_word_embeddings": False},
}
JOB = (
    "--job.device cpu --training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64"
    " --training.seq_len 48 --training.global_batch_size 8 --optimizer.lr 1e-3 --metrics.interval 1"
    f" --lr_schedule.total_steps {STEPS} --checkpoint.interval 15 --validation.interval 10 --validation.sequences 8"
    " --metrics.tensorboard false --model.architecture hf --model.hf "
)
FSDP = "--mesh.dp_shard 2 --training.micro_batch_size 4"
TP = "--mesh.tp 2 --training.micro_batch_size 8"
PP = "--mesh.pp 2 --training.micro_batch_size 4"
NUMBERS = {"loss", "grad_norm", "validation_loss", "validation_bits_per_byte"}
BOUND = 1e-10
PROMPT = "import os\n\ndef "
NEW_TOKENS = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A current folder with a config.json of each family; the first run prepares the data in it."""
    folder = tmp_path_factory.mktemp("hf_runs")
    for name, fields in FAMILIES.items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps({"model_type": name} | SMALL | fields))
    return folder


def train(folder: Path, family: str, run: str, words: str) -> Path:
    """Train on two ranks; returns the run folder."""
    launch(folder, f"{JOB}{family} --job.output_dir {run} {words}", 2, DEBUG, program=PROGRAM)
    return folder / run


def assert_one_curve(run: Path, straight: Path) -> None:
    """Compare losses, gradient norms and validations of all steps."""
    ours, theirs = records(run), records(straight)
    assert [record["step"] for record in ours] == list(range(1, STEPS + 1))
    assert [record["step"] for record in ours if "validation_loss" in record] == [10, 20, 30, 40]
    for found, expected in zip(ours, theirs, strict=True):
        for name in expected.keys() & NUMBERS:
            assert found[name] == pytest.approx(expected[name], rel=BOUND, abs=0), (found["step"], name)


@pytest.fixture(scope="module", params=["qwen3", "gemma3_text"])
def moved(request: pytest.FixtureRequest, folder: Path) -> Path:
    """A run that FSDP 2 began, SIGTERM stopped and TP 2 ended."""
    run = folder / f"{request.param}-moved"
    words = f"{JOB}{request.param} --job.output_dir {run.name} {FSDP} --training.steps {STEPS}"
    process = start(folder, words, 2, DEBUG, program=PROGRAM)
    signal_at_step(process, run, STEPS // 2, signal.SIGTERM)
    finish(process)
    stopped = status(run)
    assert (stopped["state"], stopped["reason"]) == ("preempted", "SIGTERM")
    assert STEPS // 2 <= stopped["step"] < STEPS
    return train(folder, request.param, run.name, f"{TP} --training.steps {STEPS}")


def test_a_stopped_run_goes_on_with_tensor_parallelism_on_one_curve(folder: Path, moved: Path):
    family = moved.name.removesuffix("-moved")
    assert_one_curve(moved, train(folder, family, f"{family}-straight", f"{FSDP} --training.steps {STEPS}"))


def test_greedy_text_of_its_export_is_that_of_transformers(
    folder: Path, moved: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(folder)
    exported = folder / f"{moved.name}-exported"
    assert export_hf.main([str(moved), str(exported)]) == 0
    theirs = AutoModelForCausalLM.from_pretrained(exported, dtype=torch.float64)
    for source in (moved, exported):
        trained = load_trained(source, None, "auto", "float64", None)
        prompt = prompt_tokens(trained.tokenizer, PROMPT)
        tokens = torch.tensor([prompt])
        logits = theirs(tokens, use_cache=False).logits  # their norms compute in float32 here
        assert torch.allclose(trained.model(tokens), logits, rtol=0, atol=5e-6)
        steps = generate(
            CachedModel(trained.model, trained.device),
            [prompt],
            NEW_TOKENS,
            trained.seq_len,
            Distribution(0.0, None, None, trained.tokenizer.vocab_size),
            generators(0, 1),
            None,
        )
        ours = [step[0] for step in steps]
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        expected = theirs.generate(tokens, **options)[0, len(prompt) :].tolist()
        assert ours == expected
        words = [str(source), PROMPT, "--temperature", "0", "--max-tokens", str(NEW_TOKENS), "--dtype", "float64"]
        capsys.readouterr()
        assert sample.main(words) == 0
        assert capsys.readouterr().out == trained.tokenizer.decode([*prompt, *expected]) + "\n"


def test_a_pipelines_run_goes_on_with_fsdp_on_one_curve(folder: Path):
    run = train(folder, "untied", "piped", f"{PP} --training.steps {STEPS // 2}")
    train(folder, "untied", "piped", f"{FSDP} --training.steps {STEPS}")
    assert_one_curve(run, train(folder, "untied", "untied-straight", f"{FSDP} --training.steps {STEPS}"))
