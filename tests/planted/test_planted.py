"""The proof finds mistakes that happened in real projects, by axis and by parameter, and accuses nothing else."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from configs.load import load
from configs.reading.hf_config import is_too_old
from configs.reading.toml_text import table_text
from scripts.parity_rows import words
from scripts.proving.run import BOUND, Prover, call, prove_all
from scripts.proving.techniques import TECHNIQUES
from tests.hf_families import words as of_hf
from tests.hf_families import write_config
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
    "experts": {**EXPERTS, "model.router.auxiliary_loss_weight": 0.1},
    "bias": {**EXPERTS, "model.router.load_balance": "bias", "model.router.bias_update_rate": 0.01},
}
OF_TRANSFORMERS = "mixtral"
"""A job beside `JOBS`, whose model is transformers' own."""
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
    if not is_too_old():
        model = write_config(folder / OF_TRANSFORMERS, OF_TRANSFORMERS, initializer_range=0.1, intermediate_size=32)
        keys = {key: value for key, value in MODEL.items() if not key.startswith("model.")}
        config = load("parity.toml", (*of_hf(model), *words(keys))).config
        files[OF_TRANSFORMERS] = folder / f"{OF_TRANSFORMERS}.toml"
        files[OF_TRANSFORMERS].write_text(table_text(config.model_dump(exclude_unset=True)))
    return files


def skip_without_a_job(provers: dict[str, Prover], job: str) -> None:
    if job not in provers:
        pytest.skip("the installed transformers is older than Keel needs")


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
    skip_without_a_job(provers, mistake.job)
    prover = provers[mistake.job]
    prover.on_ranks = partial(planted, name)
    difference = prover.difference(prover.row(of_names(mistake.on)))
    assert not difference.passes("float64")
    _, wrong = difference.wrong()
    assert wrong[0] == mistake.named
    assert (difference.first_loss > BOUND) == mistake.shows_in_loss


ROWS = sorted({(mistake.job, mistake.on) for mistake in MISTAKES.values() if "compile" not in mistake.on})


@pytest.mark.slow
@pytest.mark.parametrize(("job", "on"), ROWS, ids=str)
def test_nothing_is_wrong_without_a_mistake(provers, job, on):
    skip_without_a_job(provers, job)
    prover = provers[job]
    prover.on_ranks = call
    assert prover.difference(prover.row(of_names(on))).wrong() == ("", [])


def test_there_are_forty():
    assert len(MISTAKES) >= 40


@pytest.mark.slow
def test_the_first_wrong_axis_and_block_are_named(jobs, ranks, tmp_path):
    name = "the gradient of the experts' input is one rank's"
    prover = Prover(Pool(ranks), str(jobs["experts"]), tmp_path, partial(planted, name))
    outcomes = list(prove_all(prover, of_names(("FSDP 2", "TP 2", "AC full")), ranks=4, every_pair=False))
    verdicts = {outcome.name: outcome.verdict for outcome in outcomes}
    assert verdicts == {
        "1 process": "equal",
        "FSDP 2": "equal",
        "TP 2": "wrong",
        "AC full": "equal",
        "FSDP 2 x AC full": "equal",
    }
    (wrong,) = (outcome for outcome in outcomes if outcome.verdict == "wrong")
    assert wrong.wrong[0] == MISTAKES[name].named
    assert wrong.block == ""  # the forward pass is right
    assert "activations of all blocks agree" in wrong.reason


@pytest.mark.slow
def test_a_wrong_pair_of_right_techniques_is_named(jobs, ranks, tmp_path):
    name = "documents are forgotten between ranks"
    prover = Prover(Pool(ranks), str(jobs["dense"]), tmp_path, partial(planted, name))
    outcomes = list(prove_all(prover, of_names(("CP 2 gather", "AC full", "documents")), ranks=2, every_pair=False))
    wrong = [outcome for outcome in outcomes if outcome.verdict == "wrong"]
    assert [outcome.name for outcome in wrong] == ["CP 2 gather x AC full x documents", "CP 2 gather x documents"]
    assert {outcome.block for outcome in wrong} == {"layers.0"}
    assert "activations part in layers.0" in wrong[1].reason
