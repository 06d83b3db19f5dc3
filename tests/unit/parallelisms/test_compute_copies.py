"""Copies of parameters to compute with: their gradients, ties and freezing, against plain torch; and who has them."""

from copy import deepcopy
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.compute_copies import ComputeCopies, computes_with_copies, keeps_copies
from parallelisms.fsdp import freeze, is_needed
from tests.end_to_end.launch import TINY
from trainer.planning.by_memory import choose, chosen, planned_choice
from trainer.planning.memory import estimate_memory
from trainer.planning.takes_less import does_not_fit

GIB = 2**30
BF16 = "--training.compute_dtype bfloat16"
SOURCE = ("--data.sources", '[{name = "random", kind = "synthetic"}]')


class Tied(nn.Module):
    """Two products by one matrix, and one by another."""

    plan = SimpleNamespace(fsdp_groups=(("middle",),))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


class Chain(nn.Module):
    """Groups of one, of two, and of one module."""

    plan = SimpleNamespace(fsdp_groups=(("first",), ("second", "third"), ("last",)))

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third, self.last = (nn.Linear(8, 8) for _ in range(4))

    def forward(self, x):
        return self.last(torch.tanh(self.third(torch.tanh(self.second(torch.tanh(self.first(x)))))))


@pytest.fixture(params=[True, False], ids=["kept", "transient"])
def are_kept(request):
    return request.param


@pytest.fixture
def model():
    torch.manual_seed(0)
    return Tied()


def inputs(n):
    return torch.randn(n, 4, 8, generator=torch.Generator().manual_seed(1)).bfloat16()


def summed_by_hand(model, micro_batches, names):
    """Gradients of a bfloat16 model, each rounded to bfloat16 and added in float32."""
    rounded, sums = deepcopy(model).bfloat16(), {}
    for x in micro_batches:
        rounded.zero_grad()
        rounded(x).square().sum().backward()
        for name, parameter in rounded.named_parameters():
            if name in names:
                sums[name] = sums.get(name, 0) + parameter.grad.float()
    return sums


def test_gradients_are_added_to_the_masters_in_float32(model, are_kept):
    expected = summed_by_hand(model, inputs(3), dict(model.named_parameters()))
    masters = dict(model.named_parameters())
    ComputeCopies([model], torch.bfloat16, are_kept)
    for x in inputs(3):
        assert model(x).dtype == torch.bfloat16
        model(x).square().sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
    assert masters.keys() == dict(model.named_parameters()).keys() == expected.keys()
    for name, master in masters.items():
        assert master.dtype == master.grad.dtype == torch.float32
        assert torch.equal(master.grad, expected[name]), name


def test_ties_stay_and_a_refresh_takes_what_the_masters_hold(model):
    masters = list(model.parameters())
    copies = ComputeCopies([model], torch.bfloat16)
    assert model.first.weight is model.last.weight is copies.copies[masters[0]]
    with torch.no_grad():
        for master in masters:
            master.add_(0.3)
    assert not torch.equal(model.middle.weight, masters[2].bfloat16())
    copies.refresh()
    for master, copy in copies.copies.items():
        assert torch.equal(copy, master.bfloat16())


def test_a_frozen_copy_gets_no_gradient_until_it_trains(model, are_kept):
    masters = dict(model.named_parameters())
    ComputeCopies([model], torch.bfloat16, are_kept)
    x, *_ = inputs(1)
    for frozen in ({"first.weight"}, set(), {"middle.weight"}):
        expected = summed_by_hand(with_values(masters), [x], masters.keys() - frozen)
        freeze([model], masters, frozen)
        model(x).square().sum().backward()
        assert {name for name, master in masters.items() if master.grad is None} == frozen
        for name, gradient in expected.items():
            assert torch.equal(masters[name].grad, gradient), (frozen, name)
        for master in masters.values():
            master.grad = None


def held(model):
    """Names of the modules whose copies have memory."""
    with_memory = {name.split(".")[0] for name, p in model.named_parameters() if p.untyped_storage().size()}
    return sorted(with_memory, key=list(dict(model.named_children())).index)


def test_transient_copies_have_memory_only_while_their_group_computes():
    model, seen = Chain(), []
    ComputeCopies([model], torch.bfloat16, are_kept=False)
    model.second.requires_grad_(False)  # what has no gradient is freed, too
    for name, module in model.named_children():
        module.register_forward_pre_hook(lambda *_, name=name: seen.append((name, held(model))))
        module.register_full_backward_hook(lambda *_, name=name: seen.append((f"{name}, backward", held(model))))
    x, *_ = inputs(1)
    assert held(model) == []
    model(x.requires_grad_()).sum().backward()
    assert seen == [
        ("first", ["first"]),
        ("second", ["second", "third"]),
        ("third", ["second", "third"]),
        ("last", ["last"]),
        ("last, backward", []),
        ("third, backward", ["second"]),
        ("second, backward", ["second"]),
        ("first, backward", []),
    ]
    model(x)
    assert held(model) == ["last"]  # its backward pass would follow at once
    with torch.no_grad():
        model(x)
    assert held(model) == []


