"""Every private part of torch that Keel's communication uses.

Torch 2.13 gives all FSDP groups of a model one all-gather stream, has no public way to tell which group a module is
in, and no way to listen to the collectives of a step, some of which C++ or compiled code issues. The private parts used
for that are wrapped here, each with the behavior that Keel relies on, which
`tests/unit/parallelisms/test_torch_internals.py` tests on every torch that Keel supports (2.11 on). The few private
names that other files use are listed, by file, in `tests/unit/house/test_torch_private_names.py`, which fails if a name
is added, or has disappeared from torch.
"""

import os
import pickle
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import partial, wraps
from typing import Any, ClassVar, NamedTuple, cast
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.fsdp._fully_shard._fsdp_api import ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, HSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_param import FSDPParam
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.tensor import _collective_utils, _redistribute
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.library import Library
from torch.torch_version import TorchVersion
from torch.utils import flop_counter

__all__ = ["DefaultAllGather", "DefaultReduceScatter", "ReduceScatter"]

# --------------------------------------------------------------------------- what all ranks see


def group_named(name: str) -> dist.ProcessGroup:
    """The process group of that name: custom operators take names, since a group cannot be part of a graph."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # not a str since torch 2.13


def store_of_all_ranks() -> dist.Store:
    """The store through which the ranks met; any thread may read and write it, and no rank waits for another.

    On the rank that serves it, it ends with this object.
    """
    return dist.distributed_c10d._get_default_store()


# --------------------------------------------------------------------------- the allocator

_CONFIGURATIONS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_GROWING = "expandable_segments:True"


def settle_segments(warn: Callable[[str], None]) -> None:
    """Let the allocator do without expandable segments if the present GPU's driver refuses them, as some machines' do.

    Without this, the first allocation fails. Call it before that.

    Args:
        warn: told that they are refused, by one rank of each host.
    """
    names = [name for name in _CONFIGURATIONS if _GROWING in os.environ.get(name, "")]
    if not names:
        return
    try:
        torch.empty(1, device="cuda")
        return
    except torch.OutOfMemoryError:  # other programs have it all; what needs memory reports that
        return
    except RuntimeError as error:
        reason = str(error).splitlines()[0]
    for name in names:
        os.environ[name] = os.environ[name].replace(_GROWING, "expandable_segments:False")
        torch._C._accelerator_setAllocatorSettings(os.environ[name])
    torch.empty(1, device="cuda")
    if os.environ.get("LOCAL_RANK", "0") == "0":
        warn(
            f"the GPU's driver refuses expandable segments ({reason}): memory is allocated without them, of which "
            "more may be lost to fragmentation"
        )


# --------------------------------------------------------------------------- FSDP's groups


class Gathering(NamedTuple):
    """The process group over which a module's parameters are gathered."""

    group: dist.ProcessGroup
    dimension: str
    """The mesh dimension that the process group spans. (The group's description does not tell: a dimension as large as
    the world uses the world's process group.)"""


def gathered_over(module: FSDPModule) -> Gathering | None:
    """The process group over which a module's parameters are gathered; None if there is nothing to gather."""
    for group in _param_groups(module):
        info = group.mesh_info
        if isinstance(info, FSDPMeshInfo) and info.shard_process_group.size() > 1:
            names = info.mesh.mesh_dim_names
            place = info.shard_mesh_dim
            return Gathering(info.shard_process_group, names[place] if names and place is not None else "")
    return None


def _param_groups(module: FSDPModule) -> list[FSDPParamGroup]:
    state = module._get_fsdp_state()
    if hasattr(state, "_fsdp_param_groups"):
        return state._fsdp_param_groups
    return [state._fsdp_param_group] if state._fsdp_param_group else []  # up to torch 2.11 a module had at most one


def has_pending_gather(module: FSDPModule) -> bool:
    """Whether parameters of a module were gathered ahead for a forward pass that has not come to it."""
    return any(group._all_gather_result is not None for group in _param_groups(module))


