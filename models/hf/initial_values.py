"""Initial values of a family's parameters and buffers, by its own rules."""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import torch
import xxhash
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

from configs.errors import ConfigError
from configs.schema import HfModel
from models.hf.family import built


class Initializer:
    """Draws single parameters of a family, whole, by the family's own rules."""

    def __init__(self, config: HfModel) -> None:
        with torch.device("meta"):
            self._family = built(config)
        for module in self._family.modules():  # what from_config has set would keep the rules from running
            module.__dict__.pop("_is_hf_initialized", None)
        self._rules = self._touched()
        tensors = [*self._family.named_parameters(), *self._family.named_buffers()]
        without_rule = [name for name, _ in tensors if name not in self._rules]
        self._constructed = _small_tensors(config, without_rule) if without_rule else {}

    def values(self, seed: int, name: str) -> Tensor:
        """The initial values of a parameter or a buffer, by name.

        Raises:
            ConfigError: the family has no rule for it.
        """
        if name in self._constructed:
            return self._constructed[name].clone()
        if name not in self._rules:
            raise ConfigError(
                f"{self._family.config.model_type} has no rule for the initial values of {name} (_init_weights), "
                "so it can't be trained"
            )
        owner_name, _, attribute = name.rpartition(".")
        owner = self._family.get_submodule(owner_name)
        is_parameter = attribute in owner._parameters
        held: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
        before = held[attribute]
        whole = _unset(torch.empty(before.shape, dtype=before.dtype, device="cpu"))
        held[attribute] = nn.Parameter(whole, requires_grad=False) if is_parameter else whole
        try:
            with torch.random.fork_rng(devices=[]), torch.no_grad():
                torch.manual_seed(xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()) >> 1)
                for module, initialize in self._rules.get(name, []):
                    initialize(module)
            return held[attribute].detach()
        except NotImplementedError as error:  # it reads another tensor, which has no memory
            raise ConfigError(
                f"the rule of {self._family.config.model_type} for the initial values of {name} needs the values of "
                f"other parameters ({error}), so it can't be trained"
            ) from None
        finally:
            held[attribute] = before

    def _touched(self) -> dict[str, list[tuple[nn.Module, Callable]]]:
        """The rules that write each parameter or buffer, in the order in which transformers runs them.

        Most write their own module's; some, such as GPT-2's of the residual matrices, those of modules inside.
        """
        tensors = [*self._family.named_parameters(), *self._family.named_buffers()]
        rules: dict[str, list[tuple[nn.Module, Callable]]] = {}
        with torch.no_grad(), torch.device("meta"):
            for module, initialize in _rules_of(self._family, self._family._init_weights):
                versions = [tensor._version for _, tensor in tensors]
                initialize(module)
                for (name, tensor), version in zip(tensors, versions, strict=True):
                    if tensor._version != version:
                        rules.setdefault(name, []).append((module, initialize))
        return rules


def _small_tensors(config: HfModel, names: list[str]) -> dict[str, Tensor]:
    """The values that a family's constructor, and not a rule, gives to parameters and buffers with few elements."""
    with torch.random.fork_rng(devices=[]), _SmallInMemory():
        torch.manual_seed(0)
        family = built(config)
    tensors = dict(family.named_parameters()) | dict(family.named_buffers())
    return {name: tensors[name].detach() for name in names if not tensors[name].is_meta}


class _SmallInMemory(TorchFunctionMode):
    """Lets a constructor compute with the tensors of few elements; the others are on the meta device."""

    MOST_ELEMENTS = 4096

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _device_constructors():
            sizes = [size for each in args for size in (each if isinstance(each, (tuple, list)) else (each,))]
            has_sizes = func not in (torch.tensor, torch.as_tensor, torch.arange, torch.linspace)
            is_large = has_sizes and prod(size for size in sizes if type(size) is int) > self.MOST_ELEMENTS
            kwargs["device"] = "meta" if is_large else "cpu"
        return func(*args, **kwargs)


def _rules_of(module: nn.Module, initialize: Callable) -> Iterator[tuple[nn.Module, Callable]]:
    """Modules with the rule that applies to each, inner ones first; a model inside a model has rules of its own."""
    for child in module.children():
        own = getattr(child, "_init_weights", None)
        yield from _rules_of(child, own if callable(own) else initialize)
    yield module, initialize


def _unset(tensor: Tensor) -> Tensor:
    """Mark every element as not initialized."""
    return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor.zero_()
