"""Finds where a model computes in float32 though its parameters and activations are float64.

Many families of transformers cast to float32 in their norms or routers, whatever type they are given. What they compute
there depends on the order of sums to float32's round-off, on any mesh: that is no fault of a technique. How far this
round-off carries is measured: the same training from weights that are off by as much.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.module_tracker import ModuleTracker

from configs.load import load
from models import build_model
from parallelisms.init import materialize
from scripts.parity_compare import difference_of
from scripts.parity_reference import Trajectory, batches, plain_trajectory


class Casts(TorchDispatchMode):
    """Notes the module of each operation that turns float64 into float32."""

    def __init__(self, tracker: ModuleTracker) -> None:
        super().__init__()
        self.tracker = tracker
        self.modules: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {each.dtype for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)}
        made = {each.dtype for each in tree_leaves(out) if isinstance(each, torch.Tensor)}
        if torch.float64 in given and torch.float32 in made:
            self.modules.append(max(self.tracker.parents, key=len))
        return out


def own_float32(config_name: str, overrides: tuple[str, ...]) -> str:
    """The first module in which a job's model casts float64 to float32, on one process; "" if there is none."""
    assert dist.get_world_size() == 1
    config = load(config_name, overrides, world_size=1).config
    with torch.device("meta"):
        model = build_model(config.model).to(torch.float64)
    materialize(model, torch.device("cpu"), config.training.seed)
    tracker = ModuleTracker()
    with tracker, Casts(tracker) as casts, torch.no_grad():
        model(next(iter(batches(config, 0, 1)))[0].tokens)
    return casts.modules[0].partition(".")[2] if casts.modules else ""


_ROUND_OFF = 1e-7
"""A relative change of weights, about that of float32's last bit (2**-23)."""
_DRAWS = 3
"""Changes in random directions, of which the largest effect counts: those of two differ by up to 10 times."""


def effect_of_round_off(config_name: str, overrides: tuple[str, ...], path: str) -> tuple[float, ...]:
    """How far loss, norm, gradients and weights of the reference at `path` move if its initial weights move by 1e-7.

    Some small models amplify it: a recurrence, or attention of large scores (1e-4 in the gradients of CPM-Ant).
    """
    assert dist.get_world_size() == 1
    reference = Trajectory(**torch.load(path))
    moved = [plain_trajectory(config_name, overrides, _ROUND_OFF, draw) for draw in range(_DRAWS)]
    effects = [difference_of(each, reference).values for each in moved]
    return tuple(map(max, zip(*effects, strict=True)))