def test_transient_copies_have_the_masters_values_of_each_forward_pass(model):
    masters = dict(model.named_parameters())
    copies = ComputeCopies([model], torch.bfloat16, are_kept=False)
    assert not copies.kept
    x, *_ = inputs(1)
    for _ in range(2):
        copies.refresh()
        model(x)  # without a backward pass, which leaves the root's copies
        with torch.no_grad():
            for master in masters.values():
                master.add_(0.3)
        assert torch.equal(model(x), with_values(masters).bfloat16()(x))


def with_values(masters):
    model = Tied()
    model.load_state_dict({name: master.detach() for name, master in masters.items()}, strict=False)
    return model


# --------------------------------------------------------------------------- who has copies


@pytest.mark.parametrize(
    ("words", "ranks", "by"),
    [
        (BF16, 1, "copies"),
        (f"{BF16} --fsdp.zero_stage 1", 1, "copies"),
        (f"{BF16} --fsdp.partition owner --optimizer.name muon", 1, "copies"),
        (BF16, 2, "FSDP"),
        ("", 1, ""),
        (f"{BF16} --training.dtype bfloat16 --training.reduce_dtype bfloat16", 1, ""),
        (f"{BF16} --training.reduce_dtype bfloat16", 1, "FSDP"),
        (f"{BF16} --training.reduction exact", 1, "FSDP"),
        (f"{BF16} --fsdp.reshard_after_forward always", 1, "transient copies"),
        (f"{BF16} --fsdp.reshard_after_forward always", 2, "FSDP"),
        (f"{BF16} --fsdp.reshard_after_forward always --training.reduction exact", 1, "FSDP"),
        (f"{BF16} --fsdp.partition owner --fsdp.owner_broadcast_dtype bfloat16", 1, "FSDP"),
        (f"{BF16} --job.device auto --fsdp.cpu_offload true", 1, "FSDP"),
        (f"{BF16} --float8.recipe tensorwise --float8.emulate true", 1, "copies"),
        (f"{BF16} --float8.recipe tensorwise --float8.emulate true --float8.fsdp_all_gather true", 1, "FSDP"),
    ],
)
def test_what_converts(words, ranks, by):
    config = load(str(TINY), words.split(), ranks).config
    assert computes_with_copies(ranks, config) == ("copies" in by)
    assert keeps_copies(ranks, config) == (by == "copies")
    assert is_needed(ranks, config) == (by == "FSDP")


# --------------------------------------------------------------------------- where there is no room for them


def job(name, *words):
    return load(name, [*words, *SOURCE], 1).config


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "gib", "frees"), [("full", 140, True), ("full", 170, False), ("none", 100, True)])
def test_copies_that_do_not_fit_are_freed(mode, gib, frees):
    """8B on one GPU: 144 GiB with copies and full recomputation, 133 without copies."""
    config = job("llama_8b.toml", "--activation_checkpoint.mode", mode)
    choice = planned_choice(config, 1, gib * GIB)
    assert (choice is not None) == frees
    changed = chosen(config, choice)
    assert changed.activation_checkpoint == config.activation_checkpoint
    assert keeps_copies(1, changed) == (not frees)
    if choice:
        assert choice.needed == estimate_memory(changed, mesh_sizes(config, 1), "cuda").device
        assert str(choice).startswith('fsdp.reshard_after_forward = "always", since copies of the parameters')
    for asked_for in (("--fsdp.reshard_after_forward", "never"), ("--fsdp.zero_stage", "1")):
        assert planned_choice(job("llama_8b.toml", *asked_for), 1, gib * GIB) is None


def test_a_job_that_fits_without_copies_is_not_said_not_to_fit():
    config = job("llama_8b.toml", "--activation_checkpoint.mode", "full")
    assert estimate_memory(config, mesh_sizes(config, 1), "cuda").device > 140 * GIB
    assert does_not_fit(config, 1, 140 * GIB) == ""


@pytest.mark.slow
def test_a_limit_frees_copies_before_it_repeats_any_product():
    config = job("llama_1b.toml", "--activation_checkpoint.memory_limit_gib", "1")
    found = []
    for gib in (34, 40, 60):
        choice = choose(config, mesh_sizes(config, 1), "cuda", gib * GIB)
        changed = chosen(config, choice)
        assert choice.needed == estimate_memory(changed, mesh_sizes(config, 1), "cuda").device <= choice.limit
        frees_copies = changed.fsdp != config.fsdp
        assert keeps_copies(1, changed) == (not frees_copies)
        found.append((frees_copies, changed.activation_checkpoint.mode))
    assert found == [(True, "selective"), (False, "selective"), (False, "none")]
