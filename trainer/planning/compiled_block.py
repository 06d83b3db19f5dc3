"""What torch.compile keeps of a block from its forward to its backward pass, and what its backward pass holds.

The block's graph is traced on fake tensors and divided by the compiler's own rule (the partitioner's), after marking
what activation checkpointing saves and computes again as torch marks it. Operations that the compiler fuses into one
kernel have one result in memory, the last one's.
"""

import operator
from collections.abc import Iterator
from collections.abc import Set as AbstractSet
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule, Node, traceback
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten
from torch.utils.checkpoint import CheckpointPolicy

from configs.plan import Plan
from configs.schema import ActivationCheckpoint
from parallelisms.activation_checkpoint import (
    MATRIX,
    Selection,
    annotate_matrices,
    budget_settings,
    declare_attention_deterministic,
    select,
)
from trainer.planning.block_memory import BlockMemory, worst


def measure_compiled(
    block: nn.Module, inputs: tuple, others: dict[str, Any], checkpointing: ActivationCheckpoint, plan: Plan
) -> BlockMemory:
    """Trace a block of fake parameters on its inputs.

    Args:
        block: without activation checkpointing, which is applied to the trace.
        inputs, others: by position and by keyword.
        checkpointing: how, if at all.
        plan: the model's.
    """
    # They import the compiler, which takes seconds.
    import torch._functorch.config as functorch_config
    from functorch.compile import aot_function, min_cut_rematerialization_partition
    from torch._inductor.decomposition import select_decomp_table

    found: list[BlockMemory] = []

    def divide(joint: GraphModule, given: Any, **others: Any) -> tuple[GraphModule, GraphModule]:
        if checkpointing.mode in ("full", "selective"):
            _mark(joint, selection)
        forward, backward = min_cut_rematerialization_partition(joint, given, **others)
        given_before = {node.name for node, base in _bases(forward).items() if base.op == "placeholder"}
        moments = worst(_moments(backward, given_before, n_parameters=len(names)))
        found.append(BlockMemory(_kept(forward), moments))
        return forward, backward

    is_selective = checkpointing.mode == "selective"
    selection = select(block, checkpointing, plan.save_ops) if is_selective else Selection((), ())
    declare_attention_deterministic()
    annotate_matrices(block)
    names = [name for name, _ in block.named_parameters()]
    values, structure = tree_flatten((inputs, others))
    buffers = dict(block.named_buffers())
    tensors = [*(value for value in values if isinstance(value, Tensor)), *buffers.values()]

    def run(parameters: list[Tensor], tensors: list[Tensor]) -> Tensor:
        left = iter(tensors)
        whole = [next(left) if isinstance(value, Tensor) else value for value in values]
        state = {**dict(zip(names, parameters, strict=True)), **dict(zip(buffers, left, strict=True))}
        outputs = functional_call(block, state, *tree_unflatten(whole, structure))
        return next(leaf for leaf in tree_leaves(outputs) if isinstance(leaf, Tensor))

    settings = budget_settings(checkpointing.memory_budget) if checkpointing.mode == "budget" else {}
    table = select_decomp_table()
    with traceback.preserve_node_meta(), functorch_config.patch(settings):
        aot_function(run, _as_it_is, _as_it_is, divide, table)(list(block.parameters()), tensors)
    return found[0]


def _as_it_is(graph: GraphModule, _inputs: Any) -> GraphModule:
    return graph


def _mark(joint: GraphModule, selection: Selection) -> None:
    """Mark what of the forward pass is saved, and what is computed again."""
    for node in joint.graph.nodes:
        if any(given.name.startswith("tangents") for given in node.all_input_nodes):
            return  # a gradient enters: the backward pass begins
        if node.op != "call_function":
            continue
        if node.target is operator.getitem:
            policy = node.all_input_nodes[0].meta["recompute"]
        else:
            keeps = selection.keeps(_name(node), node.meta.get("custom", {}).get(MATRIX))
            policy = CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE
        node.meta |= {"recompute": policy, "ac_graph_id": 1}


# --------------------------------------------------------------------------- what has memory, and when


