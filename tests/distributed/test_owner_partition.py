"""The optimizer shared out by owner against torch's own over all parameters: the same bits, whatever happens to it."""

from copy import deepcopy
from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn import Parameter
from torch.optim import SGD, Adagrad, AdamW, Muon, RMSprop

from parallelisms import owner_partition as zero
from parallelisms.owned_parameter import OwnedParameter
from parallelisms.owner_partition import OwnerPartition

SHAPES = {"a": (4, 6), "b": (6,), "c": (6, 3), "d": (2, 2), "e": (7,), "f": (3, 3)}
MATRICES, VECTORS = [n for n, s in SHAPES.items() if len(s) == 2], [n for n, s in SHAPES.items() if len(s) == 1]
LRS = (0.1, 0.02)
OPTIMIZERS = {
    "AdamW": AdamW,
    "AdamW fused": partial(AdamW, fused=True),
    "SGD": partial(SGD, momentum=0.9, nesterov=True),
    "Adagrad": Adagrad,
    "RMSprop": partial(RMSprop, centered=True),
}


def parameters(names=tuple(SHAPES)):
    generator = torch.Generator().manual_seed(3)
    made = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in SHAPES.items()}
    return {name: Parameter(made[name]) for name in names}


def set_gradients(params, step):
    """Of those that are not frozen; the same on all ranks, as after a reduction."""
    for index, parameter in enumerate(params.values()):
        generator = torch.Generator().manual_seed(1000 * step + index)
        gradient = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.grad = gradient if parameter.requires_grad else None


def group_of(params, names, **settings):
    return {"params": [(name, params[name]) for name in names], **settings}


def partition(params, make, names=None, **keywords):
    """One group of matrices and one of vectors."""
    chosen = [[n for n in kind if n in (names or params)] for kind in (MATRICES, VECTORS)]
    groups = [group_of(params, kind, optimizer=make, lr=lr) for kind, lr in zip(chosen, LRS, strict=True) if kind]
    return OwnerPartition(groups, dist.group.WORLD, **keywords)


def plain(params, make, names=None):
    chosen = [[n for n in kind if n in (names or params)] for kind in (MATRICES, VECTORS)]
    return make([{"params": [params[n] for n in kind], "lr": lr} for kind, lr in zip(chosen, LRS, strict=True) if kind])


def assert_equal(found, expected):
    for name in expected:
        assert torch.equal(found[name], expected[name]), name


def in_small_buckets(make_name):
    with patch.object(zero, "BUCKET_BYTES", 150):
        return follow_torch(make_name)


def follow_torch(make_name, steps=4):
    """Steps under a schedule; returns the names that this rank has state of."""
    ours, theirs = parameters(), parameters()
    optimizer, reference = partition(ours, OPTIMIZERS[make_name]), plain(theirs, OPTIMIZERS[make_name])
    schedules = [torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.7**step) for o in (optimizer, reference)]
    for step in range(steps):
        for params, either, schedule in zip((ours, theirs), (optimizer, reference), schedules, strict=True):
            set_gradients(params, step)
            either.step()
            either.zero_grad()
            schedule.step()
        assert_equal(ours, theirs)
        assert not any(each.plain.grad is not None for each in optimizer._mine.values())
    assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in reference.param_groups]
    return [name for name, parameter in ours.items() if optimizer.state[parameter]]


@pytest.mark.parametrize(
    ("function", "make_name"), [*((follow_torch, name) for name in OPTIMIZERS), (in_small_buckets, "AdamW")]
)
def test_any_torch_optimizer_with_groups_and_a_schedule(ranks, function, make_name):
    owned = ranks(3, function, make_name)
    assert sorted(name for names in owned for name in names) == sorted(SHAPES)  # each parameter's state is on one rank
    assert all(owned)


def single():
    params, reference = parameters(["a"]), parameters(["a"])
    optimizer, expected = partition(params, AdamW), plain(reference, AdamW)
    for step in range(3):
        for either, of in ((params, optimizer), (reference, expected)):
            set_gradients(either, step)
            of.step()
    assert_equal(params, reference)
    optimizer.load_state_dict(optimizer.state_dict())
    return len(optimizer._mine)


