"""`keel.prove` on models that Keel did not parallelize: right ones, and mistakes of other trainers."""

import subprocess
import sys

import pytest

from tests.conftest import ROOT
from tests.planted import plain

RIGHT = (plain.right_fsdp, plain.right_tp, plain.right_ddp)
WRONG = {
    # mistake: (what is wrong, as the report's first line says it, is the loss right)
    plain.mean_of_means: ("loss: ", False),
    plain.called_past_its_wrapper: ("head.weight", True),
    plain.bias_of_every_rank: ("loss: ", False),
    plain.gradient_of_an_input_is_one_ranks: ("blocks.1.norm.weight", True),
    plain.other_seeds: ("initial weight embed.weight", False),
    plain.unkeyed_dropout: ("loss: ", False),
    plain.norm_counts_replicas: ("gradient norm: ", True),
    plain.reentrant_checkpoint: ("blocks.0.down.bias", True),
    plain.replicated_gradient_is_a_term: ("blocks.1.norm.weight", True),
}


@pytest.mark.parametrize("right", RIGHT, ids=lambda each: each.__name__)
def test_nothing_is_wrong(ranks, right):
    for report in ranks(2, right):
        assert report.is_equal, str(report)
        n = 11 if right is plain.right_ddp else 12  # a tied matrix once
        assert str(report).startswith(f"equal: loss, norm and {n} gradients")


QUICK = (plain.mean_of_means, plain.gradient_of_an_input_is_one_ranks, plain.other_seeds)


def named(mistakes):
    return [pytest.param(each, id=each.__name__, marks=() if each in QUICK else pytest.mark.slow) for each in mistakes]


@pytest.mark.parametrize("mistake", named(WRONG))
def test_a_mistake_is_named(ranks, mistake):
    words, loss_is_right = WRONG[mistake]
    first, second = ranks(2, mistake)
    assert not first.is_equal
    assert str(first) == str(second)
    assert words in str(first)
    assert (first.loss <= 1e-10) == loss_is_right
    if words.startswith(("head.", "blocks.")):
        assert first.wrong[0] == words


@pytest.mark.slow
def test_untied_matrices_have_a_name_too_many(ranks):
    with pytest.raises(RuntimeError, match=r"the reference has no parameter head.weight \(1 such\)"):
        ranks(2, plain.untied_after_the_meta_device)


@pytest.mark.slow
def test_a_trainer_keeps_its_own_packages(tmp_path):
    (tmp_path / "models.py").write_text("mine = True\n")
    code = "import models; from keel import Report, prove; import models as again; assert again.mine; print(prove)"
    paths = f"{tmp_path}:{ROOT / 'scripts/entry'}"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": paths},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "function prove" in done.stdout
