"""The store through which the hosts of an elastic run find each other: python scripts/launch/rendezvous.py [PORT]

Start it on a host that outlives the hosts that train, such as a login node or a service of the cluster, and have it
restarted if it ends (systemd: Restart=always). It holds a few kilobytes and no state of the run.
"""

import signal
import sys

from torch.distributed import TCPStore

PORT = 29500

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else PORT
    store = TCPStore("0.0.0.0", port, is_master=True, wait_for_workers=False)
    print(f"the rendezvous store listens on port {port}", flush=True)
    signal.pause()
