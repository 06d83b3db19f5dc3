"""Activation checkpointing: what the backward pass recomputes instead of keeping it (Chen et al. 2016).

Each of the plan's blocks is a unit. `full` keeps a block's inputs and repeats its forward pass in backward;
`selective` also keeps the outputs of chosen ops, by default the expensive ones (Korthikanti et al. 2022, section 5);
`budget` leaves the choice to torch.compile's partitioner. In eager mode, values and gradients stay bitwise the same,
since the same kernels run on the same inputs, only twice.

An annotation says which matrix a matmul belongs to, in both eager and compiled code: a matrix's forward pass runs
under `torch.fx.traceback.annotate`. In eager mode that is an entry in a plain dictionary, which the policy can read.
Dynamo records the entry with the node it traces, and AOTAutograd restores it while it runs the policy over that node.
Counting calls would not work (a recomputation that stops early counts differently), nor would the weight's address,
which FSDP changes between forward and backward and which a fake tensor does not have.

A recomputation ends as soon as backward has what it needs: a block's last matmul, whose output is only added to the
residual stream, is never repeated.
"""

import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, NamedTuple

import torch
import torch._functorch.config as functorch_config
from torch import Tensor, nn
from torch.fx import traceback
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from configs.errors import ConfigError
from configs.layout import layer_numbers
from configs.plan import plan_of
from configs.schema import ActivationCheckpoint
from parallelisms.torch_internals import count_grouped_queries

MATRIX = "keel_matrix"
_MATMULS = {"aten::mm", "aten::addmm", "aten::bmm"}


class Selection(NamedTuple):
    """What `selective` keeps. It holds nothing but strings, so that Dynamo can guard a compiled graph by its value:
    Dynamo compares closures by their code alone, and would reuse one selection's graph for another."""

    ops: tuple[str, ...]
    """Ops whose outputs are kept, by dispatcher name ("aten::mm")."""

    recomputed: tuple[str, ...]
    """Matrices, by name within the block, whose outputs are recomputed nevertheless."""

    def keeps(self, op: str, matrix: str | None) -> bool:
        """Whether the output of `op` is kept when it runs in the forward pass of `matrix` (None: of no matrix)."""
        return op in self.ops and matrix not in self.recomputed


def apply_activation_checkpoint(model: nn.Module, config: ActivationCheckpoint) -> None:
    """Replace the forward pass of the plan's blocks, in place; parameter names stay as they are.

    Raises:
        ConfigError: the config names an op, a layer or an n-th matrix that does not exist.
    """
    plan = plan_of(model)
    blocks = [model.get_submodule(name) for name in (*plan.blocks, *plan.further_blocks)]
    if config.mode == "budget":
        for block in blocks:
            _compile_within_budget(block, config.memory_budget)
    elif config.mode != "none":
        declare_attention_deterministic()
        selected = selected_layers(config, plan.n_blocks)
        for number, block in enumerate(blocks, start=plan.first_block):
            is_further = number >= plan.first_block + len(plan.blocks)
            if number in selected or is_further:
                _checkpoint(block, config, plan.save_ops)


def _checkpoint(block: nn.Module, config: ActivationCheckpoint, default_ops: Sequence[str]) -> None:
    """Recompute the block in backward, except for the outputs that `config` keeps."""
    # There is no dropout, so the random state need not be preserved.
    run = partial(checkpoint, use_reentrant=False, preserve_rng_state=False)
    if config.mode == "selective":
        selection = select(block, config, default_ops)
        if selection.recomputed:
            annotate_matrices(block)
        contexts = partial(_contexts, *selection)
        # Without a hash of the policy, the compiler bypasses its on-disk cache, and every start would compile again.
        contexts.cache_hash = repr(selection)  # type: ignore[attr-defined]
        run = partial(run, context_fn=contexts)
        # The compiler warns that such a block must not write in place; no block of ours does.
        logging.getLogger("torch._higher_order_ops.wrap").setLevel(logging.ERROR)
    forward = block.forward

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        return run(forward, *args, **kwargs)

    block.forward = recomputed


def _contexts(ops: tuple[str, ...], recomputed: tuple[str, ...]) -> tuple[AbstractContextManager, ...]:
    selection = Selection(ops, recomputed)

    def policy(_context: object, op: Any, *_args: object, **_kwargs: object) -> CheckpointPolicy:
        keeps = selection.keeps(op.name(), _current_matrix())
        return CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def declare_attention_deterministic() -> None:
    """Remove the tag of randomness from the attention ops, since there is no dropout.

    For a tagged op that it recomputes, the compiler carries the random generator's state from forward to backward.
    With a tensor-parallel mesh, torch 2.13 confuses the two and fails.
    """
    for name in resolve_ops(("aten._scaled_dot_product_*attention*",)):
        op, _, overload = name.removeprefix("aten::").partition(".")
        tags = getattr(getattr(torch.ops.aten, op), overload or "default").tags
        if torch.Tag.nondeterministic_seeded in tags:
            tags.remove(torch.Tag.nondeterministic_seeded)


