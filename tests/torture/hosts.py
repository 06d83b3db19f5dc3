"""Hosts are lost and come back: python -m tests.torture.hosts --kills 20 [--hosts 3] [--ranks 2] [--seed 0] [--fast]

Each host is a network namespace with an address of its own, on a bridge; a further one has the rendezvous store. On
each runs scripts/launch/elastic.sh with real torchrun. At random moments something happens to a random host, and nobody
does anything about it:

  rank        kill -9 of a rank
  agent       kill -9 of torchrun; its ranks live on
  node        kill -9 of everything on the host, which boots again some seconds later
  link        the host's network is down for ten seconds to a minute
  hang        everything on the host is stopped (SIGSTOP) for as long, then continues
  rendezvous  kill -9 of the store, which a supervisor starts again

Each time the run must go on by itself. At the end the curve must be that of an undisturbed run on one rank: bit for bit
with training.reduction = "exact"; with --fast to 1e-10, in float64. No step may have been committed twice. A table says
how long the run took to train a new step, and how many steps it had to repeat. Needs root and iproute2.

So that 100 kills take an hour and not a day, processes are forked off one that has imported torch (tests/preloaded.py).
"""

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.manifest import read_manifest, steps_in
from configs.errors import UserError
from tests.preloaded import ROOT, Server, children, state

TINY = ROOT / "tests/end_to_end/tiny.toml"
KINDS = ("rank", "agent", "node", "link", "hang", "rendezvous")
PATIENCE_SECONDS = 600
IN_FLIGHT_STEPS = 10
"""Steps that may still be logged of what was computed before something has happened."""
OUT_SECONDS = (10.0, 60.0)
"""How long a link is down, or a host hangs: some outages are shorter than the time-outs, some longer."""
NETWORK, PORT = f"10.{78 + os.getpid() % 150}.{os.getpid() // 150 % 250}", 29500
CONF = "is_host=false,last_call_timeout=8,join_timeout=86400,read_timeout=30,close_timeout=1"
FOREVER = 1_000_000
INTERVAL = 5
"""Steps between records."""
JOB = f"""
base = "{TINY}"

[job]
name = "hosts"
timeout_seconds = 30

[training]
steps = {FOREVER}
micro_batch_size = 1

[lr_schedule]
total_steps = {FOREVER}

[metrics]
interval = {INTERVAL}
tensorboard = false

[checkpoint]
interval = 25
keep_last = 3

[fault]
compare_interval = 25
"""
EXACT = {"training.reduction": '"exact"', "training.global_batch_size": "8"}
FAST = {"training.dtype": '"float64"', "training.global_batch_size": "12"} | {
    f"training.{key}_dtype": '"float64"' for key in ("compute", "reduce")
}


def why_not() -> str:
    """Why network namespaces can't be made here; empty if they can."""
    if shutil.which("ip") is None:
        return "there is no `ip` (iproute2)"
    name = f"keel-try-{os.getpid()}"
    tried = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if tried.returncode:
        return f"network namespaces can't be made: {tried.stderr.strip()}"
    subprocess.run(["ip", "netns", "del", name], check=True)
    return ""


def sh(command: str) -> None:
    subprocess.run(command.split(), check=True)


