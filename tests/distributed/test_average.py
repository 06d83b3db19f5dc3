"""`average.dtype = "bfloat16"`: no mesh changes how the average is rounded, nor does a stop."""

from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from checkpoint.compare import compare
from checkpoint.index import read_metadata
from checkpoint.manifest import step_folder
from checkpoint.tensor_stream import read_tensor
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from tests.torture.resume import go_on
from trainer.data.loader import build_loader
from trainer.step import build_learner

RUN = (
    "--training.dtype float32 --training.reduction exact --training.micro_batch_size 1 --metrics.tensorboard false "
    "--average.interval 1 --average.decay 0.99 --validation.interval 2 --validation.sequences 4 "
    '--validation.sources [{name="noise",kind="synthetic"}]'
)
ROUNDED = f"{RUN} --average.dtype bfloat16"
OWNER_2 = "--mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner"


def run_to(ranks, n, folder, step, words):
    ranks(n, go_on, str(folder), step, tuple(words.split()))
    return step_folder(folder / "checkpoints", step)


def averages(folder):
    metadata = read_metadata(folder)
    names = [name for name in metadata.state_dict_metadata if name.startswith("average.")]
    return {name: read_tensor(folder, metadata, name) for name in names}


@pytest.mark.slow
def test_two_ranks_round_as_one_does(ranks, tmp_path):
    stays = run_to(ranks, 1, tmp_path / "stays", 3, ROUNDED)
    assert not list(compare(run_to(ranks, 2, tmp_path / "two", 3, ROUNDED), stays))


@pytest.mark.slow
def test_an_average_that_moves_between_meshes_has_the_bits_of_one_that_stays(ranks, tmp_path):
    stays = run_to(ranks, 1, tmp_path / "stays", 6, ROUNDED)
    run_to(ranks, 2, tmp_path / "moves", 3, ROUNDED)
    moves = run_to(ranks, 2, tmp_path / "moves", 6, f"{ROUNDED} {OWNER_2}")
    assert not list(compare(moves, stays))
    exact = averages(run_to(ranks, 1, tmp_path / "exact", 6, RUN))
    found = averages(stays)
    assert found.keys() == exact.keys()
    assert {average.dtype for average in found.values()} == {torch.bfloat16}
    for name, average in found.items():
        # Six roundings, each to a neighbor; a weight's sign may change in between.
        torch.testing.assert_close(average.float(), exact[name], rtol=6 * 2**-7, atol=1e-4)


@pytest.mark.slow
def test_bits_are_the_same_on_other_meshes(ranks, tmp_path):
    stays = averages(run_to(ranks, 1, tmp_path / "stays", 4, ROUNDED))
    for name, n, words in (("FSDP 4", 4, ""), ("HSDP", 4, "--mesh.dp_replicate 2"), ("PP 2", 2, "--mesh.pp 2")):
        found = averages(run_to(ranks, n, tmp_path / name, 4, f"{ROUNDED} {words}"))
        assert found.keys() == stays.keys()
        assert all(torch.equal(found[each], stays[each]) for each in stays), name


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_its_type_changes_only_if_that_is_allowed(ranks, tmp_path, dtype):
    of_weights = " ".join(f"--training.{key} {dtype}" for key in ("dtype", "compute_dtype", "reduce_dtype"))
    before = averages(run_to(ranks, 1, tmp_path, 2, f"{RUN} {of_weights}"))
    with pytest.raises(Exception, match=r"average.dtype: \"float32\" -> \"bfloat16\""):
        run_to(ranks, 1, tmp_path, 3, f"{ROUNDED} {of_weights}")
    still = f"{of_weights} --average.start_step 1 --average.interval 4 --job.allow_run_change true"
    rounded = averages(run_to(ranks, 1, tmp_path, 3, f"{ROUNDED} {still}"))
    assert all(torch.equal(rounded[name], each.bfloat16()) for name, each in before.items())
    exact = averages(run_to(ranks, 1, tmp_path, 4, f"{RUN} {still}"))
    assert all(torch.equal(exact[name], each.to(getattr(torch, dtype))) for name, each in rounded.items())


def evaluated_with_the_average(words):
    """Gradient norms of steps before which the average is evaluated."""
    config = load("parity.toml", words, dist.get_world_size()).config
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), torch.device("cpu"))
    learner = build_learner(config, mesh)
    norms = []
    with closing(build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)) as loader:
        for number, micro_batches in zip(range(1, 5), loader, strict=False):
            if learner.average.has_begun:
                with learner.averaged():
                    learner.evaluate(micro_batches, None)
            step = learner.step(micro_batches, lr=1e-2)
            learner.update_average(number, step.skip)
            norms.append(step.result().grad_norm)
    return norms


@pytest.mark.slow
@pytest.mark.parametrize(("n", "mesh"), [(2, "--comm.prefetch 2"), (4, "--mesh.pp 2")])
def test_modules_that_it_does_not_run_have_the_weights_afterwards(ranks, n, mesh):
    """Those that predict further tokens: gathered ahead of an evaluation's last block, they are not run there."""
    words = ("--average.interval", "2", "--average.decay", "0.5", "--model.multi_token", "{depth = 2}")
    expected = ranks(1, evaluated_with_the_average, words)[0]
    for norms in ranks(n, evaluated_with_the_average, (*words, *mesh.split())):
        assert norms == pytest.approx(expected, rel=1e-10)