def find_gradient_types(module: FSDPModule) -> None:
    """Recompute the dtypes of a module's gradients: FSDP determines them once, from the parameters that train then."""
    for group in _param_groups(module):
        group._init_mp_dtypes()


def keep_gradients_in(module: FSDPModule, dtype: torch.dtype) -> None:
    """Set the dtype in which a module's group keeps reduced gradients and adds others to them, by default the
    parameters'; call it after the model's first forward pass, since FSDP determines dtypes then."""
    for group in _param_groups(module):
        group._orig_dtype = dtype  # up to torch 2.14
        parameters: list[Any] = group.fsdp_params
        for parameter in parameters:
            parameter.sharded_grad_dtype = dtype  # since torch 2.15
            parameter.sharded_param.grad_dtype = None  # it may have a gradient of another dtype


def compute_within(inner: FSDPModule, outer: nn.Module) -> None:
    """Gather and reduce the parameters of `inner` when `outer`, which contains it, computes.

    By default FSDP's hooks would run in the middle of the forward pass of `outer`: torch.compile would break the graph
    there, and activation checkpointing would repeat them in the recomputation and gather twice.
    """
    state: Any = inner._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    outer.register_forward_pre_hook(state._pre_forward, prepend=True, with_kwargs=True)
    outer.register_forward_hook(state._post_forward)


def modules_with_groups(model: nn.Module) -> list[FSDPModule]:
    """One module for each FSDP group with parameters, which several modules may share, in definition order."""
    first: dict[FSDPParamGroup, FSDPModule] = {}
    for module in fsdp_modules(model):
        for group in _param_groups(module):
            first.setdefault(group, module)
    return list(first.values())


def reduce_with(
    module: FSDPModule, reduction: ReduceScatter, finish: Callable[[Tensor], None]
) -> dist.ProcessGroup | None:
    """Reduce the gradients of a module's group by `reduction` over its shards, then by `finish` over its replicas.

    FSDP calls `finish` with this rank's flat shard, to be changed in place, before it sets the gradients. It has no
    hook in place of its own all-reduce over replicas, but it issues none if the group, unlike its parameters, knows of
    no replicas. Gradients that are also a sum over tensor-parallel ranks (norms, routers) are summed in reduce_dtype.

    Returns:
        The replicas; None if there are no others.
    """
    replicas = None
    for group in _param_groups(module):
        info = group.mesh_info
        if isinstance(info, HSDPMeshInfo):
            replicas = info.replicate_process_group
            group.mesh_info = FSDPMeshInfo(info.mesh, shard_mesh_dim=info.shard_mesh_dim)
            if group.post_forward_mesh_info is not None:  # the same, so that FSDP reshards over the same ranks
                group.post_forward_mesh_info = group.mesh_info
        _convert_before_tensor_parallel_sums(group)
    module.set_custom_reduce_scatter(reduction)
    module.set_all_reduce_hook(finish)
    return replicas


def _convert_before_tensor_parallel_sums(group: FSDPParamGroup) -> None:
    """Convert gradients to the dtype of the reduction before FSDP sums them over tensor-parallel ranks, not after.

    Up to torch 2.14 FSDP does either: the first where it keeps gradients of several micro-batches, as it does for a
    pipeline's stages. A group's gradients are of one dtype, so all of them are converted.
    """
    if FSDP_ADDS_UP and any(parameter.is_dtensor for parameter in group.fsdp_params):
        for parameter in group.fsdp_params:
            parameter.accumulate_unsharded_grad_if_needed = partial(_accumulate, parameter)  # type: ignore[method-assign]


FSDP_ADDS_UP = hasattr(FSDPParam, "accumulate_unsharded_grad_if_needed")
"""Whether FSDP adds up the gradients of several passes. Since torch 2.15 autograd does, in the dtype of the reduction;
what is summed over tensor-parallel ranks is of that dtype as well."""


def _accumulate(parameter: FSDPParam) -> None:
    """Add the last backward pass's gradient to what is kept, which is then of the dtype of the reduction."""
    FSDPParam.accumulate_unsharded_grad_if_needed(parameter)
    if hasattr(parameter, "_unsharded_param"):  # it has been gathered
        parameter.to_accumulated_grad_if_needed()


