"""Where a model of `transformers` can be cut into pipeline stages, and what stands in for modules of other stages.

A stage runs the family's own forward pass, in which the layers of other stages are replaced by modules without
parameters, so that numbers of layers, and what the config says of each, stay right:

* The stages after the first are given hidden states in place of tokens. The family gets zeros for its embeddings, and
  what it does with them before the layers (factors, learned positions, norms) is lost: the layers of earlier stages are
  replaced by modules that return the hidden states as they came, and norms before the layers by some that return zeros.
* In the stages before the last, the first layer of a later stage ends the forward pass, with the hidden states.

That is right if hidden states are all that goes from layer to layer. `find_cuts` makes sure: a model without memory
runs, and the graph that autograd keeps of it says which parameters each layer's output depends on.
"""

import logging
from collections.abc import Iterable, Iterator
from copy import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves

from models.random_numbers import RandomListener

_PROBE = (3, 11)
"""Batch and sequence of the tokens with which the model runs: numbers that no other size is likely to have."""


class StageEnd(Exception):
    """Carries the last layer's hidden states out of the forward pass of a stage."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


@dataclass(frozen=True)
class Cuts:
    """How a model can be cut."""

    why_not: str = ""
    """Why a pipeline can't; empty if it can."""
    has_ended: bool = True
    """Whether the forward pass was followed to its end."""
    before: tuple[str, ...] = ()
    """Modules with parameters that the first layer's input depends on, and those that nothing depends on."""
    after: tuple[str, ...] = ()
    """Modules with parameters between the last layer and the logits."""
    n_returned: int = 0
    """Number of values in the tuple that a layer returns; 0: it returns a tensor."""
    random: str = ""
    """An operator of the forward pass that draws random numbers, other than attention; empty if none was seen."""
    outputs: dict[str, tuple[torch.Size, torch.dtype]] = field(default_factory=dict)
    """What the modules of `before` return for tokens of the shape `_PROBE`."""
    attention: tuple[str, ...] = ()
    """Modules that compute with Keel's attention (`models/hf/attention.py`)."""
    kv_heads: int = 0
    """The fewest heads of keys and values that one of these has."""
    has_own_attention: bool = False
    """Whether one of these computes attention by a function of the family."""
    patterns: frozenset[int] = frozenset()
    """Tokens up to which layers with other masks are plain causal; 0: with none."""

    def blank(self, name: str, received: Tensor) -> Tensor:
        """Zeros like the output of a module of `before`, for a stage that has received hidden states (batch, seq, dim).

        The run without memory was in float32, so floating-point outputs are of the type of what was received.
        """
        shape, dtype = self.outputs[name]
        sizes = [dict(zip(_PROBE, received.shape, strict=False)).get(size, size) for size in shape[:-1]]
        is_floating = dtype.is_floating_point
        return received.new_zeros(*sizes, shape[-1], dtype=received.dtype if is_floating else dtype)

    def returned(self, hidden: Tensor) -> Any:
        """Hidden states in the form in which a layer returns them."""
        return (hidden, *[None] * (self.n_returned - 1)) if self.n_returned else hidden


def without_tensors(module: nn.Module, forward: Any) -> nn.Module:
    """A module that has another's attributes, which a family's forward pass may read, but no tensor or module."""
    stand_in = copy(module)
    for kind in ("_parameters", "_buffers", "_modules"):
        stand_in.__dict__[kind] = {}
    stand_in.forward = forward
    return stand_in


class _NotCuttable(Exception):
    """Why, as the rest of a sentence that begins with the family's name."""


def find_cuts(family: Any, blocks: tuple[str, ...], embedding: str, head: str, dim: int) -> Cuts:
    """Find how a model can be cut.

    Args:
        family: of `transformers`, on the meta device and used for nothing else.
        blocks, embedding, head: names of its layers, its embedding and its head.
        dim: width of the hidden states.
    """
    run = _Run(family, blocks)
    is_tied = family.get_submodule(embedding).weight is family.get_submodule(head).weight
    try:
        logits = run.run()  # which unties them
        if is_tied:
            raise _NotCuttable(
                "puts its embedding on the first stage and its head on the last, so they cannot share one matrix; "
                "model.hf_overrides.tie_word_embeddings = false separates them"
            )
        return run.cuts(logits, embedding, head, dim)
    except _NotCuttable as error:
        return Cuts(str(error), run.has_ended, before=(embedding,), after=(head,), random=run.random)


