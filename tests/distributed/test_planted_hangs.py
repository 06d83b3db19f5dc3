"""`keel plan --prove` on jobs with a hang planted in them: each is found, and its ranks and lines are named."""

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

import parallelisms.pipeline
import trainer.opening
from configs.load import load
from parallelisms.mesh import Mesh
from scripts import plan
from scripts.rehearsal.job import rehearsal_job
from scripts.rehearsal.match import match
from scripts.rehearsal.play import play
from trainer.data.loader import DataLoader
from trainer.trainer import Trainer
from trainer.validation import Validation


def problem(folder: Path, ranks: int, *words: str) -> str | None:
    """What the proof of a job finds."""
    config = load("debug.toml", words, ranks).config
    programs = {}
    for rank in range(ranks):
        file = folder / f"{rank}.toml"
        file.write_text(rehearsal_job(config, ranks, folder / f"run-{rank}").text)
        programs[rank] = play(file, ranks, rank)
    return match(programs).problem


def skipped_without_tokens() -> Iterator[None]:
    """A rank whose share of the batch has no valid target leaves out the sum of the losses."""
    whole = Mesh.sum_over_tokens
    read = DataLoader.__next__

    def without_targets(loader: DataLoader) -> list:
        batch = read(loader)
        return [replace(part, targets=torch.full_like(part.targets, -100)) for part in batch] if here() == 1 else batch

    def unless_empty(mesh: Mesh, tensor: torch.Tensor) -> torch.Tensor:
        return whole(mesh, tensor) if tensor.any() else tensor

    with patch.object(DataLoader, "__next__", without_targets), patch.object(Mesh, "sum_over_tokens", unless_empty):
        yield


def save_of_one_stage() -> Iterator[None]:
    """Only the first pipeline rank saves at the interval."""
    should_save = Trainer._should_save

    def on_first(trainer: Trainer) -> bool:
        return should_save(trainer) and trainer.learner.mesh.pp.get_local_rank() == 0

    with patch.object(Trainer, "_should_save", on_first):
        yield


def groups_in_another_order() -> Iterator[None]:
    """Two further groups, which odd ranks create the other way round."""
    build = trainer.opening.build_mesh

    def build_and_group(*arguments: object) -> Mesh:
        mesh = build(*arguments)
        pairs = [[0, 1], [0, 1, 2, 3]]
        groups = [dist.new_group(pair) for pair in (pairs if here() % 2 == 0 else pairs[::-1])]
        for group in groups:
            dist.all_reduce(torch.zeros(1), group=group)
        return mesh

    with patch.object(trainer.opening, "build_mesh", build_and_group):
        yield


def uneven_micro_batches() -> Iterator[None]:
    """The last pipeline rank computes one micro-batch less."""
    count = parallelisms.pipeline.accumulation_steps

    def one_less(*arguments: object) -> int:
        return count(*arguments) - (here() >= 2)

    train = parallelisms.pipeline.Pipeline.train

    def of_fewer(pipeline: object, calls: list, scale: torch.Tensor) -> torch.Tensor:
        return train(pipeline, calls[: len(calls) - (here() >= 2)], scale)

    with (
        patch.object(parallelisms.pipeline, "accumulation_steps", one_less),
        patch.object(parallelisms.pipeline.Pipeline, "train", of_fewer),
    ):
        yield


def conditional_on_rank() -> Iterator[None]:
    """Rank 0 alone adds up something before a validation."""
    measure = Validation.measure

    def and_count(validation: Validation, *arguments: object) -> object:
        if here() == 0:
            dist.all_reduce(torch.zeros(3))
        return measure(validation, *arguments)

    with patch.object(Validation, "measure", and_count):
        yield


def circle_of_groups() -> Iterator[None]:
    """Sums over two groups a rank, which two of four ranks issue the other way round: each waits for the next."""
    end = Trainer._compare_copies

    def and_sum(run: Trainer) -> None:
        mesh = run.learner.mesh
        groups = [mesh.tp.get_group(), mesh.tokens.get_group()]
        for group in groups[::-1] if here() in (1, 2) else groups:
            dist.all_reduce(torch.zeros(5), group=group)
        end(run)

    with patch.object(Trainer, "_compare_copies", and_sum):
        yield


