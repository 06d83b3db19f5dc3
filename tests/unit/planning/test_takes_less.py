"""A job that does not fit is told which change would make it fit, and with that change it does."""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch

from configs.layout import mesh_sizes
from configs.load import load
from trainer import announce
from trainer.planning.by_memory import freeing_copies
from trainer.planning.memory import estimate_memory
from trainer.planning.takes_less import CONTEXT_BYTES, does_not_fit, host_does_not_fit

GIB = 2**30


def job(name, ranks, *words):
    source = '[{name = "random", kind = "synthetic"}]'
    return load(name, [*words, "--data.sources", source], ranks).config


def needed(config, ranks):
    sizes = mesh_sizes(config, ranks)
    estimate = estimate_memory(freeing_copies(config, sizes), sizes, "cuda")
    return estimate.device + estimate.communicators + CONTEXT_BYTES


def test_nothing_is_said_of_a_job_that_fits():
    assert does_not_fit(job("llama_7b.toml", 8), 8, 80 * GIB) == ""


def test_the_line_between_is_the_estimate_and_cudas_own():
    config = job("llama_7b.toml", 8)
    assert does_not_fit(config, 8, needed(config, 8)) == ""
    assert "it will most likely run out of memory" in does_not_fit(config, 8, needed(config, 8) - 1)


@pytest.mark.parametrize(
    ("name", "ranks", "gib"),
    [("llama_8b.toml", 1, 140), ("llama_7b.toml", 8, 40), ("llama_1b.toml", 1, 40), ("llama_3b.toml", 2, 48)],
)
def test_the_job_fits_with_the_change_that_is_named(name, ranks, gib):
    said = does_not_fit(job(name, ranks), ranks, gib * GIB)
    changes = re.findall(r"([a-z_]+\.[a-z_]+) = (\S+) \(now", said)
    assert changes, said
    words = [word for key, value in changes for word in (f"--{key}", value)]
    changed = job(name, ranks, *words)  # the words are those of a command line, and make a valid job
    assert needed(changed, ranks) <= gib * GIB
    assert does_not_fit(changed, ranks, gib * GIB) == ""


def test_changes_are_put_together_where_one_is_not_enough():
    said = does_not_fit(job("llama_1b.toml", 1), 1, 22 * GIB)
    assert "training.micro_batch_size = 1" in said
    assert "activation_checkpoint.mode" in said


def test_full_checkpointing_comes_with_what_it_rules_out():
    """Where every second matmul is kept, mode "full" alone would be refused."""
    every_second = ("--activation_checkpoint.save_every_nth_matmul", "2")
    said = does_not_fit(job("llama_8b.toml", 1, *every_second), 1, 133 * GIB)
    assert 'mode = "full" (now "selective"), activation_checkpoint.save_every_nth_matmul = 1 (now 2)' in said


def test_what_no_change_brings_in_needs_more_ranks():
    said = does_not_fit(job("llama_8b.toml", 1), 1, 80 * GIB)
    assert re.search(r"With (.* and )?[248] ranks \(now 1\) it would take about", said), said


@pytest.mark.slow
def test_and_a_gpu_may_be_too_small_for_any():
    assert "No change that Keel knows of" in does_not_fit(job("llama_8b.toml", 1), 1, 2 * GIB)


@pytest.mark.parametrize(
    ("gib", "device", "host", "disk", "warned"),
    [
        (40, "cuda", 2000, 2000, ["each GPU's memory"]),
        (141, "cuda", 2000, 2000, []),
        (40, "cpu", 2000, 2000, []),
        (40, "cpu", 40, 2000, ["this host's memory for its 1 rank, and there are 40.0 GiB free"]),
        (141, "cuda", 1, 2000, []),  # nothing is offloaded
        (141, "cuda", 2000, 10, ["has 10,737,418,240 free: saves will fail"]),
    ],
)
def test_a_launch_warns_before_it_builds_anything(monkeypatch, tmp_path, gib, device, host, disk, warned):
    said = []
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (gib * GIB, 141 * GIB))
    monkeypatch.setattr(announce, "free_memory", lambda: host * GIB)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=disk * GIB))
    monkeypatch.setattr(announce.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(announce.dist, "get_world_size", lambda: 1)
    console = type("Console", (), {"warning": staticmethod(said.append)})
    announce.warn_if_too_large(job("llama_1b.toml", 1), torch.device(device), console, None, None)
    assert len(said) == len(warned)
    assert all(part in text for part, text in zip(warned, said, strict=True))
    assert all("training.micro_batch_size" in text for text in said if "memory" in text)


def test_what_is_offloaded_must_fit_the_host():
    config = load("llama_1b.toml", ["--fsdp.cpu_offload", "true"], 8).config
    states = estimate_memory(config, mesh_sizes(config, 8), "cuda").states
    assert host_does_not_fit(config, 8, 4, "cuda", 4 * states) == ""
    assert "this host's memory for its 4 ranks" in host_does_not_fit(config, 8, 4, "cuda", 4 * states - 1)


def test_a_host_is_not_told_to_offload_to_itself():
    said = host_does_not_fit(job("llama_1b.toml", 1), 1, 1, "cpu", 21 * GIB)
    assert "With " in said
    assert "cpu_offload" not in said
