"""The proof finds mistakes that happened in real projects, by axis and by parameter, and accuses nothing else."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from configs.reading.toml_text import table_text
from scripts.parity_rows import words
from scripts.proving.run import BOUND, Prover
from scripts.proving.techniques import TECHNIQUES
from tests.marked import marked
from tests.planted.mistakes import MISTAKES

MODEL: dict[str, object] = {
    "model.dim": 32,
    "model.n_layers": 2,
    "model.n_heads": 4,
    "model.n_kv_heads": 2,
    "model.ffn_dim": 32,
    "model.vocab_size": 64,
    "model.init_std": 0.1,
    "training.steps": 2,
    "training.seq_len": 16,
    "training.global_batch_size": 4,
    "training.max_norm": 0.1,
}
EXPERTS = {"model.n_experts": 4, "model.experts_per_token": 2, "model.n_shared_experts": 1}
JOBS: dict[str, dict[str, object]] = {
    "dense": {},
    "norms": {"model.qk_norm": "head"},
    "tied": {"model.tie_embeddings": "true"},
    "experts": {**EXPERTS, "model.router.auxiliary_loss_weight": 0.1},
    "bias": {**EXPERTS, "model.router.load_balance": "bias", "model.router.bias_update_rate": 0.01},
}
QUICK = (
    "terms of a head's norm are not added",
    "gradients are summed by a loss and averaged by FSDP",
    "buffers stay empty after the meta device",
)
LONG = ("an output in flight enters a compiled block",)


class Pool:
    def __init__(self, run: Any) -> None:
        self.run = run


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The file of each of `JOBS`."""
    folder = tmp_path_factory.mktemp("jobs")
    files = {}
    for name, keys in JOBS.items():
        config = load("parity.toml", words(MODEL | keys)).config
        files[name] = folder / f"{name}.toml"
        files[name].write_text(table_text(config.model_dump(exclude_unset=True)))
    return files


@pytest.fixture(scope="session")
def provers(jobs: dict[str, Path], ranks: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Prover]:
    """A prover of each job, which keeps the references."""
    return {name: Prover(Pool(ranks), str(file), tmp_path_factory.mktemp(name)) for name, file in jobs.items()}  # type: ignore[arg-type]


def planted(name: str, function: Any, *arguments: Any) -> Any:
    """Call a function in this process, with a mistake in it."""
    with MISTAKES[name].plant():
        return function(*arguments)


def of_names(names: tuple[str, ...]) -> tuple:
    return tuple(technique for technique in TECHNIQUES if technique.name in names)


def everything(names: Any) -> list:
    return marked(names, slow=[name for name in names if name not in (*QUICK, *LONG)], long=LONG)


@pytest.mark.parametrize("name", everything(MISTAKES))
def test_a_mistake_is_named(provers, name):
    mistake = MISTAKES[name]
    prover = provers[mistake.job]
    prover.on_ranks = partial(planted, name)
    difference = prover.difference(prover.row(of_names(mistake.on)))
    assert not difference.passes("float64")
    kind, wrong = difference.wrong()
    scalars = [scalar for scalar in ("loss", "norm") if not getattr(difference, scalar) <= BOUND]
    if mistake.named in ("loss", "norm"):
        assert scalars[:1] == [mistake.named], (kind, wrong, scalars)
        assert kind in ("weight", "")  # what follows from it
    else:
        assert wrong[:1] == [mistake.named], (kind, wrong, scalars)
    assert (difference.loss <= BOUND) == mistake.loss_is_right or len(difference.weights) == 0, difference.loss
