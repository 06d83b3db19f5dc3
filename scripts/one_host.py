"""The rendezvous of torch's elastic agent with itself: all ranks are on this host, and nobody else may join."""

from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from scripts.launch.rendezvous import HOST, serve


class OneHost(RendezvousHandler):
    """Its store listens on loopback; torchrun's own rendezvous would listen on all addresses, and unpickle values."""

    use_agent_store = True

    def __init__(self, name: str) -> None:
        """Start the store, which lasts as long as this object; `name` is its run id."""
        self._name = name
        self._store = serve(HOST, 0)
        self._is_closed = False

    def get_backend(self) -> str:
        """The name of the rendezvous in torch's logs."""
        return "one host"

    def next_rendezvous(self) -> RendezvousInfo:
        """One host of one, at once."""
        return RendezvousInfo(self._store, 0, 1, RendezvousStoreInfo(HOST, self._store.port))

    def is_closed(self) -> bool:
        """Whether the agent has ended the job."""
        return self._is_closed

    def set_closed(self) -> None:
        """The agent ends the job."""
        self._is_closed = True

    def num_nodes_waiting(self) -> int:
        """No other host can wait."""
        return 0

    def get_run_id(self) -> str:
        """The name of this launch."""
        return self._name

    def shutdown(self) -> bool:
        """There is nothing to leave."""
        return True