def both_receive_first() -> Iterator[None]:
    """Two ranks wait for a message of each other before they send theirs."""
    end = Trainer._compare_copies

    def and_swap(run: Trainer) -> None:
        dist.recv(torch.zeros(5), src=1 - here())
        dist.send(torch.zeros(5), dst=1 - here())
        end(run)

    with patch.object(Trainer, "_compare_copies", and_swap):
        yield


def here() -> int:
    return dist.get_rank()


PLANTED: dict[Callable[[], Iterator[None]], tuple[int, tuple[str, ...], tuple[str, ...]]] = {
    skipped_without_tokens: (
        2,
        (),
        ("rank 1 (training after step 0)", "rank 0 (training after step 0)", "among ranks 0, 1", "parallelisms/"),
    ),
    save_of_one_stage: (
        2,
        ("--mesh.pp", "2"),
        ("rank 0 (checkpoint after step 2)", "trainer/guards/agreement.py", "rank 1 (training after step 2)"),
    ),
    groups_in_another_order: (4, (), ("create their process groups in different orders", "rank 0", "rank 1")),
    uneven_micro_batches: (
        4,
        ("--mesh.pp", "2", "--training.micro_batch_size", "1"),
        ("rank 0 (training after step 0)", "message of", "rank 2"),
    ),
    conditional_on_rank: (2, (), ("rank 0 (validation after step 2)", "allreduce of (3,)", "rank 1 (validation")),
    circle_of_groups: (4, ("--mesh.tp", "2"), ("forever", "allreduce of (5,)", "rank 2", "rank 3", "rank 1")),
    both_receive_first: (2, (), ("forever", "rank 0 (", "waits for rank 1 to send", "waits for rank 0 to send")),
}


@pytest.mark.slow
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_hang_is_found_and_named(tmp_path, plant):
    ranks, words, named = PLANTED[plant]
    with contextmanager(plant)():
        found = problem(tmp_path, ranks, *words)
    assert found
    for part in named:
        assert part in found, found


@pytest.mark.slow
@pytest.mark.parametrize("words", sorted({words for _, words, _ in PLANTED.values()}), ids=" ".join)
def test_the_same_jobs_without_it_do_not_hang(tmp_path, words):
    assert problem(tmp_path, 4, *words) is None


def write_loss(file: Path, summing_ranks: str) -> None:
    """A user's own loss, in which some ranks alone add something up."""
    file.write_text(
        "import torch\nimport torch.distributed as dist\n\n\n"
        "def counting(logits, targets):\n"
        f"    if dist.is_initialized() and dist.get_rank() {summing_ranks}:\n"
        "        dist.all_reduce(torch.ones(1))\n"
        "    return logits.logsumexp(-1) - logits.gather(-1, targets[:, None])[:, 0]\n"
    )


@pytest.mark.slow
def test_the_command_names_the_line_of_a_users_own_code(tmp_path, capsys):
    write_loss(tmp_path / "my_loss.py", summing_ranks="== 1")
    job = tmp_path / "job.toml"
    job.write_text('base = "debug.toml"\n[training]\nloss = "my_loss:counting"\n')
    assert plan.main([str(job), "--ranks", "2", "--prove", "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["proof"]["problem"] in told.err
    assert "rank 1 (start-up) waits in allreduce of (1,) float32 for my_loss.py:7" in told.err
    assert "Traceback" not in told.err


@pytest.mark.slow
def test_what_one_rank_inside_a_large_world_does_is_found_when_all_are_rehearsed(tmp_path, capsys):
    """Rank 13 of 32, which is at no edge of the mesh, leaves out a sum that all others do."""
    write_loss(tmp_path / "my_odd_loss.py", summing_ranks="!= 13")
    job = tmp_path / "job.toml"
    job.write_text(
        'base = "debug.toml"\n[training]\nloss = "my_odd_loss:counting"\nglobal_batch_size = 32\n'
        "micro_batch_size = 1\n[mesh]\ntp = 2\n"
    )
    assert plan.main([str(job), "--ranks", "32", "--prove", "--json"]) == 0
    assert 13 not in json.loads(capsys.readouterr().out)["proof"]["ranks"]
    assert plan.main([str(job), "--ranks", "32", "--prove-all", "--json"]) == 1
    told = capsys.readouterr()
    assert json.loads(told.out)["proof"]["ranks"] == [*range(32)]
    assert "rank 0 (start-up) waits in allreduce of (1,) float32 for my_odd_loss.py:7" in told.err
    assert "rank 13" in told.err
