"""What parallelisms/torch_internals.py trusts torch's private parts to be. If one of these fails under a new torch,
that file is the only one to look at; the distributed tests of streams and order guard show whether the values hold."""

import inspect
import threading
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultAllGather, DefaultReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPCommContext, FSDPParamGroup
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.utils import flop_counter

from parallelisms.torch_internals import (
    COLLECTIVES,
    collectives_issued,
    count_grouped_queries,
    last_collectives,
    listening,
    modules_with_groups,
    process_groups,
    reduce_gradients,
    reduce_with,
    set_timeout,
    store_of_the_job,
    tensors_of,
    timeouts_of,
)

NOT_IN_A_STEP = {"check_for_nan", "monitored_barrier_", "recv_any_source_"}


def test_fsdp_has_the_parts_that_are_asked_of_it():
    for owner, names in {
        FSDPModule: ("_get_fsdp_state", "_set_unshard_async_op", "set_custom_all_gather", "set_custom_reduce_scatter")
        + ("set_all_reduce_hook", "set_requires_gradient_sync"),
        FSDPState: ("_lazy_init", "_pre_forward", "_post_forward"),
        FSDPCommContext: ("lazy_init", "get_all_gather_streams"),
        FSDPParamGroup: ("unshard", "wait_for_unshard", "post_backward"),
    }.items():
        missing = [name for name in names if not hasattr(owner, name)]
        assert not missing, f"torch {torch.__version__}: {owner.__name__} has lost {missing}"


def test_the_gathers_ask_the_context_of_their_group_for_streams():
    """A context that stands before the model's must be asked for all that it replaces, and nothing may go past it."""
    own = {"all_gather_copy_in_stream", "all_gather_stream", "all_gather_state"}
    context = FSDPCommContext()
    context.lazy_init(torch.device("cpu"))
    assert own < {*dir(context)}, f"torch {torch.__version__}: FSDPCommContext is another"
    assert "comm_ctx.get_all_gather_streams" in inspect.getsource(FSDPParamGroup.unshard)
    from_outside = inspect.getsource(FSDPParamGroup)
    from_inside = inspect.getsource(FSDPCommContext)  # since torch 2.15
    for name in own:
        asked = f"self.comm_ctx.{name}" in from_outside or f"self.{name}.wait_event" in from_inside
        assert asked, f"torch {torch.__version__}: {name}"


def test_the_collectives_can_be_replaced():
    for default, given in {
        DefaultAllGather: ["self", "output_tensor", "input_tensor", "group", "async_op"],
        DefaultReduceScatter: ["self", "output_tensor", "input_tensor", "group", "op", "async_op"],
    }.items():
        assert list(inspect.signature(default.__call__).parameters) == given, f"torch {torch.__version__}: {default}"


def test_a_group_that_knows_of_no_replicas_leaves_them_to_the_hook(ranks):
    """And asks the reduction only where there are several shards, sets the gradients to what the hook leaves in its
    argument, and reduces what a backward pass left unsharded."""
    for n_ranks, shards, reduced in ((2, 1, False), (4, 2, True)):
        for calls, values, replicas in ranks(n_ranks, reduced_by_hooks, shards):
            assert replicas == 2
            assert calls == ["reduction", "hook"] * 2 if reduced else ["hook"] * 2
            assert values == {7.0}


class Recording(DefaultReduceScatter):
    """A reduction that notes its calls."""

    def __init__(self, calls: list[str]) -> None:
        self.calls = calls

    def __call__(self, *arguments: object, **settings: object) -> object:
        self.calls.append("reduction")
        return super().__call__(*arguments, **settings)


def reduced_by_hooks(shards: int) -> tuple[list[str], set[float], int]:
    """The calls in two backward passes, the second without reduction, then one; the gradients; the replicas."""
    calls: list[str] = []
    mesh = init_device_mesh("cpu", (2, shards), mesh_dim_names=("replicas", "shard"))
    model = torch.nn.Linear(4, 4)
    fully_shard(model, mesh=mesh)
    (module,) = modules_with_groups(model)

    def finish(shard: torch.Tensor) -> None:
        calls.append("hook")
        shard.fill_(7.0)

    replicas = reduce_with(module, Recording(calls), finish)
    collectives = []
    with listening(lambda name, group, given: collectives.append(name)):
        model(torch.ones(1, 4)).sum().backward()
        for parameter in model.parameters():
            parameter.grad = None
        model.set_requires_gradient_sync(False)
        model(torch.ones(1, 4)).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        reduce_gradients(model)
    assert "allreduce_" not in collectives
    values = {value for parameter in model.parameters() for value in parameter.grad.to_local().flatten().tolist()}
    return calls, values, replicas.size()


