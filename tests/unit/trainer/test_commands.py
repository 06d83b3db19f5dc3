"""Commands beside the training, in one process: what a disk that refuses makes of them."""

import errno
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from configs.load import load
from trainer import commands
from trainer.commands import Commands
from trainer.lifecycle import StopRequest

TABLE = '[{name = "export", command = "true", every = 10}]'


@pytest.fixture(autouse=True)
def world():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_a_disk_that_can_not_be_listed_for_a_moment_ends_no_run(tmp_path, monkeypatch):
    words = ("--job.output_dir", str(tmp_path), "--checkpoint.interval", "10", "--checkpoint.after_save", TABLE)
    said: list[str] = []
    console: Any = SimpleNamespace(line=said.append, warning=said.append)
    nothing: Any = None
    begun = Commands(load("parity.toml", words).config, console, StopRequest(), nothing, lambda: 10, said.append)

    def refuse(folder):
        raise OSError(errno.EIO, "Input/output error", str(folder))

    with monkeypatch.context() as outage:
        outage.setattr(commands, "steps_in", refuse)
        begun.poll()
        begun.poll()
    [warning] = said
    assert "can't be used (Input/output error); training continues without it" in warning
