"""Muon over parts of matrices: the exchange, the balance of its work, and moves between meshes."""

from unittest.mock import patch

import pytest
import torch
from torch.distributed.tensor import DTensor

from parallelisms import whole_matrices
from parallelisms.ranks import gather, local_part
from parallelisms.whole_matrices import WholeMatrices
from scripts.parity_compare import whole
from scripts.parity_rows import MOE, words
from tests.distributed.test_owner_training import FLOAT64, STEPS, learner_of, owners, run, settings
from trainer.step import hidden_matrices

MUON = ("--optimizer.name", "muon")
NORMUON = (*MUON, "--optimizer.neuron_beta", "0.9")
EXPERTS = words(MOE)
MESHES = {
    "DDP 2": (2, ("--mesh.dp_replicate", "2")),
    "FSDP 3, uneven": (3, ("--training.global_batch_size", "6", "--model.ffn_dim", "130")),
    "FSDP 4, experts": (4, EXPERTS),
    "FSDP 3, uneven experts": (3, ("--training.global_batch_size", "6", *EXPERTS)),
    "HSDP 2x2": (4, ("--mesh.dp_replicate", "2")),
    "FSDP 2 x TP 2": (4, ("--mesh.tp", "2")),
    "PP 2 x TP 2": (4, ("--mesh.pp", "2", "--mesh.tp", "2")),
    "EP 2 x FSDP 2": (4, ("--mesh.ep", "2", *EXPERTS)),
    "EP 2 x TP 2": (4, ("--mesh.ep", "2", "--mesh.tp", "2", *EXPERTS)),
    "EP 2, replicated": (4, ("--mesh.ep", "2", "--mesh.dp_replicate", "2", *EXPERTS)),
}


def centred(matrix):
    """Less its mean: it needs all of the matrix, and no other."""
    return matrix - matrix.mean()


def exchanged(words):
    """The largest error of the exchange, and the elements that each rank has mapped, of all."""
    learner = learner_of(settings(("--training.micro_batch_size", "1", *words)))
    stacked = {
        name: n for stage in learner.stages.values() for name, n in hidden_matrices(stage, learner.config).items()
    }
    parameters = {learner.parameters[name]: n for name, n in stacked.items()}
    parts = [local_part(parameter).detach() for parameter in parameters]
    mapped = 0

    def mapping(matrix):
        nonlocal mapped
        mapped += matrix.numel()
        return centred(matrix)

    with patch.object(whole_matrices, "BUCKET_ELEMENTS", 5000):
        found, _ = WholeMatrices(learner.mesh).map(mapping, parameters, parts)
    worst = 0.0
    for (parameter, n), part in zip(parameters.items(), found, strict=True):
        expected = torch.cat([centred(matrix) for matrix in whole(parameter).flatten(end_dim=-2).chunk(n)])
        if isinstance(parameter, DTensor):
            at = {"shape": parameter.shape, "stride": parameter.stride(), "run_check": False}
            part = DTensor.from_local(part, parameter.device_mesh, parameter.placements, **at)
        worst = max(worst, (whole(part).flatten(end_dim=-2) - expected).abs().max().item())
    everything = sum(parameter.numel() for parameter in parameters)
    return worst, gather(mapped, learner.mesh.stage.get_group()), everything


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_each_matrix_is_mapped_whole_by_one_rank(ranks, name):
    n, mesh = MESHES[name]
    for worst, mapped, everything in ranks(n, exchanged, (*MUON, *mesh)):
        assert worst < 1e-15
        assert sum(mapped) == everything
        assert max(mapped) < 1.15 * everything / len(mapped)


TP = ("--mesh.tp", "2")
HSDP = ("--mesh.dp_replicate", "2")
EP = ("--mesh.ep", "2")


@pytest.mark.parametrize(
    ("saved", "loaded"),
    [
        pytest.param((4, ()), (4, TP), marks=pytest.mark.slow, id="FSDP 4 to FSDP 2 x TP 2"),
        pytest.param((4, HSDP), (2, owners(2)), marks=pytest.mark.long, id="HSDP 2x2 to owner 2"),
        pytest.param((4, owners(2, *TP)), (4, ()), marks=pytest.mark.slow, id="owner 2 x TP 2 to FSDP 4"),
        pytest.param((4, (*EP, *EXPERTS)), (2, EXPERTS), marks=pytest.mark.slow, id="EP 2 x FSDP 2 to FSDP 2"),
        pytest.param((2, ("--mesh.pp", "2")), (4, HSDP), marks=pytest.mark.long, id="PP 2 to HSDP 2x2"),
        pytest.param(
            (2, (*owners(2), *EP, *EXPERTS)), (4, (*EP, *EXPERTS)), marks=pytest.mark.slow, id="owner and EP to EP"
        ),
        pytest.param((2, EXPERTS), (2, (*owners(2), *EP, *EXPERTS)), marks=pytest.mark.slow, id="FSDP to owner and EP"),
    ],
)
def test_from_mesh_to_mesh(ranks, tmp_path, saved, loaded):
    further = (*NORMUON, "--training.micro_batch_size", "1", *(EXPERTS if EXPERTS[0] in saved[1] else ()))
    straight = ranks(1, run, further)[0]
    first = ranks(saved[0], run, (*saved[1], *further), 0, 4, None, tmp_path)[0]
    rest = ranks(loaded[0], run, (*loaded[1], *further), 4, STEPS, tmp_path)[0]
    assert first + rest == pytest.approx(straight, rel=1e-12)


def state_bytes(words):
    learner = learner_of(settings(words, FLOAT64))
    state = [tensor for name, tensor in learner.state().items() if name.startswith("optimizer.")]
    return sum(local_part(tensor).nbytes for tensor in state)


def test_the_momentum_is_sharded(ranks):
    (alone,) = ranks(1, state_bytes, MUON)
    in_four = ranks(4, state_bytes, (*MUON, "--training.micro_batch_size", "1"))
    assert max(in_four) < 1.01 * alone / 4
