"""Ranks of this host, started and monitored by torch's elastic agent, as torchrun starts them; for `keel train`.

It differs from torchrun in how it ends. torchrun turns every exit code into 1 and prints a traceback of its own below
Keel's message; after a signal it also kills the ranks when its patience ends. Here a signal is passed on to the ranks,
which save and end, and the exit code is that of the rank that ended first.
"""

import logging
import os
import shlex
import signal
import sys
import threading
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path
from secrets import token_hex
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

from configs.secret import SECRET
from trainer.lifecycle import EXIT_CONFIG, EXIT_DONE, EXIT_FAILED, EXIT_PREEMPTED, handling_stops

_ELASTIC = "is_host=false,last_call_timeout=10,join_timeout=86400,read_timeout=60,close_timeout=1"
"""torchrun's settings for hosts that are lost and join (docs/stopping.md); scripts/launch/elastic.sh has the same."""

_RETRY_SECONDS = 0.1


def torchrun_line(program: str, words: Sequence[str], ranks: int, nodes: str) -> str:
    """The command that starts a job on several hosts, `ranks` ranks on each.

    Args:
        nodes: how many hosts, "4"; or the fewest and the most of an elastic job, "1:4".
    """
    is_elastic = ":" in nodes
    host = "RENDEZVOUS_HOST" if is_elastic else "FIRST_HOST"
    options = ["--nnodes", nodes, "--nproc-per-node", str(ranks)]
    options += ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"{host}:29500", "--rdzv-id", "JOB_ID"]
    path = Path(program)
    shown = str(path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path)
    if not is_elastic:
        return shlex.join(["torchrun", *options, shown, *words])
    options += ["--rdzv-conf", _ELASTIC, "--max-restarts", "1000"]
    own_store = ["env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1"]  # see scripts/launch/elastic.sh
    return shlex.join([*own_store, "torchrun", *options, shown, *words, "--elastic.enable", "true"])


def run_ranks(program: str, words: Sequence[str], ranks: int) -> int:
    """Run a program on several ranks of this host; returns Keel's exit code."""
    logging.disable(logging.ERROR)  # torch's reports on ranks that end, of which Keel has said why
    os.environ.setdefault(SECRET, token_hex(32))
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""  # the agent's handlers would kill the ranks
    agent: list[Any] = []
    too_early: list[int] = []
    passed_on: set[int] = set()

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if not agent:  # torch is being imported, in which an exception could be lost
            too_early.append(number)
            return
        pids = [worker.id for worker in agent[0].get_worker_group().workers if worker.id]
        if not pids:  # the ranks are being started, and would be left alone
            threading.Timer(_RETRY_SECONDS, os.kill, (os.getpid(), number)).start()
            return
        passed_on.add(number)
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a closed terminal
    with handling_stops(pass_on), TemporaryDirectory(prefix="keel-ranks-") as folder:
        agent.append(_agent(program, words, ranks, folder))
        if too_early:
            return _stopped(too_early[0])
        result = agent[0].run()
    return _exit_code(result.failures, passed_on) if result.is_failed() else EXIT_DONE


def _agent(program: str, words: Sequence[str], ranks: int, folder: str) -> Any:
    """The agent that torchrun would use on one host, with a rendezvous that nobody else reaches.

    The ranks' error files are in `folder`; torch would leave one of its own in the temporary folder.
    """
    from torch.distributed.elastic.agent.server.api import WorkerSpec
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.run import config_from_args, parse_args

    from scripts.one_host import OneHost

    options = ["--nproc-per-node", str(ranks), "--log-dir", folder]
    config, command, arguments = config_from_args(parse_args([*options, program, *words]))
    spec = WorkerSpec(
        role=config.role,
        local_world_size=ranks,
        entrypoint=command,
        args=tuple(arguments),
        rdzv_handler=OneHost(f"keel-{os.getpid()}"),
        max_restarts=0,
        monitor_interval=config.monitor_interval,
    )
    assert config.logs_specs is not None  # torchrun's own default
    return LocalElasticAgent(spec, logs_specs=config.logs_specs, start_method=config.start_method)


def _exit_code(failures: dict[int, Any], passed_on: Collection[int]) -> int:
    """The exit code of the rank that ended first, where it is one of Keel's; a signal may come before it can save."""
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    rank, first = ChildFailedError("keel train", failures).get_first_failure()
    if -first.exitcode in passed_on:
        return _stopped(-first.exitcode)
    if first.exitcode < 0:
        print(f"rank {rank} was killed by {signal.Signals(-first.exitcode).name}", file=sys.stderr)
    return first.exitcode if first.exitcode in (EXIT_PREEMPTED, EXIT_CONFIG) else EXIT_FAILED


def _stopped(number: int) -> int:
    """Say that a signal came before the ranks could say so themselves; returns the exit code."""
    name = signal.Signals(number).name
    print(f"error: stopped by {name} before the ranks began; the same command starts them again", file=sys.stderr)
    return EXIT_PREEMPTED
