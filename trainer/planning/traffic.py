"""Trace of one training step of a job at any size, on one machine: which collectives a rank issues, and their size.

The ranks belong to a fake process group, whose collectives return at once, and the tensors are fake tensors, which have
a shape but no memory. The code that runs is the trainer's own: the same wrappers, passes, clipping and optimizer.
Experts have equal loads; the few numbers that tell expert ranks how many rows will come are not counted.
"""

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.pipelining import schedules
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from configs.architectures.llama_keys import n_further
from configs.layout import accumulation_steps, mesh_sizes, micro_batch_size
from configs.schema import Attention, Config
from configs.table import with_keys
from parallelisms.fake_ranks import fake_ranks
from parallelisms.mesh import Mesh, build_mesh, groups_of_axes
from parallelisms.ties import ties_kept
from trainer.data.loader import MicroBatch
from trainer.stages import build_stages
from trainer.step import Learner, assemble_learner

_OPS = {
    "c10d::_allgather_base_": "all_gather",
    "c10d::allgather_": "all_gather",
    "c10d::_reduce_scatter_base_": "reduce_scatter",
    "c10d::allreduce_": "all_reduce",
    "c10d::broadcast_": "broadcast",
    "c10d::alltoall_base_": "all_to_all",
    "c10d::send": "send",
    "c10d::recv_": "receive",
    "_c10d_functional::all_gather_into_tensor": "all_gather",
    "_c10d_functional::reduce_scatter_tensor": "reduce_scatter",
    "_c10d_functional::all_reduce": "all_reduce",
    "_c10d_functional::all_to_all_single": "all_to_all",
    "keel::send_to_experts": "all_to_all",
    "keel::return_from_experts": "all_to_all",
    "keel::begin_exchange": "all_to_all",
}
"""Names of the dispatcher's ops -> names of the collectives."""


class Collective(NamedTuple):
    """A kind of collective that a rank issues."""

    op: str
    """all_gather, reduce_scatter, all_reduce, send, ..."""
    axis: str
    """The mesh axis along which the participating ranks are arranged."""


class Traffic(NamedTuple):
    """The traffic of one kind of collective, in one step of one rank."""

    calls: int
    n_bytes: int
    """Sum over the calls of the largest tensor of each: the whole that is gathered, reduced or sent."""


def trace_step(config: Config, world_size: int, rank: int) -> dict[Collective, Traffic]:
    """The communication of one of `world_size` ranks in an optimizer step, largest first; nothing is compiled.

    Raises:
        ConfigError: the ranks cannot form the mesh.
    """
    rule = {"name": "adamw"} if config.optimizer.name == "ademamix" else {}  # which reads its count of updates
    optimizer = {"moments_dtype": "float32", "rounding": "nearest", **rule}
    eager = with_keys(config, compile={"enable": False}, optimizer=optimizer, metrics={"fingerprint": False})
    # On a CPU; kernels communicate nothing, nor do element-wise rules.
    eager = eager.model_copy(update={"attention": Attention()})
    with fake_ranks(world_size, rank):
        mesh = build_mesh(mesh_sizes(eager, world_size), torch.device("cpu"))
        stages, names = build_stages(eager, mesh)
        with FakeTensorMode(allow_non_fake_inputs=True):
            for stage in stages.values():
                with ties_kept(stage):
                    stage.to_empty(device="cpu")
            learner = assemble_learner(eager, mesh, stages, names)
            with _no_vote_on_shapes():
                return record_step(learner)


def record_step(learner: Learner) -> dict[Collective, Traffic]:
    """The communication of a learner, real or fake, in a step, without its loss's scalars and its fingerprint."""
    with _Recorder(learner.mesh) as recorder:
        _train(learner)
    return dict(sorted(recorder.traffic.items(), key=lambda item: -item[1].n_bytes))


def _train(learner: Learner) -> None:
    """Run a step without its waits for values, which fake tensors do not have."""
    training = learner.config.training
    tokens = torch.zeros((micro_batch_size(training), training.seq_len), dtype=torch.int64)
    depth = n_further(learner.config.model)
    further = tokens[..., None, None].expand(-1, -1, depth, 2) if depth else None
    example = MicroBatch(tokens, targets=tokens, positions=None, document_ids=None, samples=[], further=further)
    batch = learner.own_part([example])
    n_micro_batches = accumulation_steps(learner.config, learner.mesh.sizes)
    calls = [learner.call(batch[0], learner.loss, is_training=True) for _ in range(n_micro_batches)]
    learner.passes.train(calls, scale=torch.ones((), dtype=torch.float64))
    learner.optimizer.clip(learner.grad_norm())
    for group in learner.optimizer.param_groups:
        group |= {"fused": True} if "fused" in group else {}  # other kernels read a count, too
    learner.optimizer.step()


@contextmanager
def _no_vote_on_shapes() -> Iterator[None]:
    """Make a pipeline assume that all of its stages were given their shapes.

    Torch (2.13) lets the ranks vote on it before the first step, and reads the result, which a fake tensor lacks.
    """

    def all_were_given(_self: Any, stages: list[Any], *_: Any) -> None:
        for stage in stages:
            stage._inference_mode = schedules.InferenceMode.STATIC

    with patch.object(schedules._PipelineSchedule, "_warmup_p2p", all_were_given, create=True):
        yield


class _Recorder(TorchDispatchMode):
    """Counts the collectives that pass through the dispatcher."""

    def __init__(self, mesh: Mesh) -> None:
        super().__init__()
        self._axes = {str(group.group_name): axis for axis, group in groups_of_axes(mesh).items()}
        self.traffic: dict[Collective, Traffic] = defaultdict(lambda: Traffic(0, 0))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        op = _OPS.get(func.overloadpacket._qualified_op_name)
        if op is not None:
            group = _group_name(args)
            kind = Collective(op, self._axes.get(group, "all"))
            before = self.traffic[kind]
            largest = max(t.numel() * t.element_size() for t in tree_leaves((args, result)) if isinstance(t, Tensor))
            self.traffic[kind] = Traffic(before.calls + 1, before.n_bytes + largest)
        return result


def _group_name(args: tuple) -> str:
    """The process group among a collective's arguments: its name, or the boxed group."""
    boxes = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.ScriptObject)]
    for box in boxes:
        with suppress(RuntimeError, TypeError):
            return dist.ProcessGroup.unbox(box).group_name
    return next(leaf for leaf in reversed(args) if isinstance(leaf, str))
