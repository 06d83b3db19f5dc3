"""Ranks that were not started alike end at once, and say in what they differ."""

import shutil
import socket
from pathlib import Path

import pytest

from tests.end_to_end.launch import ROOT, TINY, Outcome, finish, start, status
from tests.end_to_end.web import make_web, typed, web_words

HOST = socket.gethostname()


def two_ranks(folders: tuple[Path, Path], words: tuple[str, str], program: Path = ROOT / "train.py", **env: str):
    """Rank 0 and rank 1 of one job, each started in a folder of its own; `program` and `env` are those of rank 1."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    shared = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    first = start(folders[0], words[0], env=shared | {"RANK": "0", "LOCAL_RANK": "0"})
    second = start(folders[1], words[1], env=shared | {"RANK": "1", "LOCAL_RANK": "1"} | env, program=program)
    return finish(first), finish(second)


def copy_of_keel(folder: Path) -> Path:
    """Another version of Keel's code; returns its train.py."""
    for package in ("checkpoint", "configs", "models", "parallelisms", "scripts", "trainer"):
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "train.py").write_text((ROOT / "train.py").read_text())
    with (folder / "trainer" / "lr_schedule.py").open("a") as file:
        file.write("\n# Another version.\n")
    return folder / "train.py"


def errors(outcomes: tuple[Outcome, Outcome]) -> str:
    """What both ranks have said; one message."""
    said = "".join(outcome.err for outcome in outcomes)
    assert said.count("error: ") == 1, said
    assert "Traceback" not in said
    return said


@pytest.mark.slow
def test_another_command_code_and_thread_count_on_one_rank(tmp_path: Path):
    """Each of them alone would train on, or wait in a collective until its time-out."""
    outcomes = two_ranks(
        (tmp_path, tmp_path),
        ("", "--optimizer.lr 3e-2 --training.steps 8 --mesh.dp_replicate 2"),
        program=copy_of_keel(tmp_path / "other"),
        OMP_NUM_THREADS="2",
    )
    said = errors(outcomes)
    assert [outcome.code for outcome in outcomes] == [78, 78]
    ranks = f"on rank 1 ({HOST})", f"on rank 0 ({HOST})"
    for name, its, usual in (
        ("optimizer.lr", "0.03", "0.01"),
        ("training.steps", "8", "20"),
        ("mesh.dp_replicate", "2", "1"),
        ("threads (OMP_NUM_THREADS)", "2", "1"),
    ):
        assert said.count(f"{name} is {its} {ranks[0]}, but {usual} {ranks[1]}") == 1, said
    assert said.count("the code in trainer/lr_schedule.py is ") == 1, said
    assert said.count(" is ") == 5, said
    end = status(tmp_path / "run")
    assert (end["state"], end["step"]) == ("failed", 0)
    assert end["reason"] in said
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_other_token_files_on_one_rank(tmp_path: Path):
    for rank in (0, 1):
        (tmp_path / str(rank)).mkdir()
        make_web(tmp_path / str(rank), seed=rank)
    words = typed([*web_words(), "--job.output_dir", str(tmp_path / "run")])
    outcomes = two_ranks((tmp_path / "0", tmp_path / "1"), (words, words))
    said = errors(outcomes)
    assert [outcome.code for outcome in outcomes] == [78, 78]
    assert said.count("the content of data.sources.0 (web) is ") == 1, said
    assert f"on rank 1 ({HOST}), but " in said
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.slow
def test_each_rank_in_a_run_folder_of_its_own(tmp_path: Path):
    """The first save would fail; an older folder of the same name is no reason to take it for rank 0's."""
    folders = tmp_path / "0", tmp_path / "1"
    (folders[1] / "run").mkdir(parents=True)
    folders[0].mkdir()
    said = errors(outcomes := two_ranks(folders, ("", "")))
    assert [outcome.code for outcome in outcomes] == [78, 78]
    assert f"not all ranks see rank 0's run folder, {folders[0] / 'run'} on host {HOST}:" in said
    assert f"rank 1 on host {HOST}: {folders[1] / 'run'} is another folder" in said
    assert "Set job.output_dir to a path on a disk that all hosts share" in said
    end = status(folders[0] / "run")
    assert (end["state"], end["step"]) == ("failed", 0)
    assert sorted(path.name for path in (folders[0] / "run").iterdir()) == [".lock", "run.log", "status.json"]
    assert not list((folders[1] / "run").iterdir())


def test_a_mistake_on_one_rank_alone_is_said_by_that_rank(tmp_path: Path):
    """The others wait for it in vain: nobody but it can say why."""
    rank_1 = {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    process = start(tmp_path, "--training.stpes 9", env=rank_1, config=TINY)
    outcome = finish(process)
    assert outcome.code == 78
    assert "[rank 1]" in outcome.err
    assert outcome.said.count("--training.stpes: unknown key") == 1, outcome.err
