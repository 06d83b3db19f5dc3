"""A job that does not fit is told which change would make it fit, and with that change it does."""

import re

import pytest
import torch

from configs.layout import mesh_sizes
from configs.load import load
from trainer import run
from trainer.planning.memory import estimate_memory
from trainer.planning.takes_less import CONTEXT_BYTES, does_not_fit

GIB = 2**30


def job(name, ranks, *words):
    source = '[{name = "random", kind = "synthetic"}]'
    return load(name, [*words, "--data.sources", source], ranks).config


def needed(config, ranks):
    return estimate_memory(config, mesh_sizes(config, ranks), "cuda").device + CONTEXT_BYTES


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
    said = does_not_fit(job("llama_8b.toml", 1), 1, 133 * GIB)
    assert 'mode = "full" (now "selective"), activation_checkpoint.save_every_nth_matmul = 1 (now 2)' in said


def test_what_no_change_brings_in_needs_more_ranks():
    said = does_not_fit(job("llama_8b.toml", 1), 1, 80 * GIB)
    assert re.search(r"With (.* and )?[248] ranks \(now 1\) it would take about", said), said


def test_and_a_gpu_may_be_too_small_for_any():
    assert "No change that Keel knows of" in does_not_fit(job("llama_8b.toml", 1), 1, 2 * GIB)


@pytest.mark.parametrize(("gib", "device", "warned"), [(40, "cuda", 1), (141, "cuda", 0), (40, "cpu", 0)])
def test_a_launch_warns_before_it_builds_anything(monkeypatch, gib, device, warned):
    class Properties:
        total_memory = gib * GIB

    said = []
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Properties)
    monkeypatch.setattr(run.dist, "get_rank", lambda: 0)
    monkeypatch.setattr(run.dist, "get_world_size", lambda: 1)
    console = type("Console", (), {"warning": staticmethod(said.append)})
    run._warn_if_too_large(job("llama_1b.toml", 1), torch.device(device), console)
    assert len(said) == warned
    assert all("training.micro_batch_size" in text for text in said)
