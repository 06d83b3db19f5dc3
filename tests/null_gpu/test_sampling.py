"""Sampling on CUDA: every tensor is where it is needed, in the dtype that it must have."""

import torch

from models import build_model
from scripts.sampling.cache import CachedModel
from scripts.sampling.draw import Distribution, draw, generators
from scripts.sampling.generate import generate
from tests.unit.hf_support import TINY


def continued(name):
    """The tokens of two texts of different lengths, and the logits' device and dtype."""
    device = torch.device("cuda")
    model = CachedModel(build_model(TINY[name]).to(device, torch.bfloat16), device)
    logits = model.start([[1, 2, 3], [4]], 12)
    draw(logits, Distribution(0.5, 10, 0.9), [0.1, 0.2])
    prompts = [[1, 2, 3], [4]]
    steps = list(generate(model, prompts, 4, 12, Distribution(0), generators(0, 2), None))
    return steps, str(logits.device), logits.dtype, tuple(logits.shape)


def test_texts_of_different_lengths(null_ranks):
    for name in ("untied", "tied"):
        steps, *of_logits = null_ranks(1, continued, name)[0]
        assert [len(step) for step in steps] == [2] * 4
        assert of_logits == ["cuda:0", torch.bfloat16, (2, 96)]
