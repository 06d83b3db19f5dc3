"""Any `torch.optim.Optimizer` that updates each element by itself, as a rule: `optimizer.name = "torch.optim:Adamax"`.

The class is given plain tensors, this rank's parts of the parameters, so it knows nothing of meshes. What it keeps of a
parameter is found by two updates of a tiny one. Then it is allocated ahead, like the state of every rule, and lent to
the class for each update. Only the class knows the values with which its state begins. So it is lent none of a
parameter that has not been updated, and what it creates then is copied. Some classes count steps in their groups; the
count is kept with each parameter, since meshes cut groups.

`elementwise.py` checks that the class computes the same on parts as on the whole, and keeps nothing elsewhere.
"""

from collections.abc import Collection, Iterable, Sequence
from functools import cached_property
from inspect import signature
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer as TorchOptimizer

from configs.errors import ConfigError
from parallelisms.ranks import local_part
from trainer.optimizers import rule
from trainer.optimizers.training import TrainingOptimizer

STARTED = "started"
"""Key of the number that tells whether a parameter has been updated: 1 or 0."""
NOT_ELEMENTWISE = "does not update each element by itself"
REMEDY = (
    "Ranks hold parts of matrices, so the mesh would change the run; take another optimizer, or write a Rule with "
    "hidden_matrices_only (docs/own_models.md), which gets whole ones"
)
_COUNT = "group_"
"""What the keys of such counts begin with; the rest is the class's name for it."""
_OF_GROUPS = ("lr", "weight_decay")
"""Those that differ between groups, or steps."""
_TINY = (2, 3, 4, 5)
"""Sizes of a tiny parameter, all different."""


class FromTorch(TrainingOptimizer):
    """An optimizer of torch over this rank's part of every parameter."""

    def __init__(self, groups: list[dict[str, Any]], rule: "TorchRule") -> None:
        """Create the optimizer without its state; groups with "freeze" are not updated."""
        super().__init__(groups, {"lr": rule.config.lr})
        self._rule = rule
        trained = [p for group in self.param_groups if not group["freeze"] for p in group["params"]]
        self._plain = {parameter: Parameter(local_part(parameter.detach())) for parameter in trained}
        self._inner = rule.instance([self._plain_group(group) for group in self.param_groups])
        self._at_first = [dict(group) for group in self._inner.param_groups]

    def _plain_group(self, group: dict[str, Any]) -> dict[str, Any]:
        plain = [self._plain[parameter] for parameter in self._trained(group)]
        return {"params": plain, **self._rule.settings(group)}

    def take_what_exists(self) -> None:
        """Take over the state that the class creates before the first update, as Adagrad does."""
        for parameter, plain in self._plain.items():
            if plain in self._inner.state:
                self._take_back(parameter, {})
            _release(plain)

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Update the parameters that have a gradient; `closure` is not supported."""
        trained = [parameter for parameter in self._plain if parameter.grad is not None]
        has_started = {parameter: bool(self.state[parameter][STARTED]) for parameter in trained}
        for parameter in trained:
            if not has_started[parameter]:  # by itself: its new state is in memory twice
                self._update([parameter])
        self._update([parameter for parameter in trained if has_started[parameter]])  # none: steps are counted still
        self._keep_counts()

    def _update(self, parameters: Collection[Parameter]) -> None:
        self._set_groups()
        lent = {parameter: self._lend(parameter) for parameter in parameters}
        self._inner.step()
        for parameter, state in lent.items():
            self._take_back(parameter, state)

    def _set_groups(self) -> None:
        """Give the groups of the class this step's settings, and their counts before this step."""
        for group, inner, at_first in zip(self.param_groups, self._inner.param_groups, self._at_first, strict=True):
            inner.clear()
            inner.update(at_first | self._rule.settings(group))
            for parameter in self._trained(group)[:1]:
                counts = self._counts(parameter)
                inner.update({name: int(count) for name, count in counts.items() if count})

    def _keep_counts(self) -> None:
        for group, inner in zip(self.param_groups, self._inner.param_groups, strict=True):
            for parameter in self._trained(group):
                for name, count in self._counts(parameter).items():
                    count.fill_(inner[name])

    def _trained(self, group: dict[str, Any]) -> list[Parameter]:
        return [parameter for parameter in group["params"] if parameter in self._plain]

    def _counts(self, parameter: Parameter) -> dict[str, Tensor]:
        """The counts of steps of a parameter's group, by the class's name."""
        return {name: self.state[parameter][_COUNT + name] for name in self._rule.counts(parameter)}

    def _lend(self, parameter: Parameter) -> dict[str, Any]:
        """Give the class a parameter, whose memory FSDP may have moved, its gradient and state; returns the state."""
        assert parameter.grad is not None
        plain = self._plain[parameter]
        plain.data = local_part(parameter.detach())
        plain.grad = local_part(parameter.grad)
        own = self.state[parameter]
        if not own[STARTED]:
            return {}
        kinds = {key: type(value) for key, value in self._rule.kept(parameter).items()}
        state = {
            key: local_part(own[key]) if issubclass(kind, Tensor) else kind(own[key].item())
            for key, kind in kinds.items()
        }
        self._inner.state[plain] = dict(state)
        return state

    def _take_back(self, parameter: Parameter, lent: dict[str, Any]) -> None:
        """Keep what the class has written elsewhere than into what it was lent."""
        plain = self._plain[parameter]
        _release(plain)
        state = _without_none(self._inner.state.pop(plain, {}))
        own = self.state[parameter]
        kept = self._rule.kept(parameter)
        if state.keys() != kept.keys():
            raise ConfigError(
                f'"{self._rule.config.name}" keeps {_listed(state)} of a parameter now, and kept {_listed(kept)} of a '
                "tiny one after two updates; Keel allocates that ahead, so a class must keep the same at all times"
            )
        for key, value in state.items():
            if not isinstance(value, Tensor):
                own[key].fill_(value)
            elif value is not lent.get(key):
                local_part(own[key]).copy_(value)
        own[STARTED].fill_(1)


