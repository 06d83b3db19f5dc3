"""A real Slurm of a few nodes on this machine: the controller, and one daemon a node, which runs the jobs as processes.

It needs root on Linux, for two things that each node's daemon sees in a mount namespace of its own: its helper program,
whose place (/usr/sbin) is compiled in, and /etc/hosts with the names of the nodes, which are addresses to torchrun.
The daemons listen on 127.0.0.1 alone, since without Slurm's keys whoever reaches them may run jobs.
"""

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from tests.debian import Unavailable

PACKAGES = ("slurmctld", "slurmd", "slurm-client")
"""Slurm 22.05 in Debian 12: 4 MB to download, 14 MB unpacked."""
WAIT_SECONDS = 300
"""For anything that a job or a daemon does; a machine may be busy."""
BEGIN_SECONDS = 5
"""Slurm holds a job that was requeued for as long as a credential lives, by default two minutes; below 5 it is that."""

# The first job has a number that no other Slurm on this machine gives, since slurm.sh makes a port of it.
CONFIG = """\
ClusterName=keel
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
AuthType=auth/none
AuthInfo=cred_expire={begin}
CredType=cred/none
SlurmUser=root
SlurmdUser=root
PluginDir={plugins}
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd-%n.log
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool-%n
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=sched_interval=2
FirstJobId={port}
SwitchType=switch/none
MpiDefault=none
ReturnToService=0
SlurmdTimeout=60
KillWait=5
MailProg=/bin/true
SlurmdParameters=config_overrides
{nodes}
PartitionName=debug Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""


class Cluster:
    """Nodes node1, node2, ... with 64 CPUs each by their own account, and no GPU."""

    def __init__(self, packages: Path, folder: Path, nodes: int) -> None:
        if os.geteuid() != 0:
            raise Unavailable("Slurm's daemons need root here")
        if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0:
            raise Unavailable("this root may not make mount namespaces")
        self.packages = packages
        self.folder = folder
        self.names = [f"node{number + 1}" for number in range(nodes)]
        libraries = next((packages / "usr/lib").glob("*/slurm-wlm")).parent
        self.environment = os.environ | {
            "PATH": f"{packages}/usr/bin:{packages}/usr/sbin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{libraries}/slurm-wlm",
            "SLURM_CONF": str(folder / "slurm.conf"),
        }
        self._daemons: list[subprocess.Popen] = []
        self._configure(libraries / "slurm-wlm")

    def _configure(self, plugins: Path) -> None:
        for place in ("state", "sbin", *(f"spool-{name}" for name in self.names)):
            (self.folder / place).mkdir(parents=True)
        helper = next(path for path in (self.packages / "usr/sbin").glob("slurmstepd*"))
        shutil.copy(helper, self.folder / "sbin/slurmstepd")
        port, *others = _free_ports(1 + len(self.names))
        host = socket.gethostname()
        nodes = []
        for name, own in zip(self.names, others, strict=True):
            nodes.append(f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={own} CPUs=64 State=UNKNOWN")
        text = CONFIG.format(
            host=host, port=port, begin=BEGIN_SECONDS, plugins=plugins, folder=self.folder, nodes="\n".join(nodes)
        )
        (self.folder / "slurm.conf").write_text(text)
        (self.folder / "hosts").write_text(f"{Path('/etc/hosts').read_text()}\n127.0.0.1 {' '.join(self.names)}\n")

    def start(self) -> None:
        """Start all daemons, and wait until the nodes are idle.

        Raises:
            Unavailable: an overlay on /usr/sbin can't be mounted here.
        """
        mounts = (
            f"mount -t overlay overlay -o lowerdir={self.folder}/sbin:/usr/sbin /usr/sbin",
            f"mount --bind {self.folder}/hosts /etc/hosts",
        )
        tried = subprocess.run(["unshare", "-m", "sh", "-c", " && ".join(mounts)], capture_output=True, text=True)
        if tried.returncode != 0:
            raise Unavailable(f"mounts for Slurm's daemons: {tried.stderr.strip()}")
        self._daemon("slurmctld", ["slurmctld-wlm", "-D", "-c"])
        for name in self.names:
            command = [*mounts, f"exec slurmd-wlm -N {name} -D"]
            self._daemon(name, ["unshare", "-m", "sh", "-c", " && ".join(command)])
        self.until(lambda: all(self.node_state(name) == "IDLE" for name in self.names), "all nodes are idle")

    def _daemon(self, name: str, command: list[str]) -> None:
        """A daemon that the kernel ends with the tests, however they end."""
        with (self.folder / f"{name}.out").open("w") as out:
            process = subprocess.Popen(
                ["setpriv", "--pdeathsig", "TERM", *command],
                env=self.environment,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self._daemons.append(process)

    def stop(self) -> None:
        """Cancel what runs, and end the daemons."""
        subprocess.run(["scancel", "--user=root"], env=self.environment, capture_output=True, check=False)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline and self.ask("squeue", "--noheader", check=False):
            time.sleep(0.2)
        for daemon in reversed(self._daemons):
            daemon.terminate()
        for daemon in self._daemons:
            try:
                daemon.wait(30)
            except subprocess.TimeoutExpired:
                os.killpg(daemon.pid, signal.SIGKILL)
                daemon.wait()

    def ask(self, *command: str, check: bool = True) -> str:
        """What one of Slurm's commands prints."""
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        assert not check or done.returncode == 0, f"{' '.join(command)}: {done.stderr}"
        return done.stdout.strip()

    def set_node(self, name: str, state: str) -> None:
        """What an administrator does: "drain" (jobs end first), "down" (jobs end now), "resume"."""
        self.ask("scontrol", "update", f"nodename={name}", f"state={state}", "reason=test")

    def bring_back(self, name: str) -> None:
        """Use a node again that was drained or is down."""
        if self.node_state(name) != "IDLE":
            self.set_node(name, "resume")
        self.until(lambda: self.node_state(name) == "IDLE", f"{name} is idle again")

    def node_state(self, name: str) -> str:
        """Such as IDLE or IDLE+DRAIN."""
        return _field(self.ask("scontrol", "show", "node", name, check=False), "State")

    def submit(self, script: Path, words: list[str], options: list[str], env: Mapping[str, str], cwd: Path) -> "Job":
        """Hand in a launch file; `options` override its #SBATCH lines."""
        command = ["sbatch", "--parsable", *options, str(script), *words]
        done = subprocess.run(command, env=self.environment | env, cwd=cwd, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return Job(self, done.stdout.strip())

    def until(self, condition: Callable[[], bool], what: str, seconds: float = WAIT_SECONDS) -> None:
        """Wait for something, and show the daemons' logs if it does not come."""
        deadline = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > deadline:
                raise AssertionError(f"not in {seconds:g} s: {what}\n{self._said()}")
            time.sleep(0.1)

    def _said(self) -> str:
        logs = sorted([*self.folder.glob("*.out"), *self.folder.glob("*.log")])
        return "\n".join(f"--- {log.name}\n{log.read_text()[-2000:]}" for log in logs)


class Job:
    """A job that was submitted."""

    def __init__(self, cluster: Cluster, number: str) -> None:
        self.cluster = cluster
        self.number = number

    def show(self, field: str) -> str:
        """A field of `scontrol show job`: JobState, ExitCode, Restarts, NodeList, Reason."""
        return _field(self.cluster.ask("scontrol", "show", "job", self.number), field)

    def nodes(self) -> list[str]:
        """The nodes that it runs on, or has run on."""
        return self.cluster.ask("scontrol", "show", "hostnames", self.show("NodeList")).split()

    def wait_for(self, *states: str) -> str:
        """Wait until it is in one of these states."""
        self.cluster.until(lambda: self.show("JobState") in states, f"job {self.number} is {' or '.join(states)}")
        return self.show("JobState")

    def end(self) -> tuple[str, str]:
        """Wait for its end; its state, and its exit code as Slurm writes it (CODE:SIGNAL)."""
        ended = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")
        return self.wait_for(*ended), self.show("ExitCode")


def _field(text: str, name: str) -> str:
    found = re.search(rf"(?:^|\s){name}=(\S*)", text)
    return found.group(1) if found else ""


def _free_ports(count: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
