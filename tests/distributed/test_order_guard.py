"""The order guard on live collectives."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from configs.errors import UserError
from configs.layout import mesh_sizes
from configs.load import load
from parallelisms.mesh import build_mesh
from scripts.parity_compare import attention_that_compiles
from trainer.data.loader import build_loader
from trainer.step import build_learner


def guarded_step(words: tuple[str, ...], is_swapped: bool = False) -> tuple[str, bool, list[str]]:
    """What the guard says of a step, whether the weights changed, and the log of what was compared.

    Args:
        is_swapped: rank 1 computes the second layer before the first: every gather has the size that rank 0 expects.
    """
    n_ranks = dist.get_world_size()
    config = load("parity.toml", words, n_ranks).config
    mesh = build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu"))
    learner = build_learner(config, mesh)
    if is_swapped and dist.get_rank() == 1:
        layers = learner.passes.model.layers._modules
        layers.update({name: layers.pop(name) for name in ("1", "0", "2", "3")})
    before = {name: p.to_local().detach().clone() for name, p in learner.parameters.items()}
    compared = []
    compare = learner.guard.compare

    def keep_log() -> None:
        compared.extend(learner.guard.log)
        compare()

    learner.guard.compare = keep_log
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    try:
        with attention_that_compiles():
            learner.step(next(loader), lr=1e-3)
        said = ""
    except UserError as error:
        said = str(error)
    loader.close()
    changed = any(not torch.equal(before[name], p.to_local()) for name, p in learner.parameters.items())
    return said, changed, [issued.what for issued in compared]


@pytest.mark.slow
def test_two_swapped_gathers_stop_the_run_before_the_update(ranks):
    # A prefetched group would be gathered twice by the rank that goes another way, and the sizes would fit no more.
    words = ("--comm.prefetch", "0")
    results = ranks(2, guarded_step, words, True)
    said = {each[0] for each in results}
    assert len(said) == 1  # all ranks stop, with the same words
    (message,) = said
    assert "rank 1 issued as number" in message
    assert "for layers.1 (among ranks 0, 1), where rank 0 issued allgather_base" in message
    assert "for layers.0 (among ranks 0, 1)" in message
    assert [changed for _, changed, _ in results] == [False, False]
    unguarded = ranks(2, guarded_step, (*words, "--comm.order_guard_interval", "0"), True)
    assert [(said, changed, log) for said, changed, log in unguarded] == [("", True, [])] * 2


def operators(results) -> set[str]:
    return {what.split(" ")[0] for _, _, log in results for what in log}


def test_it_sees_what_every_technique_issues(ranks):
    results = ranks(4, guarded_step, ("--mesh.pp", "2"))
    assert [(said, changed) for said, changed, _ in results] == [("", True)] * 4
    assert operators(results) == {"allgather_base", "reduce_scatter_base", "allreduce", "message"}
    results = ranks(4, guarded_step, ("--mesh.cp", "2", "--context.method", "all_to_all"))
    assert operators(results) >= {"allgather_base", "reduce_scatter_base", "allreduce", "alltoall_base"}
    assert any("parallelisms/attention/context.py" in what for _, _, log in results for what in log)


@pytest.mark.slow
def test_it_sees_collectives_inside_compiled_blocks(ranks):
    words = ("--mesh.tp", "2", "--training.micro_batch_size", "4")
    eager = ranks(2, guarded_step, words)
    compiled = ranks(2, guarded_step, (*words, "--compile.enable", "true"))
    assert {said for said, _, _ in eager + compiled} == {""}
    # In a block's forward pass both parts gather the sequence and scatter their sums, and backward does the reverse.
    for results in (eager, compiled):
        assert sum("allgather" in what for what in results[0][2]) >= 4 * (2 + 2)
        assert sum("reduce_scatter" in what for what in results[0][2]) >= 4 * (2 + 2)


def guarded_steps_beside_a_thread(n_steps: int) -> list[bool]:
    """Whether each collective that the guard noted was a background thread's; the thread has a group of its own.

    It speaks throughout the steps, as the one that writes checkpoints does, on each rank at other moments.
    """
    n_ranks = dist.get_world_size()
    config = load("parity.toml", ("--comm.order_guard_interval", "1"), n_ranks).config
    mesh = build_mesh(mesh_sizes(config, n_ranks), torch.device("cpu"))
    learner = build_learner(config, mesh)
    writers, noted, ended = dist.new_group(backend="gloo"), [], threading.Event()
    note = learner.guard._note

    def keep(operator, group, arguments) -> None:
        before = len(learner.guard.log)
        note(operator, group, arguments)
        noted.extend(group is writers for _ in learner.guard.log[before:])

    def write() -> None:
        everybody_ended = False
        while not everybody_ended:
            time.sleep(0.003 * (1 + dist.get_rank()))
            votes = [False] * n_ranks
            dist.all_gather_object(votes, ended.is_set(), group=writers)
            everybody_ended = all(votes)

    learner.guard._note = keep
    loader = build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0)
    thread = threading.Thread(target=write)
    thread.start()
    try:
        for _ in range(n_steps):
            learner.step(next(loader), lr=1e-3)
    finally:
        ended.set()
        thread.join()
        loader.close()
    return noted


@pytest.mark.slow
def test_what_other_threads_issue_on_groups_of_their_own_is_not_compared(ranks):
    # The checkpoint writer's collectives, amid a guarded step, once ended every run of several ranks at default
    # settings: the step after a save is a guarded one whenever the two intervals meet.
    for noted in ranks(2, guarded_steps_beside_a_thread, 8):
        assert noted
        assert not any(noted)
