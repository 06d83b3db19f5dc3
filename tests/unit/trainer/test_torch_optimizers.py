"""Classes of torch optimizers as rules, against the same classes alone: bits, state, what continues from a state."""

import pytest
import torch
from torch import nn
from torch.nn import Parameter

from configs.errors import ConfigError
from configs.own_code import admit
from configs.schema import Optimizer, ParameterGroup
from trainer.optimizers.build import build_optimizer, optimizer_state, set_lr
from trainer.optimizers.from_torch import rule_over

SHAPES = {"embed.weight": (7, 4), "blocks.0.up.weight": (6, 4), "blocks.0.norm.weight": (4,), "late.weight": (3, 5)}
STEPS = 24
BETAS = {"betas": (0.8, 0.95), "eps": 1e-6}
ALONE = {
    "Adadelta": {"rho": 0.8, "eps": 1e-6},
    "Adagrad": {"initial_accumulator_value": 0.1, "eps": 1e-6},
    "Adamax": BETAS,
    "ASGD": {"t0": 4.0},
    "NAdam": {**BETAS, "decoupled_weight_decay": True, "momentum_decay": 0.01},
    "RAdam": BETAS,
    "RMSprop": {"eps": 1e-6, "centered": True, "momentum": 0.9},
    "Rprop": {"etas": (0.6, 1.1)},
    "SGD": {"momentum": 0.9, "dampening": 0.5},
    "CountingInGroup": {},
}
"""Classes, and their arguments beside lr and weight_decay."""


def class_of(kind: str) -> type[torch.optim.Optimizer]:
    return globals().get(kind) or getattr(torch.optim, kind)


def config_of(kind: str) -> Optimizer:
    name = f"{class_of(kind).__module__}:{kind}"
    admit(name, "optimizer.name")
    keys = {key: ALONE[kind][key] for key in ("betas", "eps") if key in ALONE[kind]}
    options = {key: value for key, value in ALONE[kind].items() if key not in keys}
    if "betas" in keys:
        keys["betas"] = list(keys["betas"])
    if "etas" in options:
        options["etas"] = list(options["etas"])  # as in TOML
    groups = [ParameterGroup(pattern="embed*", weight_decay=0.0, lr_scale=2.0)]
    decay = 0.0 if kind == "Rprop" else 0.1
    return Optimizer(name=name, lr=0.01, weight_decay=decay, options=options, groups=groups, **keys)


def parameters_of() -> dict[str, Parameter]:
    draws = torch.Generator().manual_seed(1)
    return {name: Parameter(torch.randn(shape, generator=draws).double()) for name, shape in SHAPES.items()}


def lr_of(step: int) -> float:
    return 0.01 * (1 - step / 40)


def set_gradients(parameters: dict[str, Parameter], step: int) -> None:
    """Those of a step; one parameter has its first ones late."""
    draws = torch.Generator().manual_seed(100 + step)
    for name, parameter in parameters.items():
        gradient = torch.randn(parameter.shape, generator=draws).double()
        parameter.grad = None if name.startswith("late") and step < 3 else gradient


def alone(kind: str) -> dict[str, Parameter]:
    """The parameters after `STEPS` updates by the class itself."""
    parameters = parameters_of()
    has_decay = kind != "Rprop"
    groups = []
    for name, parameter in parameters.items():
        decay = 0.1 if parameter.ndim > 1 and not name.startswith("embed") else 0.0
        groups.append({"params": [parameter], **({"weight_decay": decay} if has_decay else {})})
    optimizer = class_of(kind)(groups, lr=0.01, **ALONE[kind])
    for step in range(STEPS):
        set_gradients(parameters, step)
        for group, name in zip(optimizer.param_groups, parameters, strict=True):
            group["lr"] = lr_of(step) * (2.0 if name.startswith("embed") else 1.0)
        optimizer.step()
    return parameters


def trained(kind: str, resumes_at: tuple[int, ...] = ()) -> dict[str, Parameter]:
    """The parameters after the same steps in Keel; at `resumes_at`, a new optimizer takes the state of the last one."""
    config = config_of(kind)
    parameters = parameters_of()
    optimizer = build_optimizer(config, list(parameters.items()))
    for step in range(STEPS):
        if step in resumes_at:
            state = optimizer_state(optimizer, parameters)
            parameters = {name: Parameter(p.detach().clone()) for name, p in parameters.items()}
            optimizer = build_optimizer(config, list(parameters.items()))
            for name, tensor in optimizer_state(optimizer, parameters).items():
                tensor.copy_(state[name])
        set_gradients(parameters, step)
        set_lr(optimizer, lr_of(step))
        optimizer.step()
    return parameters


@pytest.mark.parametrize("kind", ALONE)
def test_it_computes_the_bits_of_the_class_alone(kind):
    expected = alone(kind)
    for resumes_at in ((), (0, 2, 3, 11)):
        found = trained(kind, resumes_at)
        for name, parameter in expected.items():
            torch.testing.assert_close(found[name], parameter, rtol=0, atol=0)
            assert not torch.equal(parameter, parameters_of()[name])


