"""The command `keel replay`, as a person starts it, on another mesh than the run's."""

import pytest

from tests.end_to_end.launch import keel, launch, snapshot

COMMAND = """--checkpoint.after_save '[{name = "touch", command = "touch {output}/x", every = 10}]'"""
RECORDED = f"--metrics.fingerprint true --checkpoint.interval 10 {COMMAND} --training.reduction"


@pytest.mark.parametrize(
    ("reduction", "words", "expected"),
    [
        pytest.param(
            "fast",
            "--ranks 2 --mesh.tp 2",
            "equal within the bound: steps 11 to 14; the difference nearest to it is ",
            marks=pytest.mark.long,
        ),
        pytest.param("exact", "--ranks 2", "equal in bits: steps 11 to 14", marks=pytest.mark.slow),
    ],
)
def test_another_mesh(reduction, words, expected, tmp_path):
    launch(tmp_path, f"{RECORDED} {reduction}")
    before = snapshot(tmp_path / "run")
    replayed = keel(tmp_path, "replay", "run", "--step", "14", *words.split())
    said = replayed.out + replayed.err
    assert replayed.code == 0, said
    assert expected in said
    assert ("the bits may differ, because of mesh.tp 1 -> 2" in said) == (reduction == "fast")
    assert snapshot(tmp_path / "run") == before


@pytest.mark.slow
def test_a_run_that_began_at_the_weights_of_another(tmp_path):
    """The replay begins at a checkpoint of the run, so those weights are left out of its job without a word."""
    launch(tmp_path, "--training.steps 2 --job.output_dir weights")
    launch(tmp_path, f"{RECORDED} fast --checkpoint.init_from weights --training.steps 12")
    replayed = keel(tmp_path, "replay", "run", "--step", "12")
    assert "equal in bits: steps 11 to 12" in replayed.out + replayed.err
    assert "warning" not in replayed.err
