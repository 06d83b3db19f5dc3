"""`checkpoint.export_every`: a run leaves Hugging Face folders of its line, equal to those that the script makes."""

import shutil
import time
from contextlib import closing

import pytest
import torch

from checkpoint.manifest import steps_in
from configs.load import load
from scripts import export_hf
from tests.end_to_end.launch import TINY, launch
from trainer import exports
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer


@pytest.mark.long
def test_a_run_exports_its_checkpoints(tmp_path):
    words = "--checkpoint.interval 5 --checkpoint.export_every 10 --training.steps 30"
    launch(tmp_path, f"{words} --mesh.tp 2 --checkpoint.mode async", ranks=2)
    exports, checkpoints = tmp_path / "run/exports", tmp_path / "run/checkpoints"
    steps = ["step-00000010", "step-00000020", "step-00000030"]
    assert sorted(path.name for path in exports.iterdir()) == steps
    for step in steps:
        assert export_hf.main([str(checkpoints / step), str(tmp_path / step)]) == 0
        for file in (tmp_path / step).iterdir():
            assert (exports / step / file.name).read_bytes() == file.read_bytes()
    shutil.rmtree(exports / steps[1])
    launch(tmp_path, f"{words} --checkpoint.load 20 --checkpoint.go_back 1 --checkpoint.mode sync")
    assert sorted(path.name for path in exports.iterdir()) == ["abandoned-001", *steps]
    assert [path.name for path in (exports / "abandoned-001").iterdir()] == steps[2:]
    made_again = (exports / steps[1] / "model.safetensors").read_bytes()
    assert made_again == (tmp_path / steps[1] / "model.safetensors").read_bytes()


def train_with_slow_exports(folder, mode):
    """A run that keeps one checkpoint, and saves faster than it exports."""
    make = exports.export_hf

    def make_slowly(*arguments, **keywords):
        time.sleep(0.2)
        make(*arguments, **keywords)

    exports.export_hf = make_slowly
    words = f"--checkpoint.interval 1 --checkpoint.keep_last 1 --checkpoint.export_every 1 --checkpoint.mode {mode}"
    words += f" --job.output_dir {folder} --training.steps 6 --metrics.tensorboard false"
    folder.mkdir()
    try:
        with Console(rank=1) as console, closing(Watchdog(folder, 600, print)) as watchdog:
            job = load(str(TINY), words.split(), 1)
            Trainer(Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog)).train()
    finally:
        exports.export_hf = make


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_what_is_to_be_exported_is_not_removed_before(ranks, tmp_path, mode):
    ranks(1, train_with_slow_exports, tmp_path / "run", mode)
    assert steps_in(tmp_path / "run" / "exports") == [1, 2, 3, 4, 5, 6]
    launch(tmp_path, "--checkpoint.keep_last 1 --training.steps 7")
    assert steps_in(tmp_path / "run" / "checkpoints") == [7]
