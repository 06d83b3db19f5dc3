"""Kill -9 at any moment, of a run in a bucket: python -m tests.bucket.kill [--kills 100] [--seed 0] [--elastic]

Two ranks of a torchrun that starts them again train, and save every few steps. Again and again something is killed,
mostly while a save is on its way: ranks, the host with torchrun and all ranks, the server's gateway, which comes back,
or several at once. After a host, another one goes on, half of the times with an empty disk.

With `--elastic`, each launch has one to four ranks, and torchrun may be killed alone: its ranks train on beside those
that go on in their place, and must end by themselves.

A run that has come to its end must have the weights, the optimizer state and the curve of an undisturbed run on a disk,
bit for bit, and the bucket must have nothing but what belongs to it. A launch takes another for dead sooner than
otherwise (`hurry`).
"""

import argparse
import contextlib
import os
import random
import signal
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path

from checkpoint import bucket_launch
from checkpoint.bucket import Bucket
from checkpoint.bucket_storage import local_copy, with_tensors
from checkpoint.folder import superfluous
from checkpoint.manifest import MANIFEST_NAME, step_folder, steps_in
from tests.bucket.ceph import PACKAGES, Ceph
from tests.bucket.server import make_bucket
from tests.debian import unpacked
from tests.preloaded import FIRST, Child, Server, state
from tests.torture.kill import RANKS, assert_equal, told, wait_for_a_moment, wait_for_end, wait_until, words
from trainer.lifecycle import read_status

STEPS = 60
KINDS = ("rank 0", "last rank", "ranks", "host", "server", "server and rank 0")
ELASTIC_WORDS = "--elastic.enable true --training.reduction exact"
MOST_RANKS = 4
"""Of an elastic launch; of three, one waits."""
PATIENCE_SECONDS = 300
OWN = ("config.toml", "metrics.jsonl", "run.log", "status.json", "checkpoints", "incarnations", "crashes", "hangs")
"""What the folder of a run in a bucket may have."""


def hurry() -> None:
    """Give signs of life, and wait for those of others, for a tenth of the usual time; called on each rank."""
    bucket_launch.BEAT_SECONDS /= 10
    bucket_launch.SILENCE_SECONDS /= 10
    bucket_launch._POLL_SECONDS /= 10


def torture(
    ceph: Ceph, folder: Path, kills: int, seed: int = 0, steps: int = STEPS, elastic: bool = False
) -> Counter[str]:
    """Kill at least `kills` times; returns how often what was killed, and how many runs came to their end.

    Raises:
        AssertionError: something is lost, or left behind.
    """
    dice = random.Random(seed)
    done: Counter[str] = Counter()
    with Server(folder / "tmp") as server:
        whole = _Run(server, ceph, folder, str(folder / "whole"), steps, elastic)
        assert whole.launch(folder).wait(PATIENCE_SECONDS) == 0, whole.said()
        while done.total() - done["runs"] < kills:
            url = f"s3://keel/kills-{seed}-{done['runs']}"
            run = _Run(server, ceph, folder, url, steps, elastic)
            _train(run, dice, done, kills)
            run.wait_for_server()
            wait_for_end(run.orphans)
            _check(url, folder, steps)
            done["runs"] += 1
            print(dict(done), flush=True)
    return done


class _Run:
    """A run, whose launches all say what they say in one file."""

    def __init__(self, server: Server, ceph: Ceph, folder: Path, place: str, steps: int, elastic: bool) -> None:
        self.server = server
        self.ceph = ceph
        self.elastic = elastic
        self.n_ranks = RANKS
        """Of the next launch, or of the one that trains."""
        self.orphans: set[int] = set()
        """Process ids of ranks whose torchrun was killed."""
        self._words = f"{words(place, steps)} {ELASTIC_WORDS if elastic else ''}"  # type: ignore[arg-type]
        self.folder = folder / Path(place).name
        """With the folders of its hosts."""
        self.place = place
        self.hosts = 0
        self._repair: threading.Thread | None = None

    def launch(self, host: Path) -> Child:
        host.mkdir(parents=True, exist_ok=True)
        options = f"--standalone --nproc-per-node {self.n_ranks} --max-restarts 10000 --monitor-interval 0.05"
        environment = self.ceph.environment | {FIRST: "tests.bucket.kill:hurry"}
        return self.server.torchrun(options, self._words, host, self._output, environment)

    @property
    def _output(self) -> Path:
        return Path(f"{self.folder}.out")

    def step(self, here: Path) -> int:
        """The step of the ranks of the last launch, on a host's folder; 0 before they have taken the run."""
        status = read_status(here)
        return status.get("step", 0) if status.get("pid") == self.ranks().get(0) else 0

    def kill_server(self, seconds: float) -> None:
        """Kill the gateway, and start it again after so long."""
        self.wait_for_server()
        self.ceph.kill_gateway()
        self._repair = threading.Timer(seconds, self.ceph.start_gateway)
        self._repair.start()

    def wait_for_server(self) -> None:
        if self._repair:
            self._repair.join()

    def wait_for_ranks(self, agent: Child) -> None:
        """Wait until torchrun has started all of them, or has ended."""
        wait_until(lambda: len(self.ranks()) == self.n_ranks or agent.poll() is not None, f"no ranks: {self.said()}")

    def ranks(self) -> dict[int, int]:
        """Process ids by rank, of the ranks of the last launch that are alive."""
        return {rank: pid for rank, pid in self.server.ranks().items() if pid not in self.orphans}

    def said(self) -> str:
        return told(self.folder)


