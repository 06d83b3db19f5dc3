"""Whether all ranks see one run folder."""

import os
import socket
import time
from unittest.mock import patch

import torch.distributed as dist

from trainer.guards import shared_folder
from trainer.guards.shared_folder import NotShared, require_shared


def said_from(base, places, late_seconds):
    """What each rank raises whose run folder is in its place; on the last one, new files appear late."""
    rank, started, really = dist.get_rank(), time.monotonic(), os.listdir

    def late(path):
        return [] if time.monotonic() - started < late_seconds else really(path)

    is_late = rank == len(places) - 1 and late_seconds
    with patch.object(shared_folder.os, "listdir", late if is_late else really):
        try:
            require_shared(base / places[rank] / "run")
        except NotShared as error:
            return str(error)
    return ""


def test_one_folder(ranks, tmp_path):
    (tmp_path / "a/run").mkdir(parents=True)
    assert ranks(3, said_from, tmp_path, "aaa", 0) == [""] * 3
    assert list((tmp_path / "a/run").iterdir()) == []


def test_files_that_appear_late(ranks, tmp_path):
    (tmp_path / "a/run").mkdir(parents=True)
    assert ranks(2, said_from, tmp_path, "aa", 1.0) == [""] * 2


def test_a_single_rank_creates_nothing(ranks, tmp_path):
    assert ranks(1, said_from, tmp_path, "a", 0) == [""]
    assert not list(tmp_path.iterdir())


def test_other_folders_are_named_with_their_ranks(ranks, tmp_path):
    for place in "ab":
        (tmp_path / place / "run").mkdir(parents=True)
    said = ranks(4, said_from, tmp_path, "abbc", 0)
    host = socket.gethostname()
    assert len(set(said)) == 1
    assert said[0].startswith(
        f"not all ranks see rank 0's run folder, {tmp_path}/a/run on host {host}:\n"
        f"  ranks 1, 2 on host {host}: {tmp_path}/b/run is another folder\n"
        f"  rank 3 on host {host}: {tmp_path}/c/run does not exist\n"
    )
    assert list((tmp_path / "a/run").iterdir()) == list((tmp_path / "b/run").iterdir()) == []


def test_a_disk_that_refuses_is_left_to_later_writes(ranks, tmp_path):
    (tmp_path / "a").write_text("a file")
    assert ranks(2, said_from, tmp_path, "aa", 0) == [""] * 2