def test_ranks_that_own_nothing(ranks):
    assert ranks(4, single) == [1, 0, 0, 0]


def change_under_way():
    """Freeze and unfreeze, add a group, move a parameter, and step by a closure; beside a plain optimizer."""
    ours, theirs = parameters(), parameters()
    optimizer, reference = partition(ours, AdamW, "abcd"), plain(theirs, AdamW, "abcd")
    before = dict(optimizer._owner)
    for step in range(8):
        if step in (2, 4):  # "a" and "b" rest for two steps
            for params in (ours, theirs):
                params["a"].requires_grad_(step == 4)
                params["b"].requires_grad_(step == 4)
        if step == 3:
            optimizer.add_param_group(group_of(ours, "ef", optimizer=AdamW, lr=0.3, weight_decay=0.5))
            reference.add_param_group({"params": [theirs["e"], theirs["f"]], "lr": 0.3, "weight_decay": 0.5})
        if step == 5:  # as FSDP does when it pins offloaded memory
            ours["c"].data = ours["c"].detach().clone()
        calls = []
        for params, either in ((ours, optimizer), (theirs, reference)):

            def closure(params=params, step=step, calls=calls):
                assert torch.is_grad_enabled()
                set_gradients(params, step)
                calls.append(step)
                return f"loss {step}"

            assert either.step(closure) == f"loss {step}"
        assert calls == [step, step]
        assert_equal(ours, theirs)
    assert all(optimizer._owner[parameter] == owner for parameter, owner in before.items())
    steps = {name: optimizer.state[p]["step"].item() for name, p in ours.items() if optimizer.state[p]}
    return steps, sum(p.numel() for p in optimizer._mine)


def test_freezing_unfreezing_an_added_group_and_closures(ranks):
    results = ranks(3, change_under_way)
    steps = {name: step for found, _ in results for name, step in found.items()}
    assert steps == {"a": 6, "b": 6, "c": 8, "d": 8, "e": 5, "f": 5}
    sizes = [size for _, size in results]
    assert max(sizes) - min(sizes) <= 9  # the added group went to those who had less


def frozen_is_not_sent():
    params = parameters("ab")
    optimizer = partition(params, AdamW)
    params["a"].requires_grad_(False)
    sent = []
    start = optimizer._start
    optimizer._start = lambda bucket: (sent.extend(bucket), start(bucket))[1]
    set_gradients(params, 0)
    optimizer.step()
    return len(sent) == 1 and sent[0] is params["b"]


def test_what_is_frozen_is_not_sent(ranks):
    assert ranks(2, frozen_is_not_sent) == [True, True]


def export(make_name, folder):
    """Two steps, the full state to all and to rank 1, then a plain optimizer goes on beside."""
    params = parameters()
    optimizer = partition(params, OPTIMIZERS[make_name])
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    to_all, to_one = optimizer.state_dict(), optimizer.state_dict(rank=1)
    if dist.get_rank() != 1:
        assert to_one == {}
    else:
        torch.save((to_one, {name: p.data for name, p in params.items()}), folder / "exported.pt")
        assert repr(to_one) == repr(to_all)
    copies = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    reference = plain(copies, OPTIMIZERS[make_name])
    reference.load_state_dict(to_all)
    for step in range(2, 5):
        for either, of in ((params, optimizer), (copies, reference)):
            set_gradients(either, step)
            of.step()
        assert_equal(params, copies)
    return {name: p.detach() for name, p in params.items()}


def take_up(make_name, folder):
    """Load the export of other ranks into a partition over these."""
    state, values = torch.load(folder / "exported.pt")
    params = {name: Parameter(values[name].clone()) for name in SHAPES}
    optimizer = partition(params, OPTIMIZERS[make_name])
    optimizer.load_state_dict(state)
    for step in range(2, 5):
        set_gradients(params, step)
        optimizer.step()
    return {name: p.detach() for name, p in params.items()}


@pytest.mark.parametrize("make_name", ["AdamW", "SGD"])
def test_exported_state_goes_on_in_plain_torch_and_at_another_world_size(ranks, tmp_path, make_name):
    expected = ranks(4, export, make_name, tmp_path)[0]
    for result in ranks(2, take_up, make_name, tmp_path):
        assert_equal(result, expected)


