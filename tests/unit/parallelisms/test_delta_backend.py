"""attention.delta_backend: what computes layers of kind delta is named, and what can't is refused with the reason."""

import pytest
import torch

from configs.errors import ConfigError
from configs.load import load
from configs.plan import recurrent_of
from configs.schema import is_run_key
from models import build_model
from parallelisms.attention import delta
from parallelisms.attention.delta import apply_delta_backend, by_kernels, computes_by_kernels, delta_kernel

CPU, GPU = torch.device("cpu"), torch.device("cuda")
HYBRID = ("--model.layers", '["delta", "full"]', "--model.delta.key_heads", "2", "--model.delta.value_heads", "4")
BFLOAT16 = ("--training.compute_dtype", "bfloat16", "--training.dtype", "float32", "--training.reduce_dtype", "float32")
BFLOAT16 += ("--job.device", "auto")


def job(*words):
    return load("parity.toml", words).config


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (HYBRID, "torch's operations"),
        ((*HYBRID, "--attention.delta_backend", "torch"), 'torch\'s operations (attention.delta_backend = "torch")'),
        ((), ""),
    ],
)
def test_what_computes_on_a_cpu_is_named(words, said):
    assert delta_kernel(job(*words), CPU, print) == said


def test_kernels_that_are_named_are_refused_on_a_cpu():
    with pytest.raises(
        ConfigError, match=r'attention.delta_backend is "fla": flash-linear-attention runs on GPUs only'
    ):
        delta_kernel(job(*HYBRID, *BFLOAT16, "--attention.delta_backend", "fla"), CPU, print)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "does nothing: the model has no layers of kind delta (model.layers); leave it out"),
        ((*HYBRID, *BFLOAT16, "--job.device", "cpu"), 'runs on GPUs only, and this job is for a CPU; set "auto"'),
        ((*HYBRID, "--job.device", "auto"), 'rounds to bfloat16, and training.compute_dtype is "float64"'),
        ((*HYBRID, *BFLOAT16, "--training.deterministic", "true"), "chooses kernels by their times in each process"),
    ],
)
def test_what_contradicts_the_job_is_refused(words, reason):
    with pytest.raises(ConfigError) as error:
        job(*words, "--attention.delta_backend", "fla")
    assert 'attention.delta_backend: delta_backend "fla"' in str(error.value)
    assert reason in str(error.value)


def test_layers_of_a_model_take_the_kernels_that_the_job_names():
    config = job(*HYBRID, *BFLOAT16, "--attention.delta_backend", "fla")
    with torch.device("meta"):
        model = build_model(config.model)
    apply_delta_backend(model, config, GPU)
    rules = {module.rule for module in recurrent_of(model)}
    assert rules == {by_kernels}
    assert not computes_by_kernels(job(*HYBRID, *BFLOAT16, "--attention.delta_backend", "torch"), GPU)
    assert not is_run_key("attention.delta_backend")


def test_kernels_are_tried_once_and_a_plan_tries_nothing(monkeypatch):
    tried = []
    monkeypatch.setattr(delta, "_outcomes", {})
    monkeypatch.setattr(delta.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(delta, "_outcome", lambda *shapes: tried.append(shapes) or "")
    config = job(*HYBRID, *BFLOAT16, "--mesh.tp", "2")
    assert not computes_by_kernels(config, GPU, tries=False)
    said = []
    assert delta_kernel(config, GPU, said.append) == "flash-linear-attention"
    assert [line.partition(",")[0] for line in said] == ["trying flash-linear-attention's kernels"]
    assert computes_by_kernels(config, GPU, tries=False)
    assert computes_by_kernels(config, GPU)
    [(batch, seq_len, key_heads, value_heads, *_)] = tried
    assert (batch, seq_len) == (config.training.micro_batch_size, config.training.seq_len)
    assert (key_heads, value_heads) == (1, 2)


@pytest.mark.parametrize(
    ("method", "expected"),
    # Sequences of 32 tokens on 2 ranks: two chunks of 8 each, with all heads, or whole ones with half of the heads.
    [("gather", (4, 8, 2, 4, True)), ("ring", (4, 8, 2, 4, True)), ("all_to_all", (2, 32, 1, 2, False))],
)
def test_kernels_are_tried_on_what_a_rank_of_context_parallelism_computes(monkeypatch, method, expected):
    tried = []
    monkeypatch.setattr(delta, "_outcomes", {})
    monkeypatch.setattr(delta.importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(delta, "_outcome", lambda *given: tried.append((*given[:4], given[-1])) or "")
    words = ("--mesh.cp", "2", "--context.method", method, "--training.micro_batch_size", "2")
    assert computes_by_kernels(job(*HYBRID, *BFLOAT16, *words), GPU)
    assert tried == [expected]
