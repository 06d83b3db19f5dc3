"""Gradients that `fsdp.cpu_offload` keeps in CPU memory, while ranks exchange what they have on another device."""

from types import SimpleNamespace

import torch
from torch.nn import Parameter

from parallelisms import ties
from parallelisms.fake_ranks import fake_ranks
from parallelisms.guards.fingerprint import GradientFingerprint

ELSEWHERE = torch.device("meta")


def with_gradient(*values):
    parameter = Parameter(torch.zeros(len(values)))
    parameter.grad = torch.tensor(values)
    return parameter


def test_the_ends_of_a_pipeline_exchange_them_where_ranks_can(monkeypatch):
    sent = []
    ends = ties.TiedEnds({}, 2, None)
    ends._parameters = {"embed_tokens.weight": with_gradient(1.0, 2.0)}
    monkeypatch.setattr(ties, "exchanged_on", lambda gradient: ELSEWHERE)
    monkeypatch.setattr(ends, "_exchanged", lambda gradient: sent.append(gradient.device) or torch.tensor([3.0, 4.0]))
    ends.add_gradients()
    assert sent == [ELSEWHERE]
    assert ends._parameters["embed_tokens.weight"].grad.tolist() == [4.0, 6.0]


def test_a_fingerprint_counts_frozen_parameters_beside_them():
    axis = SimpleNamespace(get_local_rank=lambda: 0)
    mesh = SimpleNamespace(device=ELSEWHERE, cp=axis, tp=axis, pp=axis, sum_over_all=torch.ones_like)
    parameters = {"trained": with_gradient(1.0, 2.0), "frozen": Parameter(torch.zeros(2))}
    with fake_ranks(1):
        mesh.sum_over_all = lambda held: torch.ones(held.shape)  # how many replicas there are
        fingerprint = GradientFingerprint(parameters, list(parameters), mesh, seed=0)
        mesh.sum_over_all = lambda sums: sums
        assert fingerprint.sums(1, data=0).device == ELSEWHERE
