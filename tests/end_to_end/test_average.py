"""The average of the weights in real runs: the same on every mesh, after every stop, and as the formula has it."""

import pytest
import torch

from checkpoint.index import read_metadata
from checkpoint.tensor_stream import read_tensor
from scripts import checkpoint
from tests.end_to_end.launch import curve, launch, records, tensors
from tests.marked import marked

STEPS = 6
WORDS = (
    "--training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64 "
    f"--training.steps {STEPS} "
    "--average.interval 1 --average.decay 0.6 --average.start_step 1 --checkpoint.interval 1 --checkpoint.keep_last 0 "
    '--validation.interval 2 --validation.sequences 4 --validation.sources \'[{name = "noise", kind = "synthetic"}]\' '
    "--optimizer.groups '[{pattern = \"norm.weight\", freeze = true}]' "
)
MESHES = {
    "FSDP 2": (2, "", ""),
    "TP 2": (2, "", "--mesh.tp 2"),
    "owner 2": (2, "", "--fsdp.partition owner --mesh.dp_shard 1 --mesh.dp_replicate 2"),
    "PP 2 x FSDP 2, tied": (4, "--model.tie_embeddings true", "--mesh.pp 2"),
    "experts, EP 2": (2, "--model.n_experts 4", "--mesh.ep 2"),
    "experts, owner 2 x EP 2": (2, "--model.n_experts 4", "--mesh.ep 2 --fsdp.partition owner --mesh.dp_replicate 2"),
}
FIRST, *OTHERS = MESHES


def named(run, step, prefix):
    """The tensors of a checkpoint whose names begin so, by the rest of their names."""
    return {name.removeprefix(prefix): each for name, each in tensors(run, step).items() if name.startswith(prefix)}


def validated(run, key):
    return {record["step"]: record[key] for record in records(run) if "validation_loss" in record}


@pytest.mark.parametrize("case", marked(MESHES, slow=[FIRST, OTHERS[1]], long=[OTHERS[0], *OTHERS[2:]]))
def test_the_average_is_the_formula_on_every_mesh_and_after_stops(tmp_path, case):
    ranks, model, mesh = MESHES[case]
    launch(tmp_path, f"{WORDS}{model} --job.output_dir alone")
    launch(tmp_path, f"{WORDS}{model} {mesh} --job.output_dir straight", ranks)
    for steps in (3, STEPS):
        launch(tmp_path, f"{WORDS}{model} {mesh} --job.output_dir stopped --training.steps {steps}", ranks)
    alone, straight, stopped = (tmp_path / name for name in ("alone", "straight", "stopped"))
    expected = {}
    for step in range(2, STEPS + 1):
        weights = named(straight, step, "model.")
        found = named(straight, step, "average.")
        assert found.keys() == {name for name in weights if name != "norm.weight" and not name.endswith("bias")}
        for name, average in found.items():
            expected[name] = weights[name] if step == 2 else 0.6 * expected[name] + 0.4 * weights[name]
            torch.testing.assert_close(average, expected[name], rtol=1e-12, atol=1e-12)
    for name, average in named(alone, STEPS, "average.").items():
        torch.testing.assert_close(expected[name], average, rtol=1e-10, atol=1e-10)
    assert validated(alone, "validation_average_loss") == pytest.approx(
        validated(straight, "validation_average_loss"), rel=1e-10
    )
    assert curve(stopped) == curve(straight)
    after = named(stopped, STEPS, "average.")
    assert after.keys() == expected.keys()
    assert all(torch.equal(after[name], each) for name, each in named(straight, STEPS, "average.").items())


@pytest.mark.parametrize("case", marked(MESHES, slow=[FIRST], long=OTHERS))
def test_in_bfloat16_it_has_the_same_bits_on_every_mesh(tmp_path, case):
    """The weights agree to 1e-10 in float64, so hardly any is rounded another way, if the draws are the same."""
    ranks, model, mesh = MESHES[case]
    words = f"{WORDS} --average.dtype bfloat16 {model}"
    launch(tmp_path, f"{words} --job.output_dir alone")
    launch(tmp_path, f"{words} {mesh} --job.output_dir run", ranks)
    alone = named(tmp_path / "alone", STEPS, "average.")
    found = named(tmp_path / "run", STEPS, "average.")
    assert found.keys() == alone.keys()
    assert {average.dtype for average in found.values()} == {torch.bfloat16}
    assert sum(int((found[name] != average).sum()) for name, average in alone.items()) <= 2


