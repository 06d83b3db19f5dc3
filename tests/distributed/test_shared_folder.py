"""Whether all ranks see one run folder."""

import os
import socket
import time
from pathlib import Path
from unittest.mock import patch

import torch.distributed as dist

from trainer.guards import shared_folder
from trainer.guards.shared_folder import NotShared, require_shared, who_lacks


def found_from(base, places, late_seconds):
    """What each rank finds whose run folder is in its place; on the last one, new files appear late."""
    rank, started, really = dist.get_rank(), time.monotonic(), os.listdir
    folder = base / places[rank] / "run"

    def late(path):
        return [] if time.monotonic() - started < late_seconds else really(path)

    is_late = rank == len(places) - 1 and late_seconds
    with patch.object(shared_folder.os, "listdir", late if is_late else really):
        lacking, _ = who_lacks(folder)
    said = ""
    try:
        require_shared(folder, lacking)
    except NotShared as error:
        said = str(error)
    return lacking, said


def test_one_folder(ranks, tmp_path):
    assert set(map(str, ranks(3, found_from, tmp_path, "aaa", 0))) == {"([], '')"}
    assert list((tmp_path / "a/run").iterdir()) == []


def test_files_that_appear_late(ranks, tmp_path):
    assert ranks(2, found_from, tmp_path, "aa", 1.0) == [([], "")] * 2


def test_a_single_rank_creates_nothing(ranks, tmp_path):
    assert ranks(1, found_from, tmp_path, "a", 0) == [([], "")]
    assert not list(tmp_path.iterdir())


def test_other_folders_are_named_with_their_ranks(ranks, tmp_path):
    (tmp_path / "b/run").mkdir(parents=True)
    lacking, said = ranks(4, found_from, tmp_path, "abbc", 0)[3]
    host = socket.gethostname()
    assert lacking == [
        f"ranks 1, 2 on host {host}: {tmp_path}/b/run is another folder",
        f"rank 3 on host {host}: {tmp_path}/c/run does not exist",
    ]
    assert said.startswith(f"not all ranks see rank 0's run folder, {tmp_path}/a/run on host {host}:\n  ranks 1, 2")
    assert list((tmp_path / "a/run").iterdir()) == list((tmp_path / "b/run").iterdir()) == []


def test_a_folder_that_cannot_be_made_is_left_to_whoever_opens_it(ranks, tmp_path: Path):
    (tmp_path / "a").write_text("a file")
    assert ranks(2, found_from, tmp_path, "aa", 0) == [([], "")] * 2