def _kept(forward: GraphModule) -> int:
    """Bytes of what a forward graph returns and has made itself."""
    base = _bases(forward)
    return sum(_bytes(node) for node in {base[node] for node in _output(forward).all_input_nodes} - _inputs(forward))


def _moments(backward: GraphModule, given: AbstractSet[str], n_parameters: int) -> Iterator[tuple[int, int]]:
    """The bytes of activations and of parameters' gradients while each operation of a backward graph runs.

    Args:
        backward: its first results are the gradients of `n_parameters` parameters.
        given: names of inputs that do not count.
    """
    made, reads = _made(backward)
    base = _bases(backward)
    output = _output(backward)
    results: Any = output.args[0]
    of_parameters = {base[node] for node in results[:n_parameters] if node is not None}
    last = {source: node for node in made for source in reads[node]}
    ends: dict[Node, list[int]] = {}
    for source in last.keys() - reads[output]:
        if source.name not in given:
            ends.setdefault(last[source], []).append(_bytes(source))
    alive = sum(_bytes(node) for node in _inputs(backward) if node.name not in given)
    gradients = 0
    yield alive, gradients
    for node in made:
        size = _bytes(node)
        freed = ends.get(node, [])
        gradients += size * (node in of_parameters)
        alive += size * (node not in of_parameters)
        yield alive - size * (_fuses(node) and size in freed), gradients  # a fused kernel may write in place
        alive -= sum(freed)


def _made(graph: GraphModule) -> tuple[list[Node], dict[Node, set[Node]]]:
    """The operations whose results get memory, in order; and for each, and the output, what it reads."""
    base = _bases(graph)
    nodes = [node for node in graph.graph.nodes if node.op in ("call_function", "output")]
    made = [node for node in nodes if node.op == "call_function" and base[node] is node and not _vanishes(node, base)]
    in_memory = {*made, *_inputs(graph)}
    reads: dict[Node, set[Node]] = {}
    for node in nodes:  # what a result without memory is computed from is read where that is
        sources = {base[given] for given in node.all_input_nodes}
        reads[node] = (sources & in_memory).union(*(reads[source] for source in sources - in_memory))
    return made, reads


def _bases(graph: GraphModule) -> dict[Node, Node]:
    """The operation that made each one's memory: itself, or what it is a view of."""
    base: dict[Node, Node] = {}
    for node in graph.graph.nodes:
        base[node] = node
        if node.op == "call_function" and node.all_input_nodes:
            first = node.all_input_nodes[0]
            target = first.target if node.target is operator.getitem else node.target
            if getattr(target, "is_view", False):
                base[node] = base[first]
    return base


def _vanishes(node: Node, base: dict[Node, Node]) -> bool:
    """Whether an operation is fused into all that read it, so that its result never gets memory."""
    if not _fuses(node) or torch.Tag.reduction in node.target.tags:  # type: ignore[union-attr]
        return False
    readers = list(node.users)
    while readers:
        reader = readers.pop()
        if base[reader] is not reader:
            readers += reader.users
        elif not _fuses(reader):  # the output, or a kernel of a library
            return False
    return True


_ALSO_FUSED = ("cat", "constant_pad_nd", "full", "full_like", "iota", "gather", "index")


def _fuses(node: Node) -> bool:
    """Whether the compiler writes an operation's kernel, and so may fuse it with others."""
    tags = getattr(node.target, "tags", ())
    is_listed = _name(node).partition("::")[2].partition(".")[0] in _ALSO_FUSED
    return is_listed or torch.Tag.pointwise in tags or torch.Tag.reduction in tags


def _name(node: Node) -> str:
    """The operator's name in the dispatcher, "aten::mm"; empty if it has none."""
    return node.target.name() if isinstance(node.target, torch._ops.OpOverload) else ""


def _output(graph: GraphModule) -> Node:
    return next(node for node in reversed(graph.graph.nodes) if node.op == "output")


def _inputs(graph: GraphModule) -> set[Node]:
    return {node for node in graph.graph.nodes if node.op == "placeholder"}


def _bytes(node: Node) -> int:
    value = node.meta.get("val")
    return value.numel() * value.itemsize if isinstance(value, Tensor) else 0