def reduce_gradients(model: nn.Module) -> None:
    """Reduce gradients that a backward pass left unsharded, as the last of a step would.

    Where FSDP adds up, all are converted first: a pass for the weights alone is one of autograd's for each few weights,
    and FSDP converts what has come after each, so that only the last ones are left in the compute dtype.
    """
    for module in modules_with_groups(model):
        module.set_requires_gradient_sync(True, recurse=False)
        for group in _param_groups(module):
            for parameter in group.fsdp_params if FSDP_ADDS_UP else ():
                _accumulate(parameter)
            group.post_backward()


def issuing_group() -> str | None:
    """Name of the FSDP group on whose behalf the caller issues a collective; None if there is none."""
    frame = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_name in ("unshard", "post_backward"):
            group = frame.f_locals.get("self")
            if isinstance(group, FSDPParamGroup):
                return group._module_fqn or "the root"
        frame = frame.f_back  # type: ignore[assignment]
    return None


# --------------------------------------------------------------------------- streams


class _GroupContext(FSDPCommContext):
    """A model's communication context with separate all-gather streams; everything else is the root's."""

    _OWN = ("all_gather_copy_in_stream", "all_gather_stream", "all_gather_state")

    def __init__(self, root: FSDPCommContext) -> None:
        device = root.device_handle
        vars(self)["_root"] = root
        self.all_gather_copy_in_stream = device.Stream(priority=-1)
        self.all_gather_stream = device.Stream(priority=-1)
        self.all_gather_state = None

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_root"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        target = vars(self) if name in self._OWN else vars(vars(self)["_root"])
        target[name] = value

    def wait_for(self, stream: torch.Stream) -> None:
        """Make later all-gathers wait for the work now queued on `stream`."""
        self.all_gather_copy_in_stream.wait_stream(stream)
        self.all_gather_stream.wait_stream(stream)

    def let_go(self) -> None:
        """Free the last all-gather's buffer, which FSDP keeps until its parameters are copied out."""
        if self.all_gather_state is not None:
            self.all_gather_copy_in_stream.wait_event(self.all_gather_state.event)
            self.all_gather_stream.wait_event(self.all_gather_state.event)
            self.all_gather_state = None


def stream_for_each_group(root: FSDPModule) -> int:
    """Give the FSDP groups of each process group a separate all-gather stream; see `streams.separate_streams`.

    The first process group keeps the stream that FSDP made. At the ends of a forward pass, hooks on the root do for the
    other streams what FSDP does for its own: all-gathers wait for the optimizer step, and the last buffer is freed.

    Returns:
        The number of streams.

    Raises:
        ValueError: `root` is inside another FSDP model, or has separate streams already.
    """
    state = root._get_fsdp_state()
    state._lazy_init()
    if not state._is_root:
        raise ValueError("this module is inside another FSDP model, whose streams it shares; give that model")
    modules = fsdp_modules(cast(nn.Module, root))
    if any(isinstance(group.comm_ctx, _GroupContext) for module in modules for group in _param_groups(module)):
        raise ValueError("this model has separate streams already")
    contexts: dict[dist.ProcessGroup, FSDPCommContext] = {}
    for module in modules:
        over = gathered_over(module)
        if over is None:
            continue
        if over.group not in contexts:
            contexts[over.group] = _GroupContext(state._comm_ctx) if contexts else state._comm_ctx
        for group in _param_groups(module):
            group.comm_ctx = contexts[over.group]
    added = [context for context in contexts.values() if isinstance(context, _GroupContext)]

    def before_forward(*_: Any) -> None:
        for context in added:
            context.wait_for(context.device_handle.current_stream())

    def after_forward(*_: Any) -> None:
        for context in added:
            context.let_go()

    if added:
        cast(nn.Module, root).register_forward_pre_hook(before_forward, prepend=True)
        cast(nn.Module, root).register_forward_hook(after_forward)
    return len(contexts)


