"""The shares of a preparation as tasks of Ray (see `shares`): `keel prepare --ray ADDRESS`.

Ray repeats a task whose worker or host is lost; what has become of the work is in the folder that all hosts see, or in
the bucket.
"""

import os
import socket
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from checkpoint.bucket_files import local_file
from configs.errors import KeelError, UserError
from configs.files import exists
from trainer.data.text.inputs import import_package
from trainer.data.text.plan import PLAN, make_plan, read_plan
from trainer.data.text.prepare import Call, errors_of
from trainer.data.text.prepared_folder import is_finished
from trainer.data.text.shares import MAX_SHARES, make_share
from trainer.data.text.shares_in_bucket import agreed_plan, make_share_remotely

RETRIES = 20
"""How often a share is done again whose worker or host was lost."""
_WAIT_SECONDS = 1.0
_CONNECT_SECONDS = 10.0
_ROOT = Path(__file__).resolve().parents[3]


def make_shares_on_ray(call: Call, address: str) -> None:
    """Do all shares as tasks of a Ray cluster, one CPU each; as many as it has CPUs, or as an earlier call has planned.

    Args:
        address: of the cluster, or "auto".

    Raises:
        UserError: Ray is not installed, or has no cluster there; or as `make_share`.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nobody was asked
    ray = import_package("ray", "--ray: shards as tasks of Ray")
    call.progress(0, None, f"looking for Ray at {address}")
    named = os.environ.get("RAY_ADDRESS", "") if address == "auto" else address  # as Ray understands "auto"
    if named not in ("", "auto"):
        _require_open(named, "RAY_ADDRESS" if address == "auto" else "--ray")
    path = f"{_ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}".rstrip(os.pathsep)
    # Ray gives its workers the script's folder, in which modules have the names of Keel's packages.
    sys.path[:] = [place for place in sys.path if place != str(_ROOT / "scripts")]
    try:
        ray.init(named or "auto", log_to_driver=False, runtime_env={"env_vars": {"PYTHONPATH": path}})
    except (ConnectionError, RuntimeError, ValueError) as error:
        raise UserError(f"--ray {address}: no cluster of Ray answers ({str(error).splitlines()[0]})") from None
    try:
        with errors_of(call.output):
            if not is_finished(call.output, call.settings):
                _make_shares(ray, call)
    finally:
        ray.shutdown()


def _require_open(address: str, name: str) -> None:
    """Try the port, since Ray itself tries for many minutes.

    Raises:
        UserError: nothing listens there.
    """
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=_CONNECT_SECONDS).close()
    except (OSError, ValueError, OverflowError) as error:
        raise UserError(f"{name} {address}: not HOST:PORT of a cluster of Ray that runs ({error})") from None


def _make_shares(ray: Any, call: Call) -> None:
    n_cpus = min(MAX_SHARES, max(1, int(ray.cluster_resources().get("CPU", 1))))
    if call.remote:
        plan = agreed_plan(call, n_cpus)
    else:
        if not exists(call.working / PLAN):
            make_plan(call, n_cpus)
        plan = read_plan(call)
    sizes = [sum(shard.n_bytes for shard in plan.of_share(call, share)) for share in range(plan.shares)]
    task = ray.remote(num_cpus=1, max_retries=RETRIES)(_make_share)
    quiet = replace(call, processes=1, progress=_say_nothing)
    left = {task.remote(quiet, share, plan.shares, os.getcwd()): share for share in range(plan.shares)}
    done = 0
    while left:
        call.progress(done, sum(sizes), f"{len(left)} of {plan.shares} shards are left")
        for finished in ray.wait(list(left), timeout=_WAIT_SECONDS)[0]:
            try:
                ray.get(finished)
            except ray.exceptions.RayTaskError as error:
                raise (error.cause if isinstance(error.cause, KeelError) else error) from None
            except ray.exceptions.RayError as error:
                raise UserError(f"shard {left[finished]}: {error}; run the same command again") from None
            done += sizes[left.pop(finished)]
    call.progress(done, sum(sizes), "")


def _make_share(call: Call, share: int, shares: int, folder: str) -> None:
    """Do a share in a worker; names of files start from the folder in which the command was given."""
    if not call.remote:
        os.chdir(folder)
        make_share(call, share, shares)
        return
    os.makedirs(folder, exist_ok=True)  # on a host that has nothing yet
    os.chdir(folder)
    local_file(call.remote.tokenizer)
    make_share_remotely(call, share, shares)


def _say_nothing(done: int, total: int | None, message: str) -> None:
    pass
