"""The store through which the hosts of an elastic run find each other:

    python scripts/launch/rendezvous.py [PORT] --host ADDRESS

Start it on a host that outlives the hosts that train, such as a login node or a service of the cluster, and have it
restarted if it ends (systemd: Restart=always). It holds a few kilobytes and no state of the run. It listens only on
ADDRESS, a name or address of this host by which the others reach it; without --host, only this host does. Whoever
reaches the port runs code on all hosts (docs/stopping.md, "The network"): it belongs behind a firewall.

`elastic.sh` asks it where its hosts meet, since torchrun closes a rendezvous for good when an agent fails. The answers
have a keyed hash, so both need the KEEL_SECRET of the job:

    rendezvous.py meet HOST:PORT JOB [CLOSED]   prints the round, or "ended"; CLOSED: a round that is closed
    rendezvous.py ended HOST:PORT JOB           says that the job has come to its end
"""

import signal
import socket
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from secrets import token_hex

if not __package__:  # run as a file, from any folder
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    import scripts.silent_interrupts  # noqa: F401 - a terminal sends Ctrl-C to all processes of elastic.sh

from torch.distributed import Store, TCPStore

from configs.secret import Forged, signed, verified

HOST = "127.0.0.1"
PORT = 29500
ENDED = "ended"
_TIMEOUT = timedelta(seconds=20)


def meet(store: Store, job: str, closed: str | None = None) -> str:
    """The round in which the hosts of a job meet, the same for all that ask; `ENDED` once one of them has said so.

    A round is a number and the name of the store that began to count: "2-8c41f00d". So a round that was closed in a
    store that is gone closes none in the one that takes its place.

    Args:
        store: a new one begins with round 0 again, so all hosts do.
        job: its name.
        closed: a round in which nobody can meet any more, if this host knows of one; the next one begins once, however
            many hosts know of it.

    Raises:
        Forged: what the store has was written without the job's secret.
    """
    key = _key(job)
    now = store.compare_set(key, "", signed(key, f"0-{token_hex(4)}"))
    if closed is not None:
        number, _, name = closed.partition("-")
        now = store.compare_set(key, signed(key, closed), signed(key, f"{int(number) + 1}-{name}"))
    return verified(key, now)


def say_ended(store: Store, job: str) -> None:
    """Let hosts that ask later know that the job has come to its end."""
    store.set(_key(job), signed(_key(job), ENDED))


def _key(job: str) -> str:
    return f"keel/{job}/round"


def serve(host: str, port: int) -> TCPStore:
    """A store that listens on one address of this host only; port 0: any that is free.

    By itself, a TCPStore listens on all addresses, whatever host it is given.
    """
    family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=1024)
    host, port = listener.getsockname()[:2]
    return TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())


def _serve(host: str, port: int) -> None:
    try:
        store = serve(host, port)
    except OSError as error:
        sys.exit(f"the rendezvous store can't listen on {host}, port {port}: {error.strerror or error}")
    only = ", which only this host reaches; --host ADDRESS lets others" if ip_address(store.host).is_loopback else ""
    print(f"the rendezvous store listens on {store.host}, port {store.port}{only}", flush=True)
    signal.pause()


def _ask(verb: str, host: str, port: int, job: str, closed: str | None) -> None:
    try:
        socket.create_connection((host, port), _TIMEOUT.total_seconds()).close()  # TCPStore would try for 30 s
        store = TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
        if verb == ENDED:
            say_ended(store, job)
        else:
            print(meet(store, job, closed))
    except Forged as error:
        sys.exit(f"{host}:{port}: {error}")
    except (OSError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        sys.exit(f"the rendezvous store at {host}:{port} does not answer (scripts/launch/rendezvous.py): {why}")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentTypeError(f"{text} is not HOST:PORT, such as login1:29500")
    return host, int(port)


def _round(text: str) -> str:
    if not text.partition("-")[0].isdecimal():
        raise ArgumentTypeError(f"{text} is not a round that `meet` has printed")
    return text


def main(words: list[str]) -> None:
    """Serve the store, or ask it."""
    parser = ArgumentParser(prog="rendezvous.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    if words[:1] in (["meet"], [ENDED]):
        parser.add_argument("verb")
        parser.add_argument("address", metavar="HOST:PORT", type=_address)
        parser.add_argument("job", metavar="JOB")
        parser.add_argument("closed", metavar="CLOSED", nargs="?", type=_round)
        asked = parser.parse_args(words)
        host, port = asked.address
        _ask(asked.verb, host, port, asked.job, asked.closed)
    else:
        parser.add_argument("port", metavar="PORT", nargs="?", type=int, default=PORT)
        parser.add_argument("--host", metavar="ADDRESS", default=HOST, help=f"listen here only (default: {HOST})")
        asked = parser.parse_args(words)
        _serve(asked.host, asked.port)


if __name__ == "__main__":
    main(sys.argv[1:])