class TorchRule(rule.Rule):
    """What a class of torch optimizers keeps of a parameter, found by trying it."""

    kind: ClassVar[type[TorchOptimizer]]
    common: ClassVar[tuple[str, ...]]
    """See `keys_of`."""

    def state(self, parameter: Tensor) -> dict[str, Tensor]:
        tried = self._tried(parameter)
        kept = {key: _allocated(value, parameter) for key, value in tried.kept.items()}
        device = "meta" if parameter.is_meta else "cpu"
        counts = {_COUNT + name: torch.zeros((), dtype=torch.int64, device=device) for name in tried.counts}
        return {STARTED: torch.zeros((), device=device)} | kept | counts

    def without_state(self, groups: list[dict[str, Any]]) -> FromTorch:
        return FromTorch(groups, self)

    def build(self, groups: list[dict[str, Any]]) -> Any:
        optimizer = super().build(groups)
        optimizer.take_what_exists()
        return optimizer

    def instance(self, groups: list[dict[str, Any]]) -> TorchOptimizer:
        """An optimizer of the class over some groups, with the job's settings."""
        values = {key: getattr(self.config, key) for key in self.common} | self.config.options
        # Arrays of TOML are lists, where such classes have tuples.
        settings: dict[str, Any] = {key: tuple(v) if isinstance(v, list) else v for key, v in values.items()}
        return self.kind(groups, **settings)

    def settings(self, group: dict[str, Any]) -> dict[str, float]:
        """The values of a group that the class has, too."""
        return {key: group[key] for key in _OF_GROUPS if key in self.common}

    def kept(self, parameter: Tensor) -> dict[str, Any]:
        """What the class keeps of such a parameter, with the values of a tiny one; raises as `_trial`."""
        return self._tried(parameter).kept

    def counts(self, parameter: Tensor) -> Sequence[str]:
        """The names by which the class counts steps in its groups; raises as `_trial`."""
        return self._tried(parameter).counts

    def _tried(self, parameter: Tensor) -> "_Tried":
        device = torch.device("cpu") if parameter.is_meta else parameter.device
        key = device.type, parameter.dtype, parameter.ndim
        if key not in self._trials:
            tiny = torch.ones(_TINY[: parameter.ndim], dtype=parameter.dtype, device=device)
            self._trials[key] = self._trial(Parameter(tiny))
        return self._trials[key]

    @cached_property
    def _trials(self) -> dict[tuple, "_Tried"]:
        return {}

    def _trial(self, parameter: Parameter) -> "_Tried":
        """Update a tiny parameter, and see what the class keeps.

        Raises:
            ConfigError: something is neither a number nor like the parameter, or in a group and no count.
        """
        optimizer = self.instance([{"params": [parameter]}])
        groups = [dict(optimizer.param_groups[0])]
        for _ in range(2):
            parameter.grad = torch.ones_like(parameter)
            with torch.no_grad():
                optimizer.step()
            groups.append(dict(optimizer.param_groups[0]))
        kept = _without_none(optimizer.state[parameter])
        for key, value in kept.items():
            is_number = isinstance(value, (int, float)) or (isinstance(value, Tensor) and value.numel() == 1)
            if not is_number and not (isinstance(value, Tensor) and value.shape == parameter.shape):
                what = f"shape {tuple(value.shape)}" if isinstance(value, Tensor) else f"type {type(value).__name__}"
                raise ConfigError(
                    f'"{self.config.name}" {NOT_ELEMENTWISE}: of a matrix it keeps {key}, of {what}, where others keep '
                    f"numbers, and tensors like the matrix. {REMEDY}"
                )
        return _Tried(kept, self._counts_in(groups))

    def _counts_in(self, groups: Sequence[dict[str, Any]]) -> list[str]:
        """The names of counts in a group, seen before, between and after two steps."""
        before, between, after = ({key: each[key] for key in each if key != "params"} for each in groups)
        changed = [key for key in after if key not in before or before[key] != after[key]]
        for key in changed:
            if type(after[key]) is not int or after[key] != between.get(key, 0) + 1:
                raise ConfigError(
                    f'"{self.config.name}" keeps {key} in its groups, which a checkpoint does not have; of what '
                    "changes there, Keel keeps counts of steps alone"
                )
        return changed


