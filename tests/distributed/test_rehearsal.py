"""The rehearsal of `keel plan --prove` beside real ranks: what it says that a rank issues, the rank issues."""

import re
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from configs.load import load
from parallelisms.torch_internals import listening
from scripts.rehearsal.echo import Echo
from scripts.rehearsal.job import rehearsal_job
from scripts.rehearsal.play import Event, Notes, StoppingConsole, Unwatched, play
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer

Line = tuple[tuple[int, ...], str, bool | None, int | None]


def job_file(words: tuple[str, ...], ranks: int, folder: Path, rank: int) -> Path:
    """The rehearsed job of a rank; `words` are a job and what overrides its keys."""
    job = load(words[0], words[1:], ranks)
    path = folder / f"{rank}.toml"
    later = [stage.config for stage in job.later_stages]
    path.write_text(rehearsal_job(job.config, ranks, folder / "run", later).text)
    return path


def lines(events: list[Event]) -> list[Line]:
    """What can be compared: groups by their ranks, since names count the groups of a process."""
    # The rehearsal plans a save by itself, with the same exchanges.
    plan = re.compile(r"checkpoint/plan\.py:\d+")
    return [(event.channel.ranks, plan.sub("the plan", event.what), event.sends, event.batch) for event in events]


def really_issued(words: tuple[str, ...], folder: str) -> list[Line]:
    """What this rank issues when all ranks run the job."""
    ranks = dist.get_world_size()
    rank = dist.get_rank()
    job = load(str(job_file(words, ranks, Path(folder), rank)), world_size=ranks)
    job.config.job.folder.mkdir(parents=True, exist_ok=True)
    notes = Notes()
    echo = Echo(notes.note)
    stop = StopRequest()
    watchdog = Unwatched(notes, lambda work: work() if rank == 0 else None)
    with (
        StoppingConsole(stop) as console,
        patch.object(dist, "batch_isend_irecv", echo.batched(dist.batch_isend_irecv)),
        listening(echo.before),
    ):
        Trainer(Runtime(job, torch.device("cpu"), console, stop, TimeLedger(), watchdog)).train()
    return lines(notes.events)


MESHES = {
    "FSDP 2 x TP 2": "debug.toml --mesh.tp 2",
    "PP 2 x HSDP": "parity.toml --mesh.pp 2 --mesh.dp_replicate 2 --pipeline.schedule interleaved_1f1b",
    "EP 2, CP 2 in a ring": "parity.toml --model.n_experts 4 --mesh.ep 2 --mesh.cp 2 --context.method ring",
    "Muon by owner": "parity.toml --mesh.dp_replicate 4 --fsdp.partition owner --optimizer.name muon",
    "experts by owner": "parity.toml --mesh.dp_replicate 4 --fsdp.partition owner --model.n_experts 4 --mesh.ep 2",
    "exact sums, ZeRO 1": "parity.toml --training.reduction exact --fsdp.zero_stage 1",
}


STAGED = """
base = "parity.toml"
mesh.pp = 2
data.sources = [{ name = "synthetic", kind = "synthetic", document_length = 8 }]

[[stages]]
at_step = 7
training = { seq_len = 256, global_batch_size = 32 }
data.document_mask = true
"""


@pytest.mark.slow
def test_a_rank_issues_at_the_border_of_a_stage_what_its_rehearsal_does(ranks, tmp_path):
    """The second stage has longer sequences, more micro-batches and documents."""
    file = tmp_path / "staged.toml"
    file.write_text(STAGED)
    (later,) = load(str(file), world_size=4).later_stages
    text = rehearsal_job(load(str(file), world_size=4).config, 4, tmp_path / "run", [later.config]).text
    words = ("at_step = 1", "document_mask = true")
    assert all(word in text for word in words)
    compare(ranks, (str(file),), tmp_path)


@pytest.mark.slow
def test_a_border_that_changes_no_shape_is_rehearsed(ranks, tmp_path):
    """The ranks exchange their places in the data there."""
    file = tmp_path / "staged.toml"
    file.write_text('base = "debug.toml"\n[[stages]]\nat_step = 7\noptimizer.lr = 1e-4\n')
    (later,) = load(str(file), world_size=4).later_stages
    assert "at_step = 1" in rehearsal_job(load(str(file), world_size=4).config, 4, tmp_path, [later.config]).text
    compare(ranks, (str(file),), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_rank_issues_what_its_rehearsal_does(ranks, tmp_path, name):
    compare(ranks, tuple(MESHES[name].split()), tmp_path)


def compare(ranks, words: tuple[str, ...], tmp_path: Path) -> None:
    """Compare what each of four ranks issues with what its rehearsal does."""
    real = ranks(4, really_issued, words, str(tmp_path))
    for rank in range(4):
        folder = tmp_path / f"rehearsal {rank}"
        folder.mkdir()
        rehearsed = lines(play(job_file(words, 4, folder, rank), 4, rank))
        assert rehearsed == real[rank]
