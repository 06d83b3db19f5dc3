"""On GPUs no collective tells that a rank has failed: the others are ended by their watchdogs, and leave a trace."""

import json
import os
import pickle
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from parallelisms.torch_internals import abort_collectives, collectives_issued, recorded_by_nccl, uses_nccl
from tests.null_gpu.test_axes import SMALL

ROOT = Path(__file__).resolve().parents[2]
SECONDS = 10
"""From the end of the failed rank to that of the others: 3 on a quiet machine."""


def abort() -> tuple[bool, str, list[str]]:
    """On a rank: whether its groups use NCCL, what a collective says after they were aborted, and what was recorded."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    group = dist.new_group(backend="nccl")
    tensor = torch.ones(4, device="cuda")
    dist.all_reduce(tensor)
    dist.all_reduce(tensor, group=group)
    recorded = pickle.loads(recorded_by_nccl())
    abort_collectives()
    said = ""
    for each in (None, group):
        try:
            dist.all_reduce(tensor, group=each)
        except dist.DistBackendError as error:
            said += str(error)
    return uses_nccl(), said, [entry["profiling_name"] for entry in recorded["entries"]]


def test_every_communicator_is_aborted_and_the_ranks_know_each_other_still(fresh_null_rank):
    ((on_gpu, said, recorded),) = fresh_null_rank(1, abort)
    assert on_gpu
    assert said.count("communicator was aborted") == 2
    assert recorded.count("nccl:all_reduce") == 2


def issued() -> dict[str, int]:
    """On a rank: what it counts after two collectives on the GPU and one on the CPU, in one group."""
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    for _ in range(2):
        dist.all_reduce(torch.ones(4, device="cuda"))
    before = collectives_issued()
    dist.all_reduce(torch.ones(4))
    after = collectives_issued()
    return {name.rpartition(" by ")[2]: after[name] - before[name] for name in after}


def test_collectives_on_the_cpu_are_counted_apart(fresh_null_rank):
    """A rank that lacks in the vote on a save has issued as many of NCCL's as the others."""
    assert fresh_null_rank(1, issued) == [{"nccl": 0, "gloo": 1}]


@pytest.mark.long
def test_a_rank_that_fails_ends_the_others_in_seconds(null_gpus, tmp_path):
    """Rank 0 is stuck in a launch, where no exception reaches it."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    words = f"--config llama_1b.toml {SMALL} --compile.enable false --mesh.dp_shard 2 --training.steps 5"
    words += f" --job.output_dir {tmp_path}/run --checkpoint.interval 0 --job.timeout_seconds 600"
    words += " --lr_schedule.total_steps 5 --lr_schedule.warmup_steps 1"
    source = ["--data.sources", '[{name = "random", kind = "synthetic"}]', "--tokenizer.path", '""']
    command = [sys.executable, str(ROOT / "tests" / "null_gpu" / "one_fails.py"), *words.split(), *source]
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "LOCAL_WORLD_SIZE": "2"}
    ranks = []
    for rank in range(2):
        own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        env = os.environ | null_gpus | world | own
        ranks.append(subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
    said = ranks[1].communicate(timeout=300)[0]
    failed = time.monotonic()
    said += ranks[0].communicate(timeout=300)[0]
    assert time.monotonic() - failed < SECONDS, said
    assert [process.returncode for process in ranks] == [1, 1], said
    found = json.loads((tmp_path / "run" / "status.json").read_text())
    assert found["state"] == "failed"
    assert "planted" in found["reason"]
    [folder] = (tmp_path / "run" / "hangs").iterdir()
    text = (folder / "rank-00000.txt").read_text()
    assert "one_fails.py" in text.partition("Python stacks:")[2]
    assert (folder / "rank-00001.txt").read_text().splitlines()[0].endswith("planted; training after step 1 for 0 s")
    for rank in range(2):
        trace = pickle.loads((folder / f"nccl_trace_rank_{rank}").read_bytes())
        assert any("all_gather" in entry["profiling_name"] for entry in trace["entries"])
    assert "TORCH_DIST_USE_NCCL2 = 0\n" in said
    assert "TORCH_NCCL_DUMP_ON_TIMEOUT = 1" in said
    assert "TORCH_NCCL_ASYNC_ERROR_HANDLING = 0 (from the environment)" in said
