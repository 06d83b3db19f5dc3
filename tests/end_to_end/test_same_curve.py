"""Change the mesh, not the run: any number of ranks learns the same from the same text."""

from pathlib import Path

import pytest

from tests.end_to_end.launch import TEXT, launch, records

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "words"),
    [(2, ""), (4, "--mesh.tp 2 --training.micro_batch_size 4")],
    ids=["2 ranks, accumulation 2", "4 ranks, TP 2, accumulation 1"],
)
def test_losses_and_validation(prepared: Path, corpus: Path, ranks: int, words: str):
    launch(corpus, words, ranks, config=TEXT)
    bounds = {"loss": 1e-5, "grad_norm": 1e-4, "validation_loss": 1e-5, "validation_bits_per_byte": 1e-5}
    for ours, alone in zip(records(corpus / "run"), records(prepared / "run"), strict=True):
        for key in alone.keys() & bounds.keys():
            assert ours[key] == pytest.approx(alone[key], rel=bounds[key]), f"{key} of step {alone['step']}"