def follow_torch_where_another_axis_cuts(names, make, needs_whole):
    """Ranks 0 and 2 have the upper halves of the parameters, 1 and 3 the lower ones; each pair is a partition."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "tp"))
    cuts = {"a": Shard(0), "b": Shard(0), "c": Shard(0), "d": Shard(1), "f": Replicate()}

    def cut(name, value):
        return distribute_tensor(value, mesh, [Replicate(), cuts[name]])

    ours = {name: Parameter(cut(name, parameter.detach())) for name, parameter in parameters(names).items()}
    theirs = parameters(names)

    def partition_of(params):
        group = group_of(params, names, optimizer=make, lr=0.1, whole=needs_whole)
        return OwnerPartition([group], mesh.get_group("replicas"))

    optimizer, reference = partition_of(ours), make(theirs.values(), lr=0.1)
    for step in range(8):
        for params in (ours, theirs):  # one rests for two steps
            params["a"].requires_grad_(step not in (4, 5))
        if step == 3:  # another partition goes on from the export, which is the plain optimizer's own
            exported = optimizer.state_dict()
            for index, state in reference.state_dict()["state"].items():
                assert_equal(exported["state"][index], state)
            optimizer = partition_of(ours)
            optimizer.load_state_dict(exported)
        set_gradients(theirs, step)
        for name in ours:
            ours[name].grad = None if theirs[name].grad is None else cut(name, theirs[name].grad)
        optimizer.step()
        reference.step()
        assert_equal({name: parameter.full_tensor() for name, parameter in ours.items()}, theirs)
    return {name: sum(t.numel() for t in optimizer.state[p].values()) for name, p in ours.items()}


@pytest.mark.parametrize(
    ("names", "make", "needs_whole", "state"),
    [
        ("abcdf", AdamW, False, {"a": 2 * 12 + 1, "b": 2 * 3 + 1, "c": 2 * 9 + 1, "d": 2 * 2 + 1, "f": 2 * 9 + 1}),
        ("acdf", Muon, True, {"a": 24, "c": 18, "d": 4, "f": 9}),
    ],
)
def test_parameters_that_another_axis_cuts(ranks, names, make, needs_whole, state):
    results = ranks(4, follow_torch_where_another_axis_cuts, names, make, needs_whole)
    assert results[0] == results[1]
    assert results[2] == results[3]
    assert {name: results[0][name] + results[2][name] for name in names} == state


def place_state_after_an_update():
    """Whether numbers of elements and of rows find their place, after the gathered memory is released."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("ep", "tp"))
    numbers = torch.arange(4 * 6 * 5, dtype=torch.float64).reshape(4, 6, 5)
    parameter = Parameter(distribute_tensor(numbers, mesh, [Shard(0), Shard(1)]))
    parameter.grad = torch.zeros_like(parameter)
    owned = OwnedParameter(parameter, rounds_to=None, updated_whole=True)
    owned.lend()
    seen = owned.plain.detach().clone()  # the matrices of this rank's experts, each whole
    owned.take_back()
    rows = numbers.sum(dim=-1)
    found = [owned.placed(each).full_tensor() for each in (seen, seen.sum(dim=-1))]
    return [torch.equal(*pair) for pair in zip(found, (numbers, rows), strict=True)] + [
        torch.equal(owned.taken_from(numbers), seen),
        torch.equal(owned.taken_from(rows), seen.sum(dim=-1)),
    ]


def test_state_of_experts_whose_matrices_another_axis_cuts(ranks):
    assert ranks(4, place_state_after_an_update) == [[True] * 4] * 4


def of_groups(state_dict, chosen):
    """What an optimizer over only the chosen groups, in this order, loads."""
    state, groups, first = {}, [], 0
    for number in chosen:
        group = state_dict["param_groups"][number]
        state |= {at: state_dict["state"].get(i, {}) for at, i in enumerate(group["params"], start=first)}
        groups.append({**group, "params": list(range(first, first + len(group["params"])))})
        first += len(group["params"])
    return {"state": {i: values for i, values in state.items() if values}, "param_groups": groups}