def test_every_collective_of_torch_is_listened_to():
    schemas = [str(schema.name) for schema in torch._C._jit_get_all_schemas()]
    there = {name.removeprefix("c10d::") for name in schemas if name.startswith("c10d::")}
    assert there - NOT_IN_A_STEP == set(COLLECTIVES), f"torch {torch.__version__} has other collectives"


def test_a_listener_hears_collectives_of_python_and_of_cpp_once_and_no_more_after_it():
    heard = []
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        x = torch.ones(3)
        with listening(lambda name, group, given: heard.append((name, group.size(), tensors_of(given)[0].shape))):
            dist.all_reduce(x)
            with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():  # as in compiled code
                summed = torch.ops._c10d_functional.all_reduce(x, "sum", dist.group.WORLD.group_name)
            torch.ops._c10d_functional.wait_tensor(summed)
        dist.all_reduce(x)
    finally:
        dist.destroy_process_group()
    assert heard == [("allreduce_", 1, (3,))] * 2


def test_process_groups_have_a_timeout_a_count_and_a_record_of_their_collectives():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timedelta(seconds=50))
    try:
        group = dist.new_group(backend="gloo")
        assert set(process_groups()) == {dist.group.WORLD, group}
        assert set(timeouts_of(dist.group.WORLD).values()) == {timedelta(seconds=50)}
        assert set(timeouts_of(group).values()) == {timedelta(minutes=30)}, "torch has another default: see mesh.py"
        set_timeout(group, timedelta(seconds=7))
        assert set(timeouts_of(group).values()) == {timedelta(seconds=7)}
        dist.all_reduce(torch.ones(5), group=group)
        dist.barrier()
        dist.all_reduce(torch.ones(6), group=group)
        assert sorted(collectives_issued().values()) == [1, 2]
        deadline = time.monotonic() + 10.0
        while "completed" not in last_collectives(2)[-1] and time.monotonic() < deadline:
            time.sleep(0.01)  # torch's own thread writes the record a moment later
        *_, last = last_collectives(2)
        assert "number 2, gloo:all_reduce [[6]], completed, for" in last
        assert __file__ in last
        other = store_of_the_job()
        other.set("key", "value")
        assert dist.distributed_c10d._get_default_store().get("key") == b"value"
    finally:
        dist.destroy_process_group()


@pytest.mark.slow
def test_listening_begins_and_ends_beside_a_thread_that_issues_collectives(ranks):
    """As the writer of checkpoints does amid guarded steps. Kernels that come and go lead it to another operator's."""
    assert ranks(1, broadcasts_in_a_thread, 3.0) == [[]]


def broadcasts_in_a_thread(seconds: float) -> list[str]:
    """Listen again and again; returns what has gone wrong in the thread."""
    errors: list[str] = []
    group, ended = dist.new_group(backend="gloo"), threading.Event()

    def write() -> None:
        while not ended.is_set():
            try:
                dist.broadcast_object_list([1], src=0, group=group)
            except Exception as error:
                errors.append(str(error))
                return

    thread = threading.Thread(target=write)
    thread.start()
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline and not errors:
        with listening(lambda name, group, given: None):
            dist.all_reduce(torch.ones(2))
            time.sleep(0.001)
    ended.set()
    thread.join()
    return errors


@pytest.mark.parametrize("kv_heads", [8, 2, 1])
def test_attention_of_grouped_queries_has_the_flops_of_as_many_keys(kv_heads):
    """Two products of (8 heads, 16, 64) with (64, 16) forward, five backward; by the formulas that torch looks up."""
    count_grouped_queries()
    q, kv = (2, 8, 16, 64), (2, kv_heads, 16, 64)
    product = 2 * 2 * 8 * 16 * 64 * 16
    assert flop_counter.sdpa_flop_count(q, kv, kv) == 2 * product
    assert flop_counter.sdpa_backward_flop_count(q, q, kv, kv) == 5 * product