def fsdp_modules(model: nn.Module) -> list[FSDPModule]:
    """The modules of a model to which `fully_shard` was applied, itself included, in definition order."""
    return [module for module in model.modules() if isinstance(module, FSDPModule)]


# --------------------------------------------------------------------------- process groups


def store_of_the_job() -> dist.Store:
    """The store through which the process group was formed, on a separate connection, on which one thread may block."""
    return cast(Any, store_of_all_ranks()).clone()


def process_groups() -> list[dist.ProcessGroup]:
    """All process groups that this rank is in."""
    return list(dist.distributed_c10d._world.pg_map)


@contextmanager
def sharing_groups(apart: Collection[str]) -> Iterator[None]:
    """Let the dimensions of the meshes built inside this context share a process group if they have the same ranks.

    By default torch makes a group for each dimension. All ranks make all groups, those of others included, in the same
    order, so they share alike.

    Args:
        apart: names of dimensions whose groups these alone share.
    """
    made: dict[tuple[object, ...], Any] = {}
    make = device_mesh.new_group

    def shared(ranks: Sequence[int], backend: str | None, group_desc: str, **options: Any) -> Any:
        is_apart = len(ranks) > 1 and group_desc.removeprefix("mesh_") in apart
        key = (*ranks, backend, is_apart)
        if key not in made:
            made[key] = make(ranks=ranks, backend=backend, group_desc=group_desc, **options)
        return made[key]

    with patch.object(device_mesh, "new_group", shared):
        yield


def timeouts_of(group: dist.ProcessGroup) -> dict[str, timedelta]:
    """How long a collective of a group may take, by device type; empty for backends that never wait."""
    options = {device.type: getattr(group._get_backend(device), "options", None) for device in group._device_types}
    return {device: its._timeout for device, its in options.items() if its is not None}


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set how long collectives of a group may take, on each of its backends."""
    if timeouts_of(group):
        # Public since torch 2.15.
        set_for = getattr(dist, "set_timeout", None) or dist.distributed_c10d._set_pg_timeout
        set_for(timeout, group)


def _gpu_backends() -> list[Any]:
    """The NCCL backends of this rank's process groups, in the order in which they were made."""
    backends = [backend for group in process_groups() for backend in _backends_of(group)]
    return [backend for backend in backends if backend.name() == "nccl"]


def uses_nccl() -> bool:
    """Whether this rank communicates on a GPU."""
    return bool(_gpu_backends())


def abort_collectives() -> None:
    """Abort NCCL's communicators: whoever waits in one of their collectives goes on, and the next one raises.

    torch's `_abort_process_group` forgets the groups, too, which a thread that still runs asks for its rank. As there,
    all are aborted in one group of calls, since they might wait for each other (pytorch/pytorch#119797).
    """
    backends = _gpu_backends()
    if not backends:
        return
    backends[0]._group_start()
    for backend in reversed(backends):
        backend.abort()
    backends[0]._group_end()


def recorded_by_nccl() -> bytes:
    """What torch's flight recorder has of this rank's collectives on a GPU, as `torchfrtrace` reads it."""
    return cast(Any, torch._C._distributed_c10d)._dump_nccl_trace() if uses_nccl() else b""


def collectives_issued() -> dict[str, int]:
    """The number of collectives that this rank has issued in each of its groups; torch counts them anyway."""
    issued = {}
    for group in process_groups():
        backends = _backends_of(group)
        for backend in backends:
            by = f" by {backend.name()}" if len(backends) > 1 else ""
            issued[_described(group) + by] = backend._get_sequence_number_for_group()
    return issued


def _backends_of(group: dist.ProcessGroup) -> list[Any]:
    """The backends of a group: on GPUs NCCL and gloo, each with numbers of its own."""
    backends = [cast(Any, group)._get_backend(device) for device in group._device_types]
    return list({backend.name(): backend for backend in backends}.values())