@pytest.mark.slow
def test_its_loss_is_that_of_a_run_from_the_averaged_checkpoint(tmp_path):
    launch(tmp_path, f"{WORDS} --job.output_dir run")
    losses = validated(tmp_path / "run", "validation_loss")
    of_average = validated(tmp_path / "run", "validation_average_loss")
    assert of_average[2] == losses[2]  # the first update copies
    assert of_average[6] != losses[6]
    assert checkpoint.main(["average", str(tmp_path / "run"), str(tmp_path / "average")]) == 0
    still = "--checkpoint.init_from average --optimizer.lr 1e-30 --training.steps 2 --average.interval 0"
    plain = WORDS.replace("--average.decay 0.6 --average.start_step 1", "").replace("--average.interval 1", "")
    launch(tmp_path, f"{plain} {still} --job.output_dir from_it")
    assert validated(tmp_path / "from_it", "validation_loss")[2] == pytest.approx(of_average[6], rel=1e-12)


@pytest.mark.parametrize("case", marked(MESHES, slow=[FIRST], long=OTHERS))
def test_the_mean_of_the_last_on_every_mesh_and_after_stops(tmp_path, case):
    """It is the mean of the last three checkpoints, which the command computes as well."""
    ranks, model, mesh = MESHES[case]
    words = WORDS.replace("--average.decay 0.6", "--average.last 3")
    launch(tmp_path, f"{words}{model} --job.output_dir alone")
    for steps in (3, STEPS):
        launch(tmp_path, f"{words}{model} {mesh} --job.output_dir stopped --training.steps {steps}", ranks)
    alone, stopped = tmp_path / "alone", tmp_path / "stopped"
    losses = validated(alone, "validation_loss")
    of_average = validated(alone, "validation_average_loss")
    assert of_average[2] == losses[2]
    assert of_average[6] != losses[6]
    assert validated(stopped, "validation_average_loss") == pytest.approx(of_average, rel=1e-10)
    for output, words in (("kept", []), ("computed", ["--last", "3"])):
        assert checkpoint.main(["average", str(stopped), str(tmp_path / output), *words]) == 0
    kept, computed = (
        {name: read_tensor(folder, metadata, name) for name in metadata.state_dict_metadata}
        for folder, metadata in ((f, read_metadata(f)) for f in (tmp_path / "kept", tmp_path / "computed"))
    )
    assert kept.keys() == computed.keys()
    for name, mean in kept.items():
        torch.testing.assert_close(mean, computed[name], rtol=1e-14, atol=1e-14)


@pytest.mark.slow
def test_of_another_kind_it_begins_anew_where_that_is_allowed(tmp_path):
    plain = "--checkpoint.interval 0 --job.output_dir run --average.interval 1"
    launch(tmp_path, f"{plain} --training.steps 3")
    refused = launch(tmp_path, f"{plain} --training.steps 4 --average.last 3", expect=78)
    assert "average.last: 0 -> 3" in refused.said
    for last, step in ((3, 4), (2, 5), (0, 6)):
        words = f"--training.steps {step} --average.last {last} --job.allow_run_change true"
        launch(tmp_path, f"{plain} {words}")
        found = named(tmp_path / "run", step, "average_updates")[""]
        assert found.tolist() == ([step] + [0] * (last - 1) if last else 1)


@pytest.mark.slow
def test_it_can_be_added_to_a_run_and_left_out_where_that_is_allowed(tmp_path):
    """Its first update then copies the weights; without the permission, the key is named."""
    plain = "--checkpoint.interval 0 --job.output_dir run"
    launch(tmp_path, f"{plain} --training.steps 3")
    refused = launch(tmp_path, f"{plain} --training.steps 4 --average.interval 1", expect=78)
    assert "average.interval: 0 -> 1" in refused.said
    launch(tmp_path, f"{plain} --training.steps 4 --average.interval 1 --job.allow_run_change true")
    for name, average in named(tmp_path / "run", 4, "average.").items():
        assert torch.equal(average, tensors(tmp_path / "run", 4)[f"model.{name}"])
    launch(tmp_path, f"{plain} --training.steps 5 --job.allow_run_change true")
    assert not named(tmp_path / "run", 5, "average")
