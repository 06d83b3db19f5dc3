"""The store through which the hosts of an elastic run find each other: python scripts/launch/rendezvous.py [PORT]

Start it on a host that outlives the hosts that train, such as a login node or a service of the cluster, and have it
restarted if it ends (systemd: Restart=always). It holds a few kilobytes and no state of the run.

`elastic.sh` asks it where its hosts meet, since torchrun closes a rendezvous for good when an agent fails:

    rendezvous.py meet HOST:PORT JOB [CLOSED]   prints the round, or "ended"; CLOSED: a round that is closed
    rendezvous.py ended HOST:PORT JOB           says that the job has come to its end
"""

import signal
import socket
import sys
from argparse import ArgumentParser, ArgumentTypeError, RawDescriptionHelpFormatter
from datetime import timedelta

from torch.distributed import Store, TCPStore

PORT = 29500
ENDED = "ended"
_TIMEOUT = timedelta(seconds=20)


def meet(store: Store, job: str, closed: int | None = None) -> str:
    """The round in which the hosts of a job meet, the same for all that ask; `ENDED` once one of them has said so.

    Args:
        store: a new one begins with round 0 again, so all hosts do.
        job: its name.
        closed: a round in which nobody can meet any more, if this host knows of one; the next one begins once, however
            many hosts know of it.
    """
    key = _key(job)
    now = store.compare_set(key, "", "0").decode()
    return now if closed is None else store.compare_set(key, str(closed), str(closed + 1)).decode()


def say_ended(store: Store, job: str) -> None:
    """Let hosts that ask later know that the job has come to its end."""
    store.set(_key(job), ENDED)


def _key(job: str) -> str:
    return f"keel/{job}/round"


def _serve(port: int) -> None:
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print(f"the rendezvous store listens on port {store.port}", flush=True)
    signal.pause()


def _ask(verb: str, host: str, port: int, job: str, closed: int | None) -> None:
    try:
        socket.create_connection((host, port), _TIMEOUT.total_seconds()).close()  # TCPStore would try for 30 s
        store = TCPStore(host, port, is_master=False, timeout=_TIMEOUT)
        if verb == ENDED:
            say_ended(store, job)
        else:
            print(meet(store, job, closed))
    except (OSError, RuntimeError) as error:
        why = str(error).splitlines()[0]
        sys.exit(f"the rendezvous store at {host}:{port} does not answer (scripts/launch/rendezvous.py): {why}")


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit():
        raise ArgumentTypeError(f"{text} is not HOST:PORT, such as login1:29500")
    return host, int(port)


def main(words: list[str]) -> None:
    """Serve the store, or ask it."""
    parser = ArgumentParser(prog="rendezvous.py", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    if words[:1] in (["meet"], [ENDED]):
        parser.add_argument("verb")
        parser.add_argument("address", metavar="HOST:PORT", type=_address)
        parser.add_argument("job", metavar="JOB")
        parser.add_argument("closed", metavar="CLOSED", nargs="?", type=int)
        asked = parser.parse_args(words)
        host, port = asked.address
        _ask(asked.verb, host, port, asked.job, asked.closed)
    else:
        parser.add_argument("port", metavar="PORT", nargs="?", type=int, default=PORT)
        _serve(parser.parse_args(words).port)


if __name__ == "__main__":
    main(sys.argv[1:])
