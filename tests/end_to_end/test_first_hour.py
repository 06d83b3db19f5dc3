"""What a user meets in the first hour: closed terminals, changed models, old metrics, batches without targets."""

import errno
import subprocess
import sys

import numpy as np
import pytest
import torch

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.index import read_metadata
from checkpoint.manifest import read_manifest
from configs.load import load
from parallelisms.grad_norm import grad_norm
from scripts import import_hf
from tests.conftest import ROOT
from tests.end_to_end.launch import TINY, curve, launch_here, records, status
from tests.unit.hf_support import TINY as MODELS
from tests.unit.hf_support import make_model, save
from trainer.data.sources import SyntheticSource
from trainer.planning.states import checkpoint_bytes


class Closed:
    """A standard output whose reader has ended."""

    encoding = "utf-8"

    def write(self, text):
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    def flush(self):
        self.write("")

    def isatty(self):
        return False


def test_a_closed_terminal_does_not_end_a_run(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdout", Closed())
    monkeypatch.setattr(sys, "stderr", Closed())
    assert launch_here(tmp_path, "--training.steps", "3") == 0
    monkeypatch.undo()
    assert status(tmp_path / "run")["state"] == "done"
    log = (tmp_path / "run" / "run.log").read_text()
    assert log.count("standard output can't be written (Broken pipe)") == 1
    assert "Done: step 3 reached." in log


def test_a_reader_that_stops_reading_is_no_error():
    """The list is longer than a pipe holds."""
    command = f"{sys.executable} scripts/parity.py --list | head -n 1"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stderr, done.stdout.count("\n")) == ("", 1)


def test_a_run_from_the_start_keeps_the_old_metrics_with_the_old_checkpoints(tmp_path):
    words = ("--training.steps", "4", "--checkpoint.interval", "2")
    assert launch_here(tmp_path, *words) == 0
    before = (tmp_path / "run/metrics.jsonl").read_bytes()
    assert launch_here(tmp_path, *words, "--checkpoint.load", "none", "--training.steps", "1") == 0
    aside = tmp_path / "run/checkpoints/abandoned-001"
    assert sorted(path.name for path in aside.iterdir()) == ["metrics.jsonl", "step-00000002", "step-00000004"]
    assert (aside / "metrics.jsonl").read_bytes() == before
    assert [step for step, *_ in curve(tmp_path / "run")] == [1]


def test_weights_of_another_model_of_the_same_shapes_are_announced(tmp_path, capsys):
    assert launch_here(tmp_path, "--training.steps", "1") == 0
    checkpoint = tmp_path / "run/checkpoints/step-00000001"
    new = ("--training.steps", "1", "--checkpoint.init_from", str(checkpoint), "--job.output_dir")
    assert launch_here(tmp_path, *new, str(tmp_path / "same")) == 0
    assert "computes something else" not in capsys.readouterr().err
    other = ("--model.rope_theta", "500000.0", "--model.n_heads", "8", "--model.n_kv_heads", "4")
    assert launch_here(tmp_path, *new, str(tmp_path / "other"), *other) == 0
    told = capsys.readouterr().err
    assert f"the model that was trained in {checkpoint} computes something else" in told
    for line in ("n_heads: 4 -> 8", "n_kv_heads: 2 -> 4", "head_dim: 8 -> 4", "rope_theta: 10000.0 -> 500000.0"):
        assert told.count(f"  model.{line}\n") == 1, told


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("--optimizer.moments_dtype", "bfloat16"),
        ("--training.dtype", "bfloat16"),
        ("--average.interval", "1"),
        ("--average.interval", "1", "--average.dtype", "bfloat16"),
        ("--average.interval", "1", "--optimizer.groups", "[{pattern = 'norm.weight', freeze = true}]"),
    ],
)
def test_a_checkpoint_is_as_large_as_was_said(tmp_path, words):
    assert launch_here(tmp_path, "--training.steps", "1", *words) == 0
    folder = tmp_path / "run/checkpoints/step-00000001"
    tensors = read_metadata(folder).state_dict_metadata.values()
    in_file = sum(tensor.size.numel() * tensor.properties.dtype.itemsize for tensor in tensors)
    assert checkpoint_bytes(load(str(TINY), words).config) == in_file
    assert read_manifest(folder).step == 1


def test_a_batch_without_targets_has_loss_0(tmp_path, monkeypatch):
    def read(self, address, tokens, starts):
        tokens[:] = 1
        starts[:] = True

    monkeypatch.setattr(SyntheticSource, "read", read)
    assert launch_here(tmp_path, "--training.steps", "2", "--data.document_mask", "true") == 0
    assert [(record["loss"], "skipped" in record) for record in records(tmp_path / "run")] == [(0.0, False)] * 2


@pytest.mark.parametrize("p", [3.0, 12.0, 1000.0])
@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_a_norm_with_a_large_exponent(p, scale):
    torch.manual_seed(0)
    parameters = [torch.nn.Parameter(torch.zeros(7, 5)), torch.nn.Parameter(torch.zeros(11))]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter) * scale
    values = np.concatenate([parameter.grad.double().numpy().ravel() for parameter in parameters])
    largest = np.abs(values).max()
    expected = largest * (np.abs(values / largest) ** p).sum() ** (1 / p)
    assert float(grad_norm(parameters, p)) == pytest.approx(expected, rel=1e-5)


def test_no_gradient_has_norm_0():
    parameter = torch.nn.Parameter(torch.zeros(3))
    parameter.grad = torch.zeros(3)
    assert float(grad_norm([parameter], 12.0)) == 0.0


def test_an_import_says_how_to_train_it_from_any_folder(tmp_path, monkeypatch, capsys):
    checkpoint = save(tmp_path / "checkpoint", make_model(MODELS["untied"]))
    export_hf(checkpoint, tmp_path / "hf", TokenizerFiles())
    capsys.readouterr()
    monkeypatch.chdir(tmp_path)
    assert import_hf.main(["hf", "imported"]) == 0
    output = tmp_path / "imported"
    hint = f'To train it: base = "{output / "model.toml"}", checkpoint.init_from = "{output}"'
    assert hint in capsys.readouterr().out
    assert f'#   base = "{output / "model.toml"}"' in (output / "model.toml").read_text()