@dataclass
class Host:
    """One host: its namespace, the process that preloads, and its loop (elastic.sh)."""

    name: str
    address: str
    server: Server
    environment: dict[str, str]
    words: list[str]
    log: Path
    loop: subprocess.Popen | None = None
    back_at: float = 0.0
    """When what has happened to it ends; 0: nothing has."""
    out_by: str = ""

    @property
    def link(self) -> str:
        return f"k{self.name[-1]}{os.getpid() % 100000}"

    def boot(self) -> None:
        with self.log.open("ab") as log:
            self.loop = subprocess.Popen(
                [*self.server.prefix, "bash", str(ROOT / "scripts/launch/elastic.sh"), *self.words],
                env=self.environment,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def pids(self) -> list[int]:
        """All processes on it but the one that preloads."""
        told = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True, check=True).stdout
        return [pid for pid in map(int, told.split()) if pid != self.server.pid]

    def named(self, name: str) -> list[int]:
        """The processes forked off on it of which this is, or begins, the name."""
        found = []
        for pid in children(self.server.pid):
            with suppress(FileNotFoundError, ProcessLookupError):
                comm = Path(f"/proc/{pid}/comm").read_text().strip()
                if comm.startswith(name) and state(pid) not in "ZT":
                    found.append(pid)
        return found

    def signal_all(self, number: int) -> None:
        for pid in self.pids():
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def kill(self) -> None:
        while self.pids():
            self.signal_all(signal.SIGKILL)
            if self.loop:
                self.loop.poll()
            time.sleep(0.02)
        if self.loop:
            self.loop.wait()

    def set_link(self, to: str) -> None:
        sh(f"ip netns exec {self.name} ip link set {self.link} {to}")


@dataclass
class Event:
    """What has happened, and what it cost."""

    kind: str
    seconds: float
    """Until a step was trained that had not been before."""
    repeated: int
    """Steps trained a second time."""
    noticed: float | None
    """Seconds until the next incarnation had the run folder; None if none was needed, as on a host of idle ranks."""

    @property
    def how(self) -> str:
        if self.noticed is None:
            return "without a restart"
        return f"next incarnation after {self.noticed:.1f} s"


@dataclass
class Run:
    """The job, as its folder shows it."""

    folder: Path
    committed: dict[int, str] = field(default_factory=dict)
    """What each step's checkpoint is."""
    problems: list[str] = field(default_factory=list)

    def watch(self) -> None:
        """Look at the checkpoints: only one launch may commit a step."""
        for step in steps_in(self.folder / "checkpoints"):
            with suppress(UserError, OSError):
                self._look(self.folder / f"checkpoints/step-{step:08d}", step)
        if list((self.folder / "checkpoints").glob("abandoned-*")):
            self.problems.append("checkpoints were abandoned")

    def _look(self, checkpoint: Path, step: int) -> None:
        manifest, stamp = read_manifest(checkpoint), (checkpoint / "MANIFEST.json").stat()
        now = f"{manifest.run_id} {manifest.files['trainer.json'].xxh3} {stamp.st_ino} {stamp.st_mtime_ns}"
        if self.committed.setdefault(step, now) != now:
            self.problems.append(f"step {step} was committed twice")

    def records(self) -> list[dict]:
        with suppress(FileNotFoundError):
            lines = (self.folder / "metrics.jsonl").read_text().split("\n")[:-1]
            return [json.loads(line) for line in lines]
        return []

    def step(self) -> int:
        with suppress(FileNotFoundError, IndexError, ValueError), (self.folder / "metrics.jsonl").open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 20_000))
            return json.loads(file.read().splitlines()[-1])["step"]
        return 0

    def incarnation(self) -> int:
        folder = self.folder / "incarnations"
        return max((int(path.stem) for path in folder.glob("*.json")), default=0)