class _Tried(NamedTuple):
    """What a class keeps, seen in a trial."""

    kept: dict[str, Any]
    """State of a parameter, with the values of a tiny one."""
    counts: Sequence[str]
    """Names of counts of steps in its groups."""


def _release(plain: Parameter) -> None:
    """Hold no memory between updates: of a gradient, or of a parameter that FSDP moves."""
    plain.grad = None
    plain.data = plain.data.new_empty(0)


def _allocated(value: Any, parameter: Tensor) -> Tensor:
    """Memory for what the class keeps of a parameter: for such a value after an update of a tiny one."""
    if isinstance(value, Tensor) and value.numel() > 1:
        return torch.zeros_like(parameter, dtype=value.dtype, memory_format=torch.preserve_format)
    number = value if isinstance(value, Tensor) else torch.zeros((), dtype=torch.float64)
    return torch.zeros_like(number, device="meta" if parameter.is_meta else number.device)


def _without_none(state: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in state.items() if value is not None}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"


def arguments(kind: type[TorchOptimizer]) -> dict[str, Any]:
    """The arguments of a class's constructor after the parameters, with their defaults; those of its bases, too, if it
    passes on what it does not name."""
    found: dict[str, Any] = {}
    for base in kind.__mro__:
        if "__init__" not in vars(base):
            continue
        _, *named = signature(vars(base)["__init__"]).parameters.values()  # without self
        if named and named[0].kind == named[0].POSITIONAL_OR_KEYWORD:
            del named[0]  # the parameters
        by_name = [each for each in named if each.kind in (each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY)]
        found = {each.name: each.default for each in by_name} | found
        if all(each.kind != each.VAR_KEYWORD for each in named):
            break
    return found


def keys_of(kind: type[TorchOptimizer]) -> tuple[str, ...]:
    """The keys of [optimizer] that are arguments of a class, too, and mean the same; its others are options.

    Adafactor's eps is a pair, and some have three betas.
    """
    found = arguments(kind)
    is_key = {
        "lr": "lr" in found,
        "betas": isinstance(found.get("betas"), (tuple, list)) and len(found["betas"]) == 2,
        "eps": isinstance(found.get("eps"), float),
        "weight_decay": "weight_decay" in found,
    }
    return tuple(key for key in is_key if is_key[key])


_rules: dict[type[TorchOptimizer], type[TorchRule]] = {}


def rule_over(kind: type[TorchOptimizer]) -> type[TorchRule]:
    """The rule of a class of torch optimizers, which is made once."""
    if kind not in _rules:
        _rules[kind] = type(kind.__name__, (TorchRule,), {"kind": kind, "common": keys_of(kind)})
    return _rules[kind]
