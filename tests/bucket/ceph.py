"""A real S3 server on this machine: Ceph's monitor, one store and its gateway, without root or keys of its own.

It listens on 127.0.0.1 alone and keeps its objects in a folder, also when it is killed and started again.
"""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from tests.debian import Unavailable

PACKAGES = ("ceph-mon", "ceph-osd", "radosgw")
"""Ceph 16 in Debian 12: 73 MB to download, 277 MB unpacked."""
ACCESS_KEY = "keelkeelkeel"
SECRET_KEY = "secret-of-the-tests"
WAIT_SECONDS = 120

# The gateway's default mode, `secure`, hangs without keys; without tcp_nodelay each request takes 40 to 160 ms.
CONFIG = """\
[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon}]
ms_bind_msgr1 = false
public_addr = 127.0.0.1
cluster_addr = 127.0.0.1
auth_cluster_required = none
auth_service_required = none
auth_client_required = none
ms_mon_client_mode = crc
ms_client_mode = crc
keyring = {folder}/keyring
run_dir = {folder}/run
log_file = {folder}/log/$name.log
mon_cluster_log_file = /dev/null
admin_socket = {folder}/run/$name.asok
pid_file = {folder}/run/$name.pid
crash_dir = {folder}/log
mon_data = {folder}/mon
osd_data = {folder}/osd
rgw_data = {folder}/rgw
osd_objectstore = bluestore
bluestore_block_size = 21474836480
bluestore_block_create = true
osd_class_dir = {libraries}/rados-classes
erasure_code_dir = {libraries}/ceph/erasure-code
plugin_dir = {libraries}/ceph
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 4
osd_pool_default_pgp_num = 4
mon_allow_pool_size_one = true
osd_crush_chooseleaf_type = 0
mon_data_avail_crit = 1
mon_data_avail_warn = 2
mon_max_pg_per_osd = 2000
osd_memory_target = 939524096
paxos_propose_interval = 0.02
paxos_min_wait = 0.01
osd_op_num_shards = 2
osd_op_num_threads_per_shard = 1
rgw_frontends = beast endpoint=127.0.0.1:{port} tcp_nodelay=1
rgw_thread_pool_size = 64
rgw_enable_lc_threads = false
rgw_run_sync_thread = false
rgw_dns_name = localhost
"""


class Ceph:
    """One server; `environment` is what a client of it needs."""

    def __init__(self, packages: Path, folder: Path) -> None:
        self.folder = folder
        self._port, mon = _free_ports(2)
        self._packages = packages
        libraries = next((packages / "usr/lib").glob("*/ceph")).parent
        self._variables = os.environ | {
            "PATH": f"{packages}/usr/bin:{os.environ['PATH']}",
            "LD_LIBRARY_PATH": f"{libraries}:{libraries}/ceph:{packages}/lib/{libraries.name}",
            "PYTHONPATH": f"{packages}/usr/lib/python3/dist-packages",
            "CEPH_CONF": str(folder / "ceph.conf"),
        }
        for place in ("mon", "osd", "rgw", "run", "log"):
            (folder / place).mkdir(parents=True)
        (folder / "keyring").touch()
        self._fsid = str(uuid4())
        self._mon = mon
        text = CONFIG.format(fsid=self._fsid, mon=mon, port=self._port, folder=folder, libraries=libraries)
        (folder / "ceph.conf").write_text(text)
        self.environment = {
            "AWS_ACCESS_KEY_ID": ACCESS_KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET_KEY,
            "AWS_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ALLOW_HTTP": "true",
            "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "false",
        }

    def start(self) -> None:
        """Start all from nothing, with one user.

        Raises:
            Unavailable: a program of it does not run here.
        """
        folder = self.folder
        monmap = str(folder / "monmap")
        self._run("monmaptool", "--create", "--fsid", self._fsid, "--addv", "a", f"[v2:127.0.0.1:{self._mon}]", monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._run("ceph-mon", "-i", "a")
        osd = str(uuid4())
        self._run("/usr/bin/python3", f"{self._packages}/usr/bin/ceph", "osd", "new", osd, "0")
        self._run("ceph-osd", "--mkfs", "-i", "0", "--osd-uuid", osd)
        self._run("ceph-osd", "-i", "0")
        self.start_gateway()
        keys = (f"--access-key={ACCESS_KEY}", f"--secret-key={SECRET_KEY}")
        self._run("radosgw-admin", "user", "create", "--uid=keel", "--display-name=keel", *keys)

    def start_gateway(self) -> None:
        """Start the gateway, at the beginning or after `kill_gateway`."""
        self._run("radosgw", "-n", "client.rgw", "--rgw-zone=default")
        deadline = time.monotonic() + WAIT_SECONDS
        while True:
            try:
                urllib.request.urlopen(self.environment["AWS_ENDPOINT_URL"], timeout=5).close()
                return
            except urllib.error.HTTPError:
                return
            except OSError as error:
                if time.monotonic() > deadline:
                    raise Unavailable(f"Ceph's gateway does not answer: {error}") from None
            time.sleep(0.05)

    def kill_gateway(self) -> None:
        """Kill the gateway in the middle of what it does."""
        self._kill("client.rgw")

    def entries(self, bucket: str) -> list[str]:
        """The names of what is in a bucket, with the parts of uploads that have not come to their end."""
        command = ("radosgw-admin", "bucket", "list", f"--bucket={bucket}", "--allow-unordered", "--max-entries=100000")
        return [entry["name"] for entry in json.loads(self._run(*command))]

    def stop(self) -> None:
        for file in (self.folder / "run").glob("*.pid"):
            self._kill(file.stem)

    def _kill(self, name: str) -> None:
        file = self.folder / f"run/{name}.pid"
        with suppress(OSError, ValueError):
            pid = int(file.read_text())
            file.unlink()
            os.kill(pid, signal.SIGKILL)
            while Path(f"/proc/{pid}").exists():
                time.sleep(0.01)

    def _run(self, *command: str) -> str:
        try:
            done = subprocess.run(
                command,
                env=self._variables,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=WAIT_SECONDS,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise Unavailable(f"{command[0]}: {error}") from None
        if done.returncode != 0:
            raise Unavailable(f"{command[0]} does not run here: {done.stderr.strip()[-300:]}")
        return done.stdout


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
