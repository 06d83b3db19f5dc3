"""Layer norms and the gradient noise scale: against plain PyTorch, on every mesh, and without an effect on the run."""

from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from configs.load import load
from models import build_model
from parallelisms.details import Activations
from parallelisms.init import materialize
from parallelisms.pipeline import own_stages
from tests.end_to_end.launch import records
from tests.hf_families import NEEDS_TRANSFORMERS, write_config
from tests.hf_families import words as hf_words
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.details import noise_scale
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer

RUN = ("--training.global_batch_size", "16", "--training.steps", "3", "--metrics.interval", "100")
DUE = ("--metrics.details_interval", "1")
KEYS = ("layer_grad_norms", "layer_activation_rms", "grad_noise_scale", "grad_noise_trace", "grad_signal")
MESHES = {
    "FSDP 4": (4, ("--training.micro_batch_size", "2")),
    "TP 2": (2, ("--mesh.tp", "2", "--training.micro_batch_size", "8")),
    "PP 2": (2, ("--mesh.pp", "2", "--training.micro_batch_size", "4")),
    "DDP 2": (2, ("--mesh.dp_replicate", "2", "--training.micro_batch_size", "8")),
    "CP 2, checkpointed": (
        2,
        ("--mesh.cp", "2", "--activation_checkpoint.mode", "full", "--training.micro_batch_size", "4"),
    ),
    "1 process, compiled": (1, ("--compile.enable", "true", "--training.micro_batch_size", "4")),
    "FSDP 2 x TP 2, compiled": (4, ("--mesh.tp", "2", "--compile.enable", "true", "--training.micro_batch_size", "4")),
    "PP 2 x FSDP 2, interleaved": (
        4,
        ("--mesh.pp", "2", "--pipeline.schedule", "interleaved_1f1b", "--training.micro_batch_size", "2"),
    ),
    "owner 2": (2, ("--fsdp.partition", "owner", "--mesh.dp_shard", "1", "--mesh.dp_replicate", "2")),
    "ZeRO 1": (2, ("--fsdp.zero_stage", "1", "--training.micro_batch_size", "2")),
}


def train(folder: str, words: tuple[str, ...], job_file: str = "parity.toml") -> None:
    """Train the parity job, or another."""
    quiet = ("--job.output_dir", folder, "--metrics.tensorboard", "false")
    job = load(job_file, (*quiet, *words), dist.get_world_size())
    Path(folder).mkdir(parents=True, exist_ok=True)
    with Console(dist.get_rank()) as console, closing(Watchdog(Path(folder), 600, print)) as watchdog:
        trainer = Trainer(Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog))
        assert trainer.train() == "done"


def losses(folder: Path) -> list[float]:
    """Of all steps."""
    return [record["loss"] for record in records(folder)]


