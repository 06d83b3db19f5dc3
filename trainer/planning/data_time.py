"""How long a step waits for its data: what a rank reads and prepares, beside the steps before it.

A thread prepares samples while the device computes, so a step waits for what takes longer than it. The thread takes its
time for each window and token, by kind of source. The bytes of token files come from a disk that the ranks of a host
share, or by requests from a bucket. What a host keeps of a bucket (`data.cache_gib`) is not counted on, so that this is
the first epoch's wait.
"""

from dataclasses import dataclass
from math import ceil

from configs.layout import MeshSizes
from configs.places import is_url
from configs.schema import Config, Source
from trainer.data.bucket_place import BLOCKS_AT_ONCE, REQUESTS_AT_ONCE
from trainer.data.text.streaming import VIRTUAL_SHARDS
from trainer.data.token_file import BLOCK_BYTES
from trainer.planning.devices import loader_pace, storage


@dataclass(frozen=True)
class DataTime:
    """The samples of a step on a rank."""

    n_bytes: int
    """Bytes of token files."""
    seconds: float
    """What reading and preparing them takes, beside the steps before."""
    waiting: float
    """Seconds that the step waits for them."""


def data_time(config: Config, sizes: MeshSizes, gpus_per_host: int, step_seconds: float) -> DataTime:
    """The samples of a step that itself takes `step_seconds`."""
    weights = sum(source.weight for source in config.data.sources)
    n_bytes = 0.0
    seconds = 0.0
    for source in config.data.sources:
        windows = config.training.global_batch_size / sizes.dp * source.weight / weights
        of_source = windows * _window_bytes(config) if source.kind == "tokens" else 0.0
        n_bytes += of_source
        prepared = _prepared(source, config, sizes, windows)
        seconds += max(prepared, _read(source, config, sizes, gpus_per_host, windows)) if of_source else prepared
    return DataTime(round(n_bytes), seconds, max(0.0, seconds - step_seconds))


def _window_bytes(config: Config) -> int:
    """Bytes of a window with its last target, without a loss mask: two a token if the vocabulary allows it."""
    return (config.training.seq_len + 1) * (2 if config.model.vocab_size <= 1 << 16 else 4)


def _prepared(source: Source, config: Config, sizes: MeshSizes, windows: float) -> float:
    """Seconds of the loader's thread; of text, ranks beyond its shards tokenize what others do, too."""
    pace = loader_pace(source.kind)
    if pace is None:
        return 0.0
    shared = max(1.0, sizes.dp / VIRTUAL_SHARDS) if source.kind == "text" else 1.0
    return shared * windows * (pace.window + pace.token * config.training.seq_len)


def _read(source: Source, config: Config, sizes: MeshSizes, gpus_per_host: int, windows: float) -> float:
    """Seconds in which the bytes of token files come."""
    link = storage(source.path)
    if not is_url(source.path):
        readers = ceil(min(gpus_per_host, sizes.world_size) / (sizes.tp * sizes.cp))
        return windows * readers * _window_bytes(config) / link.bandwidth
    blocks = 1 + (_window_bytes(config) - 1) / BLOCK_BYTES  # the mean, of a window that begins anywhere
    a_window = ceil(blocks / BLOCKS_AT_ONCE) * link.latency + blocks * BLOCK_BYTES / link.bandwidth
    return windows * a_window / REQUESTS_AT_ONCE