@pytest.mark.parametrize("kind", ALONE)
def test_its_state_is_the_classs_own_and_whether_it_has_begun(kind):
    parameters = parameters_of()
    optimizer = build_optimizer(config_of(kind), list(parameters.items()))
    before = {name: tensor.data_ptr() for name, tensor in optimizer_state(optimizer, parameters).items()}
    theirs = class_of(kind)(parameters_of().values(), lr=0.01, **ALONE[kind])
    for p in theirs.param_groups[0]["params"]:
        p.grad = torch.ones_like(p)
    theirs.step()
    set_gradients(parameters, step=3)
    optimizer.step()
    state = optimizer_state(optimizer, parameters)
    assert {name: tensor.data_ptr() for name, tensor in state.items()} == before  # what a checkpoint loads into
    for name, p in zip(parameters, theirs.param_groups[0]["params"], strict=True):
        own = {key: (value.dtype, value.shape) for key, value in theirs.state[p].items() if value is not None}
        own["started"] = (torch.float32, torch.Size(()))
        own |= {"group_step": (torch.int64, torch.Size(()))} if "step" in theirs.param_groups[0] else {}
        prefix = f"optimizer.{name}."
        found = {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}
        assert {key: (value.dtype, value.shape) for key, value in found.items()} == own
        assert found["started"] == 1.0


class CountingInGroup(torch.optim.Optimizer):
    """Counts steps in its groups, and keeps a number as a tensor of one element."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["product"] = torch.ones(1)
                state["product"] *= 0.9
                p.sub_(p.grad * state["product"].item() * (group["lr"] / group["step"]))


class Counting(torch.optim.Optimizer):
    """Keeps a Python number, and a new tensor at each update, as many classes outside of torch do."""

    def __init__(self, params, lr=1e-3, weight_decay=0.0):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["step"] = 0
                    state["mean"] = p.grad.clone()
                    state["nothing"] = None
                state["step"] += 1
                state["mean"] = state["mean"] * 0.9 + p.grad * 0.1
                p.sub_(state["mean"] * (group["lr"] / state["step"]))


def test_numbers_and_new_tensors_are_kept():
    name = f"{__name__}:Counting"
    admit(name, "optimizer.name")
    config = Optimizer(name=name, lr=0.01, weight_decay=0.0)
    weight, own = Parameter(torch.ones(4)), Parameter(torch.ones(4))
    keel = build_optimizer(config, [("weight", weight)])
    alone = Counting([own], lr=0.01)
    for step in range(3):
        weight.grad = torch.arange(4.0) + step
        own.grad = weight.grad.clone()
        keel.step()
        alone.step()
    assert torch.equal(weight, own)
    state = optimizer_state(keel, {"weight": weight})
    assert state["optimizer.weight.step"] == 3
    assert torch.equal(state["optimizer.weight.mean"], alone.state[own]["mean"])


def test_frozen_parameters_have_no_state_and_stay():
    config = config_of("Adagrad").model_copy(update={"groups": [ParameterGroup(pattern="embed*", freeze=True)]})
    parameters = parameters_of()
    parameters["embed.weight"].requires_grad_(False)
    optimizer = build_optimizer(config, list(parameters.items()))
    set_gradients(parameters, step=3)
    optimizer.step()
    assert not any("embed" in name for name in optimizer_state(optimizer, parameters))
    assert torch.equal(parameters["embed.weight"], parameters_of()["embed.weight"])
    assert not torch.equal(parameters["late.weight"], parameters_of()["late.weight"])


def test_a_state_that_changes_later_is_one_message():
    class Late(Counting):
        def step(self, closure=None):
            super().step()
            for state in self.state.values():
                if state["step"] == 3:
                    state["slow"] = state["mean"].clone()

    rule = rule_over(Late)(Optimizer(name="late:Late", lr=0.01))
    weight = Parameter(torch.ones(4))
    group = {"params": [weight], "lr": 0.01, "lr_scale": 1.0, "weight_decay": 0.0, "freeze": False}
    optimizer = rule.build([group])
    weight.grad = torch.ones(4)
    optimizer.step()
    optimizer.step()
    with pytest.raises(
        ConfigError, match="keeps mean, slow, step of a parameter now, and kept mean, step of a tiny one"
    ):
        optimizer.step()


def test_no_memory_stays_with_the_class_between_updates():
    module = nn.Linear(4, 4)
    admit("torch.optim:Adamax", "optimizer.name")
    optimizer = build_optimizer(Optimizer(name="torch.optim:Adamax", lr=0.01), list(module.named_parameters()))
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    plain = [p for group in optimizer._inner.param_groups for p in group["params"]]
    assert [p.numel() for p in plain] == [0, 0]
    assert not optimizer._inner.state