def export_muon():
    """Groups of two optimizers, the second group Muon's: each torch optimizer takes its part."""
    params = parameters()
    settings = {"params": [(n, params[n]) for n in VECTORS], "optimizer": AdamW, "lr": 0.02}
    groups = [settings, group_of(params, MATRICES, optimizer=Muon, lr=0.1)]
    optimizer = OwnerPartition(groups, dist.group.WORLD)
    set_gradients(params, 0)
    optimizer.step()
    copies = {name: Parameter(p.detach().clone()) for name, p in params.items()}
    muon, adamw = Muon([copies[n] for n in MATRICES]), AdamW([copies[n] for n in VECTORS])
    state = optimizer.state_dict()
    muon.load_state_dict(of_groups(state, [1]))
    adamw.load_state_dict(of_groups(state, [0]))
    for step in (1, 2):
        set_gradients(params, step)
        set_gradients(copies, step)
        for either in (optimizer, muon, adamw):
            either.step()
        assert_equal(params, copies)


def test_two_optimizers_in_one_partition(ranks):
    ranks(3, export_muon)


def rounded(ranks_dtype):
    """Masters against an emulation: a plain optimizer over masters, its results rounded."""
    params, masters = parameters(), parameters()
    optimizer, reference = partition(params, AdamW, broadcast_dtype=ranks_dtype), plain(masters, AdamW)
    for step in range(4):
        assert_equal(params, {name: master.detach().to(ranks_dtype).double() for name, master in masters.items()})
        set_gradients(params, step)
        set_gradients(masters, step)
        optimizer.step()
        reference.step()
    names = {parameter: name for name, parameter in params.items()}
    assert_equal(
        {names[p]: tensor for p, tensor in optimizer.owned().items()},
        {names[p]: masters[names[p]] for p in optimizer.owned()},
    )


def test_owners_keep_what_they_send_rounded(ranks):
    ranks(3, rounded, torch.bfloat16)


def model_state(params):
    return {name: p.detach().clone() for name, p in params.items()}


def set_model(params, values):
    with torch.no_grad():
        for name, parameter in params.items():
            parameter.copy_(values[name])


def masters_survive(folder, order):
    """Three steps, save model and optimizer, load them into a new partition over other weights, three more steps."""
    params = parameters()
    optimizer = partition(params, AdamW, broadcast_dtype=torch.bfloat16)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    state, values = optimizer.state_dict(), model_state(params)
    others = {name: Parameter(torch.full_like(p, 0.3)) for name, p in params.items()}
    loaded = partition(others, AdamW, broadcast_dtype=torch.bfloat16)
    for what in order:
        if what == "model":
            set_model(others, values)
        else:
            loaded.load_state_dict(deepcopy(state))  # torch copies no state
    assert repr(loaded.state_dict()) == repr(state)
    for step in range(3, 6):
        for of, either in ((params, optimizer), (others, loaded)):
            set_gradients(of, step)
            either.step()
        assert_equal(others, params)
    if dist.get_rank() == 0:
        torch.save((state, values), folder / "rounded.pt")
    return model_state(params)


def take_up_masters(folder):
    state, values = torch.load(folder / "rounded.pt")
    params = {name: Parameter(value.clone()) for name, value in values.items()}
    optimizer = partition(params, AdamW, broadcast_dtype=torch.bfloat16)
    optimizer.load_state_dict(state)
    for step in range(3, 6):
        set_gradients(params, step)
        optimizer.step()
    return model_state(params)


@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")])
def test_masters_are_saved_and_loaded(ranks, tmp_path, order):
    expected = ranks(3, masters_survive, tmp_path, order)[0]
    for found in ranks(2, take_up_masters, tmp_path):
        assert_equal(found, expected)


def weights_from_outside():
    """A state without masters, and weights that are written after it was loaded, in the middle of a run."""
    params, masters = parameters(), parameters()
    reference = plain(masters, AdamW)
    for step in range(2):
        set_gradients(masters, step)
        reference.step()
    set_model(params, model_state(masters))
    optimizer = partition(params, AdamW, broadcast_dtype=torch.bfloat16)
    set_model(params, model_state(masters))
    optimizer.load_state_dict(deepcopy(reference.state_dict()))  # torch copies no state
    for step in range(2, 6):
        if step == 4:
            changed = {name: p.detach() + 1.0 if name in "ab" else p.detach() for name, p in params.items()}
            set_model(params, changed)
            set_model(masters, {name: changed[name] if name in "ab" else p.detach() for name, p in masters.items()})
        for of, either in ((params, optimizer), (masters, reference)):
            set_gradients(of, step)
            either.step()
        assert_equal(params, {name: m.detach().bfloat16().double() for name, m in masters.items()})