def _described(group: dist.ProcessGroup) -> str:
    """A description of a group that is the same on all of its ranks and unique to the group."""
    ranks = dist.get_process_group_ranks(group)
    shown = ", ".join(map(str, ranks)) if len(ranks) <= 8 else f"{ranks[0]}, {ranks[1]}, ... {ranks[-1]}"
    return f"{group.group_desc} {group.group_name} of ranks {shown}"


def last_collectives(count: int) -> list[str]:
    """The last `count` collectives and messages that this rank issued, oldest first, from torch's flight recorder.

    The recorder is on unless TORCH_FR_BUFFER_SIZE or TORCH_NCCL_TRACE_BUFFER_SIZE is 0.
    """
    recorders = [getattr(torch._C._distributed_c10d, name, None) for name in ("_dump_fr_trace", "_dump_nccl_trace")]
    entries = [entry for dump in recorders if dump for entry in pickle.loads(dump()).get("entries", [])]
    entries.sort(key=lambda entry: entry["time_created_ns"])
    return [_line_of(entry) for entry in entries[-count:]]


def _line_of(entry: dict[str, Any]) -> str:
    frames = [
        frame for frame in entry["frames"] if "/torch/" not in frame["filename"] and frame["filename"] != __file__
    ]
    caller = f", for {frames[0]['filename']}:{frames[0]['line']} ({frames[0]['name']})" if frames else ""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    state = "completed" if entry["retired"] else entry["state"]
    group = " ".join(reversed(entry["process_group"]))
    return f"{group}: number {number}, {entry['profiling_name']} {entry['input_sizes']}, {state}{caller}"


# --------------------------------------------------------------------------- autograd


def is_in_backward() -> bool:
    """Whether this thread is in a backward pass, for example because activation checkpointing repeats a block."""
    return torch._C._current_graph_task_id() != -1


# --------------------------------------------------------------------------- pipelines


def has_zero_bubble() -> bool:
    """Whether zero-bubble schedules work. On torch 2.11 their backward accepts no autograd.Function, which the loss is,
    and no arguments other than tensors, and a rank sends to itself, which gloo cannot do."""
    return TorchVersion(torch.__version__) >= "2.13"


# --------------------------------------------------------------------------- attention


def fuses_grouped_queries_in_float32() -> bool:
    """Whether a GPU's memory-efficient attention takes fewer key than query heads: no other kernel takes float32."""
    return TorchVersion(torch.__version__) >= "2.14"


# --------------------------------------------------------------------------- FLOPs


def count_grouped_queries() -> None:
    """Make torch count the FLOPs of attention with fewer key than query heads.

    The partitioner counts them to choose what to keep within a memory budget; torch 2.11 raises for grouped queries
    ("shapes are incompatible"). They cost as much as with one key head per query head.
    """
    for name in ("sdpa_flop_count", "sdpa_backward_flop_count"):
        count = getattr(flop_counter, name)
        if TorchVersion(torch.__version__) < "2.13" and not hasattr(count, "__wrapped__"):
            setattr(flop_counter, name, _with_keys_repeated(count))


def _with_keys_repeated(count: Callable[..., int]) -> Callable[..., int]:
    @wraps(count)
    def counted(*shapes: Sequence[int]) -> int:
        heads = max(shape[1] for shape in shapes)
        return count(*((batch, heads, *rest) for batch, _, *rest in shapes))

    return counted


# --------------------------------------------------------------------------- what torch remembers


def forget_process_groups() -> None:
    """Clear torch's caches that refer to process groups that no longer exist.

    DTensor caches how it shards and redistributes on each mesh, and compiled code caches its guards. The next mesh may
    compare equal to this one and yet have groups of other names. Each gloo group that a cache keeps alive also keeps
    its threads, which wake two hundred times a second: after a hundred meshes they took more than half of a machine's
    time.
    """
    _clear_sharding_prop_cache()
    cast(Any, _redistribute._gen_transform_infos).cache_clear()
    if hasattr(_redistribute, "clear_redistribute_planner_cache"):  # torch 2.13
        _redistribute.clear_redistribute_planner_cache()
    if hasattr(_collective_utils.MeshTopoInfo.build_from_mesh, "cache_clear"):
        _collective_utils.MeshTopoInfo.build_from_mesh.cache_clear()
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


