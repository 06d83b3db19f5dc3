"""Ranks whose GPUs differ recompute alike: as much as the smallest GPU asks for."""

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from configs.layout import mesh_sizes
from configs.load import load
from trainer.planning.by_memory import choice_by_memory, planned_choice

GIB = 2**30
CARDS = (140, 80)
"""GiB of each rank's GPU."""


def choice_of_a_rank():
    """What this rank chooses; of its mesh only what is read there, as there is no GPU."""
    config = load("llama_7b.toml", ("--activation_checkpoint.memory_limit_gib", "device"), 8).config
    mesh = SimpleNamespace(device=torch.device("cuda"), sizes=mesh_sizes(config, 8))
    total = CARDS[dist.get_rank()] * GIB
    with patch.object(torch.cuda, "mem_get_info", lambda _device: (total // 2, total)):
        return str(choice_by_memory(config, mesh))


@pytest.mark.slow
def test_all_ranks_choose_for_the_smallest_gpu(ranks):
    config = load("llama_7b.toml", ("--activation_checkpoint.memory_limit_gib", "device"), 8).config
    alone = [str(planned_choice(config, 8, gib * GIB)) for gib in CARDS]
    assert alone[0] != alone[1]
    assert ranks(2, choice_of_a_rank) == [alone[1]] * 2
