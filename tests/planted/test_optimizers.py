"""The proof finds optimizers of one's own that are not elementwise: by the check, or by the weights on a mesh."""

from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from configs.reading.toml_text import table_text
from scripts.parity_rows import words
from scripts.proving.run import Prover
from tests.planted.test_planted import MODEL, Pool, of_names

SHARDED = of_names(("FSDP 2",))


def prover_of_one_step(ranks: Any, folder: Path, name: str) -> Prover:
    keys = {**MODEL, "training.steps": 1, "optimizer.name": f"tests.planted.optimizers:{name}", "optimizer.lr": 0.1}
    file = folder / "job.toml"
    file.write_text(table_text(load("parity.toml", words(keys)).config.model_dump(exclude_unset=True)))
    return Prover(Pool(ranks), str(file), folder)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["Normed", "NormedRule"])
def test_the_check_names_it_on_every_mesh(ranks, tmp_path, name):
    prover = prover_of_one_step(ranks, tmp_path, name)
    for techniques in ((), SHARDED):
        outcome = prover.outcome(techniques)
        assert outcome.verdict == "refused"
        assert f'"tests.planted.optimizers:{name}" does not update each element by itself' in outcome.reason


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NormedIfLarge", pytest.param("NormedIfLargeRule", marks=pytest.mark.slow)])
def test_what_the_check_does_not_see_is_wrong_on_a_mesh(ranks, tmp_path, name):
    outcome = prover_of_one_step(ranks, tmp_path, name).outcome(SHARDED)
    assert outcome.verdict == "wrong"
    assert outcome.wrong == ("embed_tokens.weight", "lm_head.weight")  # 64 x 32; the others have 1,024 elements
    assert "weight of embed_tokens.weight, the first of 2" in outcome.reason
