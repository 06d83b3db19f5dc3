"""Tests that need a real GPU, by `pytest -m gpu`; without one they are skipped."""

import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    there_is_one = torch.cuda.is_available() and "KEEL_NULL_GPUS" not in os.environ
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not there_is_one:
                item.add_marker(pytest.mark.skip(reason="there is no real CUDA device here"))