def plain(words: tuple[str, ...]) -> dict:
    """The details of the first step, in plain PyTorch."""
    config = load("parity.toml", words, 1).config
    with torch.device("meta"):
        model = build_model(config.model).double()
    materialize(model, torch.device("cpu"), config.training.seed)
    with closing(build_loader(config, 0, 1, 0)) as loader:
        batches = next(loader)
    tokens, targets = (torch.cat([getattr(batch, name) for batch in batches]) for name in ("tokens", "targets"))
    seen = {}
    hooks = [
        module.register_forward_hook(
            lambda _m, _i, out, name=name: seen.update({name: out[0] if type(out) is tuple else out})
        )
        for name, module in model.named_modules()
        if name == "embed_tokens" or (name.startswith("layers.") and name.count(".") == 1)
    ]

    def gradients(rows):
        model.zero_grad()
        F.cross_entropy(model(tokens[rows]).flatten(0, 1), targets[rows].flatten()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    def square(found, prefix=""):
        return sum(float((g**2).sum()) for name, g in found.items() if name.startswith(prefix))

    whole = gradients(slice(None))
    activations = {name: float(x.pow(2).mean().sqrt()) for name, x in seen.items()}
    for hook in hooks:
        hook.remove()
    small = gradients(slice(0, 2))
    layers = ["embed_tokens", *(f"layers.{i}" for i in range(4)), "norm", "lm_head"]
    trace = (square(small) - square(whole)) / (1 / 2 - 1 / 16)
    signal = (16 * square(whole) - 2 * square(small)) / (16 - 2)
    return {
        "layer_grad_norms": {layer: square(whole, f"{layer}.") ** 0.5 for layer in layers},
        "layer_activation_rms": activations,
        "grad_noise_scale": trace / signal,
        "grad_noise_trace": trace,
        "grad_signal": signal,
    }


def assert_equal_details(found: dict, expected: dict, tolerance: float) -> None:
    assert [key for key in KEYS if key in found] == [key for key in KEYS if key in expected]
    for key in filter(expected.get, KEYS):
        assert found[key] == pytest.approx(expected[key], rel=tolerance), key
    for key in ("layer_grad_norms", "layer_activation_rms"):
        assert list(found[key]) == list(expected[key])


@pytest.fixture(scope="module")
def one_process(ranks, tmp_path_factory):
    """The records of the run on one process."""
    folder = tmp_path_factory.mktemp("one") / "run"
    ranks(1, train, str(folder), RUN + DUE)
    return records(folder)


def test_against_plain_pytorch(ranks, one_process, tmp_path):
    found = one_process
    assert [record["step"] for record in found] == [1, 2, 3]  # logged, although metrics.interval is 100
    assert_equal_details(found[0], ranks(1, plain, RUN)[0], 1e-11)
    assert found[0]["grad_norm"] ** 2 == pytest.approx(sum(n**2 for n in found[0]["layer_grad_norms"].values()), 1e-12)
    ranks(1, train, str(tmp_path / "run"), (*RUN, "--metrics.interval", "1"))
    assert [record["loss"] for record in found] == losses(tmp_path / "run")
    assert not any(key in record for key in KEYS for record in records(tmp_path / "run"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "mesh",
    marked(
        MESHES,
        slow=[
            "FSDP 4",
            "DDP 2",
            "CP 2, checkpointed",
            "PP 2 x FSDP 2, interleaved",
            "owner 2",
            "ZeRO 1",
        ],
        # Compiled, "keel prove" and the null GPU have them; the other meshes in eager mode find the same.
        long=["1 process, compiled", "TP 2", "FSDP 2 x TP 2, compiled"],
    ),
)
def test_the_same_on_any_mesh(ranks, one_process, tmp_path, mesh):
    n, words = MESHES[mesh]
    ranks(n, train, str(tmp_path / "run"), RUN + DUE + words)
    for found, expected in zip(records(tmp_path / "run"), one_process, strict=True):
        assert_equal_details(found, expected, 1e-9)


def test_a_stage_with_another_batch(ranks, tmp_path):
    """The run's samples before it are then no multiple of its batch."""
    (tmp_path / "job.toml").write_text(
        'base = "parity.toml"\n[[stages]]\nat_step = 2\ntraining.global_batch_size = 24\n'
        "[metrics]\ndetails_interval = 3\ninterval = 100\n"
    )
    words = ("--training.steps", "3", "--training.global_batch_size", "16", "--training.micro_batch_size")
    for name, n, micro_batch in (("eight", 1, "8"), ("four", 1, "4"), ("two ranks", 2, "4")):
        ranks(n, train, str(tmp_path / name), (*words, micro_batch), str(tmp_path / "job.toml"))
    [*_, expected] = records(tmp_path / "eight")
    assert expected["step"] == 3
    assert expected["grad_noise_trace"] > 0
    for name in ("four", "two ranks"):
        [*_, found] = records(tmp_path / name)
        assert_equal_details(found, expected, 1e-9)


@pytest.mark.slow
def test_experts_and_frozen_layers(ranks, tmp_path):
    """A frozen layer has norm 0; an auxiliary loss leaves no noise scale; the run stays what it was."""
    experts = ("--model.n_experts", "4", "--optimizer.groups", '[{pattern = "embed_tokens.weight", freeze = true}]')
    experts += ("--training.micro_batch_size", "4")
    bias = ("--model.router.load_balance", "bias")
    for name, words in (("auxiliary", experts), ("bias", experts + bias)):
        ranks(1, train, str(tmp_path / name), RUN + DUE + words)
        ranks(1, train, str(tmp_path / f"{name} off"), (*RUN, *words, "--metrics.interval", "1"))
        assert losses(tmp_path / name) == losses(tmp_path / f"{name} off")
        on_two = tmp_path / f"{name} 2"
        ranks(2, train, str(on_two), RUN + DUE + words)
        for record, other in zip(records(tmp_path / name), records(on_two), strict=True):
            assert record["layer_grad_norms"]["embed_tokens"] == 0
            assert ("grad_signal" in record) == (name == "bias")
            assert record["layer_grad_norms"] == pytest.approx(other["layer_grad_norms"], rel=1e-9)
            if name == "bias":
                assert record["grad_signal"] == pytest.approx(other["grad_signal"], rel=1e-9)


@NEEDS_TRANSFORMERS
def test_modules_in_the_places_of_other_stages_are_not_measured(tmp_path):
    model = hf_words(write_config(tmp_path, "llama", num_hidden_layers=4))
    config = load("parity.toml", (*model, "--mesh.pp", "2"), 2).config
    whole = build_model(config.model)
    parts = (*whole.plan.before_blocks, *whole.plan.blocks)
    seen = Activations(own_stages(whole, config, rank=1), parts, SimpleNamespace(device=torch.device("cpu")))
    assert [parts[number] for number in seen._modules] == ["model.layers.2", "model.layers.3"]


def test_the_estimates_are_those_of_a_known_distribution():
    """Gradients of sequences drawn from N(mean, diag): the estimates average to |mean|^2 and the trace."""
    generator = np.random.default_rng(0)
    mean, deviation = generator.normal(size=50), generator.uniform(0.5, 3.0, size=50)
    estimates = []
    for _ in range(4000):
        gradients = mean + deviation * generator.normal(size=(32, 50))
        squares = [float((gradients[:n].mean(0) ** 2).sum()) for n in (4, 32)]
        estimates.append(noise_scale(*squares, 4, 32)[1:])
    trace, signal = np.mean(estimates, axis=0)
    assert trace == pytest.approx(float((deviation**2).sum()), rel=0.02)
    assert signal == pytest.approx(float((mean**2).sum()), rel=0.02)
    assert noise_scale(1.0, 2.0, 1, 2)[0] is None