def test_masters_follow_weights_that_are_written_from_outside(ranks):
    ranks(3, weights_from_outside)


class Counting(SGD):
    """Keeps a state of its own in its group, as schedule-free optimizers do, and wants an argument."""

    def step(self, closure=None, *, scale):
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad.mul_(scale * group["steps"])
        return super().step(closure)


def as_oss():
    """The calls of fairscale's OSS, beside plain torch."""
    ours, theirs = parameters(), parameters()
    optimizer = OwnerPartition(ours.values(), optim=torch.optim.Adam, lr=0.1, betas=(0.8, 0.9))
    reference = torch.optim.Adam(theirs.values(), lr=0.1, betas=(0.8, 0.9))
    assert optimizer.defaults == reference.defaults
    schedules = [
        torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.2, total_steps=8, cycle_momentum=True)
        for o in (optimizer, reference)
    ]
    for step in range(4):
        set_gradients(ours, step)
        set_gradients(theirs, step)
        norm = torch.nn.utils.clip_grad_norm_(theirs.values(), 0.7, 3.0)
        torch.testing.assert_close(optimizer.clip_grad_norm(0.7, 3.0), norm, rtol=1e-14, atol=0)
        for name, parameter in ours.items():  # equal but for the order of sums
            torch.testing.assert_close(parameter.grad, theirs[name].grad, rtol=1e-14, atol=0)
            parameter.grad.copy_(theirs[name].grad)
        for either, schedule in zip((optimizer, reference), schedules, strict=True):
            either.step()
            schedule.step()
        assert_equal(ours, theirs)
        assert optimizer.param_groups[0]["betas"] == reference.param_groups[0]["betas"] != (0.8, 0.9)
    optimizer.zero_grad()
    assert optimizer.clip_grad_norm(1.0) == 0.0  # as torch's of no gradients
    return sum(bool(optimizer.state[p]) for p in ours.values())


def test_the_calls_of_fairscale(ranks):
    assert sum(ranks(3, as_oss)) == len(SHAPES)


FILTERS = {
    "matrices": lambda params: [p for p in params if p.ndim == 2],
    "nothing of this rank": lambda params: params if dist.get_rank() != 1 else [],
    "nothing at all": lambda params: [],
    "an iterator": lambda params: (p for p in params if p.numel() > 5),
}


def clip_what_a_filter_chooses(kind, norm_type):
    """The norm is that of the chosen parameters, and all gradients are scaled, as in fairscale; beside plain torch."""
    ours, theirs = parameters(), parameters()
    ours["d"].requires_grad_(False)  # frozen: without a gradient
    theirs["d"].requires_grad_(False)
    optimizer = OwnerPartition(ours.values(), optim=torch.optim.Adam, lr=0.1)
    names = {parameter: name for name, parameter in ours.items()}
    seen = []
    for step, max_norm in enumerate((0.05, 1e3)):  # scales, and leaves as they are
        set_gradients(ours, step)
        set_gradients(theirs, step)

        def choose(params):
            chosen = list(FILTERS[kind](params))
            seen.extend(params)
            return chosen

        norm = optimizer.clip_grad_norm(max_norm, norm_type, filter_params_fn=choose)
        by_owner = [None] * dist.get_world_size()
        dist.all_gather_object(by_owner, [names[p] for p in FILTERS[kind](seen)])
        chosen = {name for of_rank in by_owner for name in of_rank}
        expected = torch.nn.utils.get_total_norm([theirs[name].grad for name in sorted(chosen)], float(norm_type))
        torch.testing.assert_close(norm, expected.double(), rtol=1e-14, atol=0)
        torch.nn.utils.clip_grads_with_norm_(theirs.values(), max_norm, expected)
        for name in ours.keys() - {"d"}:
            torch.testing.assert_close(ours[name].grad, theirs[name].grad, rtol=1e-14, atol=0)
    return sorted({names[p] for p in seen}), norm.item()