class _Run:
    """A forward pass without memory, in which a new leaf of autograd's graph takes each layer's place."""

    def __init__(self, family: Any, blocks: tuple[str, ...]) -> None:
        self._family = family
        self._blocks = blocks
        self._entered: list[Tensor] = []
        """What each layer is given in place of its input: leaves."""
        self._left: list[Tensor] = []
        """The hidden states that each layer returns."""
        self._besides: list[Tensor] = []
        """What layers return besides."""
        self._start: Tensor | None = None
        self._end: Tensor | None = None
        self._n_returned = 0
        self._outputs: dict[str, tuple[torch.Size, torch.dtype]] = {}
        self._listener = RandomListener()
        self.has_ended = False

    @property
    def random(self) -> str:
        """The first operator that drew random numbers."""
        return self._listener.random

    def cuts(self, logits: Tensor, embedding: str, head: str, dim: int) -> Cuts:
        """Judge what was seen.

        Raises:
            _NotCuttable: hidden states are not all that goes from layer to layer.
        """
        if len(self._left) != len(self._blocks) or self._end is None or self._start is None:
            raise _NotCuttable(f"runs {len(self._left)} of its {len(self._blocks)} layers, or some of them twice")
        shape = torch.Size((*_PROBE, dim))
        if any(hidden.shape != shape for hidden in self._left):
            raise _NotCuttable("gives its layers hidden states of another shape than (batch, seq, dim)")
        names = {id(parameter): name for name, parameter in self._family.named_parameters()}
        for block, entered, left in zip(self._blocks, self._entered, self._left, strict=True):
            others = [names.get(leaf, "the input of another layer") for leaf in _leaves(left) - {id(entered)}]
            strange = sorted(name for name in others if not name.startswith(f"{block}."))
            if strange:
                raise _NotCuttable(f"uses more than the last layer's hidden states in {block}: {strange[0]}")
        before = self._owners(_leaves(self._start), names)
        after = self._owners(_leaves(logits) - {id(self._end)}, names)
        for module in (*before, *after):
            if any(module == block or module.startswith(f"{block}.") for block in self._blocks):
                raise _NotCuttable(f"uses {module} outside of its layer")
        shared = sorted({*before} & {*after})
        if shared:
            raise _NotCuttable(f"uses {shared[0]} before and after its layers")
        unused = self._outside() - {*before, *after}
        before = (embedding, *sorted({*before, *unused} - {embedding}))
        if missing := sorted({*before} - {embedding, *unused, *self._outputs}):
            raise _NotCuttable(f"has parameters in {missing[0]}, which no stage can do without")
        return Cuts("", True, before, (*sorted({*after} - {head}), head), self._n_returned, self.random, self._outputs)

    def run(self) -> Tensor:
        """Run; returns the logits.

        Raises:
            _NotCuttable: something needs values, or layers are not called with hidden states.
        """
        for name in self._blocks:
            block = self._family.get_submodule(name)
            block.register_forward_pre_hook(self._enter, with_kwargs=True)
            block.register_forward_hook(self._leave)
        for name in self._outside():
            self._family.get_submodule(name).register_forward_hook(self._recorder(name))
        log = logging.getLogger("torch._subclasses.fake_tensor")
        log.disabled, before = True, log.disabled  # the message below says what torch would print at length
        try:
            # With fake tensors, unlike those of the meta device, families skip questions about values.
            with FakeTensorMode(allow_non_fake_inputs=True), torch.device("cpu"), self._listener:
                self._family.to_empty(device="cpu").train()
                tokens = torch.zeros(_PROBE, dtype=torch.int64)
                logits = self._family.forward(input_ids=tokens, use_cache=False, return_dict=True).logits
            self.has_ended = True
            return logits
        except _NotCuttable:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            raise _NotCuttable(f"can't be followed through its forward pass without memory ({reason})") from None
        finally:
            log.disabled = before

    def _enter(self, _block: nn.Module, inputs: tuple, others: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        hidden = inputs[0] if inputs else others.get("hidden_states")
        if not isinstance(hidden, Tensor):
            raise _NotCuttable("gives its layers no hidden states as their first argument")
        if self._left and hidden is not self._end:
            raise _NotCuttable("computes something between its layers")
        given = {id(tensor) for tensor in tree_leaves((inputs[1:], others)) if isinstance(tensor, Tensor)}
        if any(id(tensor) in given for tensor in self._besides):
            raise _NotCuttable("hands more than hidden states from layer to layer")
        if self._start is None:
            self._start = hidden
        leaf = hidden.detach().requires_grad_()
        self._entered.append(leaf)
        return ((leaf, *inputs[1:]), others) if inputs else (inputs, {**others, "hidden_states": leaf})

    def _leave(self, _block: nn.Module, _inputs: tuple, output: Any) -> Any:
        self._n_returned = len(output) if isinstance(output, tuple) else 0
        hidden = output[0] if isinstance(output, tuple) else output
        if not isinstance(hidden, Tensor):
            raise _NotCuttable(f"has layers that return a {type(hidden).__name__}")
        self._left.append(hidden)
        if isinstance(output, tuple):
            self._besides += [tensor for tensor in tree_leaves(output[1:]) if isinstance(tensor, Tensor)]
        self._end = hidden.detach().requires_grad_()
        return (self._end, *output[1:]) if isinstance(output, tuple) else self._end

    def _recorder(self, name: str) -> Any:
        def record(_module: nn.Module, _inputs: tuple, output: Any) -> None:
            if isinstance(output, Tensor):
                self._outputs[name] = output.shape, output.dtype

        return record

    def _outside(self) -> set[str]:
        """The modules with parameters of their own that are in no layer."""
        inside = tuple(f"{block}." for block in self._blocks)
        owners = {name.rpartition(".")[0] for name, _ in self._family.named_parameters()}
        return {owner for owner in owners if not f"{owner}.".startswith(inside)}

    def _owners(self, leaves: Iterable[int], names: dict[int, str]) -> tuple[str, ...]:
        return tuple({names[leaf].rpartition(".")[0]: None for leaf in leaves if leaf in names})


def _leaves(tensor: Tensor) -> set[int]:
    """The ids of the leaves of autograd's graph that a tensor depends on."""
    if tensor.grad_fn is None:
        return {id(tensor)}
    return set(_walk(tensor.grad_fn))


def _walk(node: Any) -> Iterator[int]:
    waiting = [node]
    seen = {node}
    while waiting:
        node = waiting.pop()
        if hasattr(node, "variable"):
            yield id(node.variable)
        for other, _ in node.next_functions:
            if other is not None and other not in seen:
                seen.add(other)
                waiting.append(other)