def _compile_within_budget(block: nn.Module, budget: float) -> None:
    """Set the partitioner's memory budget while the block runs, and so whenever it is compiled.

    Set for the whole process, the budget would apply to the compiled loss as well, and recompute the logits.
    """
    settings = budget_settings(budget)
    patches: list[AbstractContextManager] = []

    def enter(*_: object) -> None:
        patches.append(functorch_config.patch(settings))
        patches[-1].__enter__()

    def leave(*_: object) -> None:
        patches.pop().__exit__(None, None, None)

    block.register_forward_pre_hook(enter)
    block.register_forward_hook(leave, always_call=True)


def budget_settings(budget: float) -> dict[str, Any]:
    """The partitioner's settings with which it keeps at most a part of what it would keep."""
    count_grouped_queries()
    settings: dict[str, Any] = {"activation_memory_budget": budget}
    if hasattr(functorch_config, "unsafe_treat_script_objects_as_zero_size"):
        # Torch 2.13 requires it where tensor parallelism puts a mesh, which holds no activations, into the graph.
        settings["unsafe_treat_script_objects_as_zero_size"] = True
    return settings


# --------------------------------------------------------------------------- which layers, ops and matrices


def selected_layers(config: ActivationCheckpoint, n_layers: int) -> list[int]:
    """The layers that are checkpointed: of those in `layers` (default: all), the last of every n.

    Raises:
        ConfigError: `layers` cannot be parsed, or names a layer that the model lacks.
    """
    layers = list(range(n_layers)) if config.layers is None else layer_numbers(config.layers, n_layers)
    return layers[config.every_nth_layer - 1 :: config.every_nth_layer]


def select(block: nn.Module, config: ActivationCheckpoint, default_ops: Sequence[str]) -> Selection:
    """The selection that `selective` keeps of a block.

    Raises:
        ConfigError: a name in `save_ops` is not an op, or the block has no n-th matrix to keep.
    """
    names = list(matrices(block))
    nth = config.save_every_nth_matmul
    ops = resolve_ops(tuple(config.save_ops or default_ops))
    kept = names[nth - 1 :: nth]
    if nth > 1 and not (kept and _MATMULS.intersection(ops)):
        raise ConfigError(
            f"activation_checkpoint.save_every_nth_matmul = {nth} keeps no matmul: a block has {len(names)} matrices "
            f"({', '.join(names)}), and save_ops must name aten.mm; lower it, or list the ops to keep in save_ops"
        )
    return Selection(ops, tuple(name for name in names if name not in kept))


@cache
def resolve_ops(patterns: tuple[str, ...]) -> tuple[str, ...]:
    """Dispatcher names of all registered ops that match `patterns`.

    A pattern is a name like "aten.mm", which matches all its overloads, or "aten.mm.default"; `*` and `?` match as
    in a shell.

    Raises:
        ConfigError: a pattern matches no op.
    """
    # Dispatcher name -> the two names by which PyTorch shows it: "aten::mm" -> "aten.mm", "aten.mm.default".
    shown: dict[str, tuple[str, str]] = {}
    for name in torch._C._dispatch_get_all_op_names():
        op, _, overload = name.replace("::", ".").partition(".")[2].partition(".")
        short = f"{name.partition('::')[0]}.{op}"
        shown[name] = (short, f"{short}.{overload or 'default'}")
    resolved: set[str] = set()
    for pattern in patterns:
        matches = {name for name, names in shown.items() if any(fnmatchcase(n, pattern) for n in names)}
        if not matches:
            guess = pattern if "." in pattern else f"aten.{pattern}"
            near = get_close_matches(guess, {short for short, _ in shown.values()}, cutoff=0.5)
            hint = f"; nearest: {', '.join(near)}" if near else ""
            raise ConfigError(f'activation_checkpoint.save_ops: no op is named "{pattern}"{hint}')
        resolved |= matches
    return tuple(sorted(resolved))


def matrices(block: nn.Module) -> dict[str, nn.Module]:
    """The block's matrices by name, in definition order."""
    return {name: module for name, module in block.named_modules() if isinstance(module, nn.Linear)}


def annotate_matrices(block: nn.Module) -> None:
    """Tell the policy in which matrix's forward pass an op runs; the module docstring explains how."""
    for name, module in matrices(block).items():
        module.forward = _annotated(module.forward, name)


def _annotated(forward: Callable, name: str) -> Callable:
    def annotated(*args: Tensor) -> Tensor:
        with traceback.annotate({MATRIX: name}):
            return forward(*args)

    return annotated


def _current_matrix() -> str | None:
    return traceback.current_meta.get("custom", {}).get(MATRIX)