@pytest.mark.parametrize(
    ("kind", "norm_type"),
    [*(("matrices", norm_type) for norm_type in (1, 2.0, 3.5, "inf")), *((kind, 2.0) for kind in list(FILTERS)[1:])],
)
def test_the_norm_of_what_a_filter_chooses(ranks, kind, norm_type):
    results = ranks(3, clip_what_a_filter_chooses, kind, norm_type)
    assert len({norm for _, norm in results}) == 1
    assert sorted(name for names, _ in results for name in names) == list("abcef")  # each was shown to its owner alone


def consolidate(folder):
    """fairscale's two calls, only the first by all ranks; then one process goes on in plain Adam, and loads back."""
    ours, theirs = parameters(), parameters()
    optimizer = OwnerPartition(ours.values(), optim=torch.optim.Adam, lr=0.1)
    reference = torch.optim.Adam(theirs.values(), lr=0.1)
    last = dist.get_world_size() - 1
    for recipient in (0, last, -1):
        for params, either in ((ours, optimizer), (theirs, reference)):
            set_gradients(params, recipient + 7)
            either.step()
        optimizer.consolidate_state_dict(recipient_rank=recipient)
        if recipient in (dist.get_rank(), -1):
            found, expected = optimizer.state_dict(), reference.state_dict()
            assert found["state"].keys() == expected["state"].keys()
            for number, state in expected["state"].items():
                assert_equal(found["state"][number], state)
            plain_adam = torch.optim.Adam(parameters().values(), lr=0.5)
            plain_adam.load_state_dict(found)
            assert repr(plain_adam.state_dict()) == repr(expected)
        else:
            with pytest.raises(RuntimeError, match="consolidate_state_dict"):
                optimizer.state_dict()
    torch.save(optimizer.state_dict(), folder / f"{dist.get_rank()}.pt")
    set_gradients(ours, 20)
    optimizer.step()
    with pytest.raises(RuntimeError, match="after the last step"):
        optimizer.state_dict()
    loaded_values = parameters()
    set_model(loaded_values, model_state(theirs))
    loaded = OwnerPartition(loaded_values.values(), optim=torch.optim.Adam, lr=0.5)
    loaded.load_state_dict(torch.load(folder / f"{dist.get_rank()}.pt"))
    for step in (20, 21):
        for params, either in ((loaded_values, loaded), (theirs, reference)):
            set_gradients(params, step)
            either.step()
        assert_equal(loaded_values, theirs)


@pytest.mark.parametrize("n", [2, 3])
def test_a_consolidated_state_by_the_names_of_fairscale(ranks, tmp_path, n):
    ranks(n, consolidate, tmp_path)


def arguments_pass():
    ours, theirs = parameters(), parameters()
    optimizer = OwnerPartition(list(ours.values()), optim=Counting, lr=0.1)
    reference = Counting(theirs.values(), lr=0.1)
    for step in range(3):
        for params, either in ((ours, optimizer), (theirs, reference)):
            set_gradients(params, step)
            either.step(scale=0.5)
        assert_equal(ours, theirs)
    assert optimizer.param_groups[0]["steps"] == 3


def test_arguments_of_a_step_and_what_it_keeps_in_its_group(ranks):
    ranks(4, arguments_pass)


def own_optimizers():
    """A group with an optimizer of its own takes nothing from the others' settings, also in the middle of a run."""
    params = parameters()
    optimizer = OwnerPartition([group_of(params, VECTORS)], optim=AdamW, lr=0.5, eps=1e-3)
    optimizer.add_param_group(group_of(params, "ac", optimizer=Muon))
    optimizer.add_param_group(group_of(params, "d"))
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 1e-3, 0.5]
    assert [group["eps"] for group in optimizer.param_groups] == [1e-3, 1e-7, 1e-3]
    assert optimizer.defaults.keys() == {"lr", "weight_decay", "eps"}  # neither betas nor momentum: not all have them
    with pytest.raises(ValueError, match="learning rate"):
        OwnerPartition(parameters().values(), optim=AdamW, lr=-1.0)


def test_groups_with_optimizers_of_their_own(ranks):
    ranks(2, own_optimizers)