def _train(run: _Run, dice: random.Random, done: Counter[str], kills: int) -> None:
    """Launch, kill, and launch again, until the run has come to its end."""
    host = run.folder / "host-0"
    while True:
        if run.elastic:
            run.n_ranks = dice.randint(1, MOST_RANKS)
        agent = run.launch(host)
        try:
            while done.total() - done["runs"] < kills:
                run.wait_for_ranks(agent)
                here = host / "runs" / run.place.replace("://", "/")
                if wait_for_a_moment(here, [agent], dice):
                    break
                kind = dice.choice((*KINDS, "torchrun") if run.elastic else KINDS)
                done[kind] += 1
                if kind == "torchrun":
                    _wait_for_steps(run, agent, here)
                _kill(kind, run, agent, dice)
                if agent.poll() is not None:
                    break
            code = agent.wait(PATIENCE_SECONDS)
        finally:
            agent.kill()
        if code == 0:
            return
        assert code == -signal.SIGKILL, f"torchrun ended with {code}: {run.said()}"
        wait_for_end(run.ranks().values())
        if dice.random() < 0.5:
            run.hosts += 1
            host = run.folder / f"host-{run.hosts}"


def _wait_for_steps(run: _Run, agent: Child, here: Path) -> None:
    """Wait until the ranks train. Before, they would end with torchrun, but these are the server's children."""
    first: list[int] = []

    def trains() -> bool:
        step = run.step(here)
        first.extend([step] * (step > 0 and not first))
        return bool(first) and step > first[0]

    wait_until(lambda: trains() or agent.poll() is not None, "no step is trained")


def _kill(kind: str, run: _Run, agent: Child, dice: random.Random) -> None:
    ranks = run.ranks()
    some = {"rank 0": [0], "last rank": [run.n_ranks - 1], "server and rank 0": [0], "server": [], "torchrun": []}
    victims = some.get(kind, list(ranks))
    if "server" in kind:
        run.kill_server(dice.uniform(0, 5))
    if kind == "torchrun":
        run.orphans |= set(ranks.values())
    if kind in ("host", "torchrun"):
        agent.kill()
        agent.wait(PATIENCE_SECONDS)
    for victim in victims:
        if victim in ranks and state(ranks[victim]) not in ("", "Z"):
            os.kill(ranks[victim], signal.SIGKILL)
    if victims:
        wait_for_end(ranks.values())
    time.sleep(dice.choice([0, 0, 0.1]))


def _check(url: str, folder: Path, steps: int) -> None:
    """Compare all values with those of the undisturbed run, and look for leftovers."""
    place = Path(tempfile.mkdtemp(dir=folder))
    with contextlib.chdir(place):
        copy = local_copy(url).absolute()
        kept = steps_in(copy / "checkpoints")
        with_tensors(step_folder(copy / "checkpoints", steps))
    assert_equal(copy, folder / "whole", steps)
    assert not superfluous(dict.fromkeys(kept), 3, 30, 0), kept
    keys = Bucket(url).list()
    assert {key.partition("/")[0] for key in keys} <= {*OWN}, {key.partition("/")[0] for key in keys}
    complete = [key.removesuffix(MANIFEST_NAME) for key in keys if key.endswith(f"/{MANIFEST_NAME}")]
    left = [key for key in keys if key.startswith("checkpoints/") and not key.startswith(tuple(complete))]
    assert not left, left
    assert len(complete) == len(kept), (complete, kept)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Kill a run in a bucket again and again.")
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS, help="of a run (default: %(default)s)")
    parser.add_argument(
        "--elastic", action="store_true", help="launches of one to four ranks, and torchrun killed alone"
    )
    options = parser.parse_args()
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        ceph = Ceph(unpacked("ceph", *PACKAGES), Path(folder, "ceph"))
        stack.callback(ceph.stop)
        ceph.start()
        os.environ.update(ceph.environment)
        make_bucket()
        done = torture(ceph, Path(folder), options.kills, options.seed, options.steps, options.elastic)
    kills = done.total() - done["runs"]
    print(f"{kills} kills, {done['runs']} runs to their end, bit for bit ({time.monotonic() - started:.0f} s)")


if __name__ == "__main__":
    main()