class Torture:
    """The hosts, and what happens to them."""

    def __init__(self, options: argparse.Namespace, place: Path, stack: ExitStack) -> None:
        self.options, self.place, self.random = options, place, random.Random(options.seed)
        self.run_folder = place / "run"
        self.run_folder.mkdir()
        self.run = Run(self.run_folder)
        job = place / "job.toml"
        job.write_text(JOB)
        keys = FAST if options.fast else EXACT
        self.words = [str(job), *(word for key, value in keys.items() for word in (f"--{key}", value))]
        self.bin = place / "bin"
        self.bin.mkdir()
        programs = {
            "torchrun": f"{sys.executable} -S -E {ROOT}/tests/preloaded_rank.py torchrun",
            "python": sys.executable,
        }
        for name, program in programs.items():
            (self.bin / name).write_text(f'#!/bin/sh\nexec {program} "$@"\n')
            (self.bin / name).chmod(0o755)
        self.head = f"keel-head-{os.getpid()}"
        self.store: subprocess.Popen | None = None
        self.hosts: list[Host] = []
        stack.callback(self._clean_up)
        self._build(stack)

    def _build(self, stack: ExitStack) -> None:
        sh(f"ip netns add {self.head}")
        sh(f"ip netns exec {self.head} ip link set lo up")
        sh(f"ip netns exec {self.head} ip link add br0 type bridge")
        sh(f"ip netns exec {self.head} ip addr add {NETWORK}.100/24 dev br0")
        sh(f"ip netns exec {self.head} ip link set br0 up")
        for number in range(1, self.options.hosts + 1):
            name = f"keel-{os.getpid()}-h{number}"
            become = f'hostname h{number}; exec "$@"'
            prefix = ("ip", "netns", "exec", name, "unshare", "--uts", "--mount", "sh", "-c", become, "sh")
            server = Server(self.place / f"tmp{number}", prefix)
            host = Host(name, f"{NETWORK}.{number}", server, {}, self.words, self.place / f"h{number}.log")
            self.hosts.append(host)
            sh(f"ip netns add {name}")
            inside, outside = host.link, f"o{host.link}"
            sh(f"ip link add {inside} type veth peer name {outside}")
            sh(f"ip link set {inside} netns {name}")
            sh(f"ip link set {outside} netns {self.head}")
            sh(f"ip netns exec {self.head} ip link set {outside} master br0 up")
            sh(f"ip netns exec {name} ip addr add {host.address}/24 dev {inside}")
            sh(f"ip netns exec {name} ip link set lo up")
            host.set_link("up")
            stack.enter_context(server)  # it begins to import torch, which takes seconds
            host.environment = server.environment() | {
                "PATH": f"{self.bin}:{os.environ['PATH']}",
                "GLOO_SOCKET_IFNAME": inside,
                "KEEL_LOCAL_ADDR": host.address,
                "KEEL_RENDEZVOUS": f"{NETWORK}.100:{PORT}",
                "KEEL_RENDEZVOUS_CONF": CONF,
                "KEEL_HOSTS": f"1:{self.options.hosts}",
                "KEEL_RANKS_PER_HOST": str(self.options.ranks),
                "KEEL_JOB": "torture",
                "KEEL_SECRET": "torture",
                "KEEL_RUN_FOLDER": str(self.run_folder),
                "KEEL_PAUSE_SECONDS": "1",
            }

    def start(self) -> None:
        """Boot everything, and wait until all hosts train."""
        self._start_store()
        for host in self.hosts:
            host.boot()
        all_train = lambda: self.run.step() > 10 and self._n_hosts() == len(self.hosts)  # noqa: E731
        self._until(all_train, "the run does not start")

    def _n_hosts(self) -> int:
        """Hosts in the newest incarnation."""
        path = self.run.folder / f"incarnations/{self.run.incarnation():06d}.json"
        try:
            return json.loads(path.read_text())["ranks"] // self.options.ranks
        except (OSError, ValueError):  # it is being written
            return 0

    def _start_store(self) -> None:
        program = [sys.executable, str(ROOT / "scripts/launch/rendezvous.py"), str(PORT), "--host", f"{NETWORK}.100"]
        with (self.place / "store.log").open("ab") as log:
            self.store = subprocess.Popen(
                ["ip", "netns", "exec", self.head, *program], stdout=log, stderr=log, start_new_session=True
            )

    def _until(self, is_so, otherwise: str, seconds: float = PATIENCE_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not is_so():
            self._tick()
            assert time.monotonic() < deadline, f"{otherwise} within {seconds:.0f} s: see {self.place}"
            time.sleep(0.1)

    def _tick(self) -> None:
        """What happens by itself: hosts boot or come back, the store is started again."""
        self.run.watch()
        assert self.store is not None
        if self.store.poll() is not None:
            self._start_store()
        for host in self.hosts:
            if host.back_at and time.monotonic() > host.back_at:
                host.back_at = 0.0
                {"node": host.boot, "link": lambda h=host: h.set_link("up")}.get(
                    host.out_by, lambda h=host: h.signal_all(signal.SIGCONT)
                )()
            if host.loop and not host.back_at and host.loop.poll() is not None:
                raise AssertionError(f"the loop of {host.name} has ended with {host.loop.returncode}: see {host.log}")

    def strike(self, kind: str) -> Event:
        """Let something happen, and wait until the run has trained a new step."""
        host = self.random.choice([host for host in self.hosts if not host.back_at])
        began, step, number = time.monotonic(), self.run.step(), self.run.incarnation()
        after = time.time()
        self._do(kind, host)
        noticed: float | None = None

        def goes_on() -> bool:
            nonlocal noticed
            if noticed is None and self.run.incarnation() > number:
                noticed = time.monotonic() - began
            return self.run.step() > step + IN_FLIGHT_STEPS

        self._until(goes_on, f"{kind} on {host.name}: the run does not go on")
        launched = [each for record in self.run.records() for each in record.get("launches", [])]
        resumed = [each["step"] for each in launched if each["started"] > after]
        repeated = max(0, step - resumed[0]) if resumed else 0
        return Event(kind, time.monotonic() - began, repeated, noticed)

    def _do(self, kind: str, host: Host) -> None:
        if kind == "rendezvous":
            assert self.store is not None
            os.kill(self.store.pid, signal.SIGKILL)
        elif kind in ("rank", "agent"):
            victims = host.named("rank-" if kind == "rank" else "torchrun")
            if victims:
                os.kill(self.random.choice(victims), signal.SIGKILL)
        else:
            host.out_by, lasts = kind, {"node": self.random.uniform(2, 15)}.get(kind, self.random.uniform(*OUT_SECONDS))
            {"node": host.kill, "link": lambda: host.set_link("down")}.get(
                kind, lambda: host.signal_all(signal.SIGSTOP)
            )()
            host.back_at = time.monotonic() + lasts

    def settle(self, seconds: float) -> None:
        """Let the run train for a while."""
        end = time.monotonic() + seconds
        self._until(lambda: time.monotonic() > end, "")

    def stop(self) -> None:
        """End the run as a person would: SIGTERM to the loop of every host."""
        self._until(lambda: not any(host.back_at for host in self.hosts), "a host does not come back")
        for host in self.hosts:
            for pid in self._loops(host):
                os.kill(pid, signal.SIGTERM)
        for host in self.hosts:
            assert host.loop is not None
            host.loop.wait(120)
        self.run.watch()

    @staticmethod
    def _loops(host: Host) -> list[int]:
        assert host.loop is not None
        return [host.loop.pid]  # ip, unshare and sh have each become the next: it is bash

    def _clean_up(self) -> None:
        for host in self.hosts:
            with suppress(subprocess.CalledProcessError):
                host.kill()
            subprocess.run(["ip", "netns", "del", host.name])
        if self.store:
            self.store.kill()
            self.store.wait()
        subprocess.run(["ip", "netns", "del", self.head])

    # ------------------------------------------------------------------ what must hold

    def check(self) -> list[str]:
        """Compare the run with an undisturbed one on one rank; returns what is wrong."""
        problems, records = [*dict.fromkeys(self.run.problems)], [r for r in self.run.records() if "loss" in r]
        steps = [record["step"] for record in records]
        if steps != sorted(set(steps)):
            problems.append("metrics.jsonl has a step twice")
        last = steps[-1]
        if missing := set(range(INTERVAL, last, INTERVAL)) - set(steps):
            problems.append(f"metrics.jsonl lacks the steps {sorted(missing)}")
        command = [sys.executable, "train.py", "--config", *self.words, "--job.output_dir", str(self.place / "calm")]
        command += ["--training.steps", str(last), "--checkpoint.interval", "0"]
        with (self.place / "calm.log").open("wb") as log:
            subprocess.run(
                command, cwd=ROOT, check=True, stdout=log, stderr=log, env=os.environ | {"OMP_NUM_THREADS": "1"}
            )
        calm = {record["step"]: record for record in Run(self.place / "calm").records()}
        worst = 0.0
        for record in records:
            if record["step"] not in calm:  # the last step before a stop, which is logged off the interval
                continue
            for key in ("loss", "grad_norm"):
                ours, theirs = record[key], calm[record["step"]][key]
                worst = max(worst, abs(ours - theirs) / abs(theirs))
        compared = sum(record["step"] in calm for record in records)
        bound = 1e-10 if self.options.fast else 0.0
        verdict = "bit for bit equal" if worst == 0 else f"relative difference at most {worst:.1e}"
        print(f"loss and gradient norm of {compared} logged steps up to {last}: {verdict}")
        if not compared or worst > bound:
            problems.append(f"the curve differs from the undisturbed one by {worst:.1e}")
        return problems


def table(events: list[Event]) -> str:
    lines = [f"{'kind':<12}{'times':>6}{'seconds to a new step':>34}{'steps repeated':>22}{'restarts':>10}"]
    lines += [f"{'':<12}{'':>6}{'median':>14}{'90%':>10}{'most':>10}{'median':>12}{'most':>10}"]
    for kind in (*KINDS, "all"):
        mine = [event for event in events if kind in (event.kind, "all")]
        if mine:
            seconds, repeated = sorted(e.seconds for e in mine), [e.repeated for e in mine]
            ninety = seconds[min(len(seconds) - 1, round(0.9 * (len(seconds) - 1)))]
            lines.append(
                f"{kind:<12}{len(mine):>6}{statistics.median(seconds):>14.1f}{ninety:>10.1f}{seconds[-1]:>10.1f}"
                f"{statistics.median(repeated):>12.0f}{max(repeated):>10}{sum(e.noticed is not None for e in mine):>10}"
            )
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--hosts", type=int, default=3)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kinds", default=",".join(KINDS))
    parser.add_argument("--fast", action="store_true", help="today's reductions, in float64")
    parser.add_argument("--minutes", type=float, default=600, help="stop after so long")
    parser.add_argument("--keep", type=Path, help="a new folder to work in, which stays")
    options = parser.parse_args()
    if reason := why_not():
        print(f"skipped: {reason}")
        return 2
    place = options.keep or Path(tempfile.mkdtemp(prefix="hosts-"))
    place.mkdir(parents=True, exist_ok=True)
    kinds = options.kinds.split(",")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(1))  # hosts are removed at any end
    events: list[Event] = []
    began = time.monotonic()
    with ExitStack() as stack:
        torture = Torture(options, place.resolve(), stack)
        torture.start()
        print(f"all hosts train after {time.monotonic() - began:.0f} s; {place}", flush=True)
        deck: list[str] = []
        while len(events) < options.kills and time.monotonic() - began < 60 * options.minutes:
            torture.settle(torture.random.uniform(0, 12))
            deck = deck or torture.random.sample(kinds, len(kinds))
            event = torture.strike(deck.pop())
            events.append(event)
            print(
                f"{len(events):>4} {event.kind:<11} new steps after {event.seconds:5.1f} s ({event.how}), "
                f"{event.repeated} steps repeated; step {torture.run.step()}, incarnation {torture.run.incarnation()}",
                flush=True,
            )
        torture.stop()
        problems = torture.check()
    print(table(events))
    sizes = Counter(
        json.loads(path.read_text())["mesh"] for path in (torture.run.folder / "incarnations").glob("*.json")
    )
    print("incarnations by mesh: " + "; ".join(f"{count} x {mesh}" for mesh, count in sizes.most_common()))
    for problem in problems:
        print(f"NOT AS IT SHOULD BE: {problem}")
    if not problems:
        print(f"{len(events)} of {len(events)} recovered without a hand; nothing was committed twice")
        if not options.keep:
            shutil.rmtree(place)
    return bool(problems)


if __name__ == "__main__":
    sys.exit(main())
