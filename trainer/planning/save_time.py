"""How long a checkpoint takes: the copy of each rank's state to its host, and then its way to a disk or a bucket.

Training waits for the copy (`checkpoint.staging`), with `checkpoint.mode = "sync"` also for the rest, and at the next
save for one that is still being written. The ranks of a host share its disk; to a bucket, each rank sends parts of a
file by a few requests at a time.
"""

from dataclasses import dataclass

from checkpoint.bucket import AT_ONCE
from checkpoint.bucket_storage import PART_BYTES
from configs.places import is_url
from configs.schema import Config
from trainer.planning.devices import Device, storage


@dataclass(frozen=True)
class SaveTime:
    """A save, on the rank that has the most to save."""

    n_bytes: int
    """Bytes of that rank."""
    copy: float
    """Seconds of their copy to the host; 0 for states that are in its memory."""
    write: float
    """Seconds until the checkpoint is written, after the copy."""
    wait: float
    """Seconds that training waits at a save."""
    interval: int
    """Steps from save to save; 0: the run saves at its end only."""

    @property
    def of_a_step(self) -> float:
        """Seconds that training waits, as a mean over the steps."""
        return self.wait / self.interval if self.interval else 0.0


def save_time(config: Config, n_bytes: int, ranks_of_host: int, device: Device, step_seconds: float) -> SaveTime:
    """The time of a save in which a rank has so many bytes, between steps that take `step_seconds`."""
    interval = config.checkpoint.interval
    copy = 0.0 if config.fsdp.cpu_offload else n_bytes / device.host
    write = n_bytes / _rate(config, ranks_of_host)
    is_sync = config.checkpoint.mode == "sync"
    wait = copy + (write if is_sync else max(0.0, write - interval * step_seconds) if interval else 0.0)
    return SaveTime(n_bytes, copy, write, wait, interval)


def _rate(config: Config, ranks_of_host: int) -> float:
    """Bytes/s at which a rank writes."""
    link = storage(config.job.output_dir)
    if not is_url(config.job.output_dir):
        return link.bandwidth / ranks_of_host
    return AT_ONCE * PART_BYTES / (link.latency + PART_BYTES / link.bandwidth)
