"""Memory and cores that a process may use, in control groups of both versions."""

import os
import subprocess
import sys
from functools import partial

import pytest

from configs.machine import available_cores, free_memory


def write_files(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


def test_what_is_free(tmp_path):
    """The least of the machine's memory and of what each group around the process leaves, without files' old pages."""
    job = "sys/fs/cgroup/job"
    step = f"{job}/step_0"

    write = partial(write_files, tmp_path)
    write({"proc/meminfo": "MemTotal:   900 kB\nMemAvailable:   500 kB\n", "proc/self/cgroup": "0::/job/step_0\n"})
    assert free_memory(tmp_path) == 500 * 1024
    write(
        {
            f"{step}/memory.max": "max\n",
            f"{step}/memory.current": "1000\n",
            f"{step}/memory.stat": "anon 1000\ninactive_file 0\n",
        }
    )
    assert free_memory(tmp_path) == 500 * 1024
    write({f"{step}/memory.max": "4000\n"})
    assert free_memory(tmp_path) == 3000
    write({f"{step}/memory.stat": "anon 300\nfile 700\ninactive_file 600\nactive_file 100\n"})
    assert free_memory(tmp_path) == 3600
    write(
        {f"{job}/memory.max": "5000\n", f"{job}/memory.current": "2500\n", f"{job}/memory.stat": "inactive_file 600\n"}
    )
    assert free_memory(tmp_path) == 3100
    assert free_memory() > 1 << 20


@pytest.mark.parametrize("name", ["/", "/of/the/host"])  # a container may see its own name, or that on the host
def test_what_is_free_in_control_groups_of_version_1(tmp_path, name):
    files = {
        "proc/meminfo": "MemTotal:   900 kB\nMemAvailable:   500 kB\n",
        "proc/self/cgroup": f"9:name=systemd:/\n8:pids:/\n3:memory:{name}\n0::{name}\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "3000\n",
        "sys/fs/cgroup/memory/memory.stat": "inactive_file 5\ntotal_inactive_file 400\n",
    }
    write_files(tmp_path, files)
    assert free_memory(tmp_path) == 500 * 1024
    (tmp_path / "sys/fs/cgroup/memory/memory.limit_in_bytes").write_text("4000\n")
    assert free_memory(tmp_path) == 1400


@pytest.fixture
def eight_cores(monkeypatch):
    """A process that is bound to eight cores of 128."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)), raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 128)


@pytest.mark.usefixtures("eight_cores")
def test_cores(tmp_path):
    assert available_cores(tmp_path) == 8  # no control groups, as on macOS
    write_files(tmp_path, {"proc/self/cgroup": "0::/pod/container\n"})
    assert available_cores(tmp_path) == 8
    write_files(tmp_path, {"sys/fs/cgroup/pod/container/cpu.max": "max 100000\n"})
    assert available_cores(tmp_path) == 8
    write_files(tmp_path, {"sys/fs/cgroup/pod/container/cpu.max": "350000 100000\n"})
    assert available_cores(tmp_path) == 4
    write_files(tmp_path, {"sys/fs/cgroup/pod/cpu.max": "50000 100000\n"})
    assert available_cores(tmp_path) == 1


@pytest.mark.usefixtures("eight_cores")
def test_cores_in_control_groups_of_version_1(tmp_path):
    group = "sys/fs/cgroup/cpu,cpuacct/job"
    files = {
        "proc/self/cgroup": "4:cpu,cpuacct:/job\n3:cpuset:/job\n0::/\n",
        f"{group}/cpu.cfs_quota_us": "-1\n",
        f"{group}/cpu.cfs_period_us": "100000\n",
    }
    write_files(tmp_path, files)
    assert available_cores(tmp_path) == 8
    write_files(tmp_path, {f"{group}/cpu.cfs_quota_us": "200000\n"})
    assert available_cores(tmp_path) == 2


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system binds no processes")
def test_a_process_that_is_bound_to_one_core():
    code = "from configs.machine import available_cores; print(available_cores())"
    bound = {min(os.sched_getaffinity(0))}
    told = subprocess.run(
        [sys.executable, "-c", code],
        preexec_fn=lambda: os.sched_setaffinity(0, bound),
        capture_output=True,
        text=True,
        check=True,
    )
    assert told.stdout == "1\n"