# --------------------------------------------------------------------------- listening

COLLECTIVES = (
    "_allgather_base_",
    "_reduce_scatter_base_",
    "allgather_",
    "allgather_coalesced_",
    "allgather_into_tensor_coalesced_",
    "allreduce_",
    "allreduce_coalesced_",
    "alltoall_",
    "alltoall_base_",
    "barrier",
    "broadcast_",
    "gather_",
    *(["gather_into_tensor_"] if hasattr(torch.ops.c10d, "gather_into_tensor_") else []),  # torch 2.15
    "recv_",
    "reduce_",
    "reduce_scatter_",
    "reduce_scatter_tensor_coalesced_",
    "scatter_",
    "send",
)
"""The operators in torch's namespace `c10d` through which every collective and message of every backend goes."""

Listener = Callable[[str, dist.ProcessGroup, tuple[Any, ...]], None]
"""Called with the operator's name, the process group, and the operator's arguments."""
Timer = Callable[[str, dist.ProcessGroup, tuple[Any, ...], dist.Work], None]
"""Called with the same arguments, and with the handle to wait for."""


class _Ears:
    """The current listeners. The lists are replaced, never mutated: another thread may be iterating over one."""

    before: ClassVar[list[Listener]] = []
    after: ClassVar[list[Timer]] = []
    kernels: ClassVar[Library | None] = None


def prepare_listening() -> None:
    """Insert a kernel between the operators and their backends, once for the life of the process.

    Call it before a second thread issues collectives. The kernels are never removed, since torch swaps and frees them
    without a lock: a thread about to call one could run another operator's kernel, or freed memory. The dispatch key is
    ADInplaceOrView: nothing else uses it for these operators, and neither `no_grad` nor compiled code skips it. (A
    dispatch mode would make compiled blocks run eagerly; torch's flight recorder does not see gloo.)
    """
    if _Ears.kernels is None:
        _Ears.kernels = Library("c10d", "IMPL")
        for name in COLLECTIVES:
            operator = getattr(torch.ops.c10d, name).default
            place = [argument.name for argument in operator._schema.arguments].index("process_group")
            _Ears.kernels.impl(name, partial(_heard, name, operator, place), "ADInplaceOrView", with_keyset=True)


@contextmanager
def listening(before: Listener | None = None, after: Timer | None = None) -> Iterator[None]:
    """Call `before` and `after` around the issue of each collective and message of this process, from any code.

    These contexts may be nested.
    """
    prepare_listening()
    _Ears.before = [*_Ears.before, *([before] if before else [])]
    _Ears.after = [*_Ears.after, *([after] if after else [])]
    try:
        yield
    finally:
        _Ears.before = [listener for listener in _Ears.before if listener is not before]
        _Ears.after = [timer for timer in _Ears.after if timer is not after]


def _heard(name: str, operator: Any, place: int, keys: Any, *arguments: Any) -> Any:
    before = _Ears.before
    after = _Ears.after
    if not before and not after:
        return operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)
    group = dist.ProcessGroup.unbox(arguments[place])
    for listener in before:
        listener(name, group, arguments)
    result = operator.redispatch(keys & torch._C._after_ADInplaceOrView_keyset, *arguments)
    if after:
        work = dist.Work.unbox(result[-1] if isinstance(result, tuple) else result)
        for timer in after:
            timer(name, group, arguments, work)
    return result


def tensors_of(arguments: tuple[Any, ...]) -> list[Tensor]:
    """The tensors among an operator's arguments, including those in nested lists."""
    found: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            found.append(argument)
        elif isinstance(argument, (list, tuple)):
            found += tensors_of(tuple(argument))
    return found


def world_name() -> str:
    """Name of the group of all ranks."""
    assert dist.group.WORLD is not None
    return str(dist.group.WORLD.group_name)
