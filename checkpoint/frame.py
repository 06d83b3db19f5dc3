"""Tensors in a file as torch.save writes them, without its work for each.

torch.save makes 39 writes and 800 Python calls for a tensor, 200 us in which no other Python thread runs: of the 3,400
tensors that a rank has of a 405B model, most of a second beside a step that is being queued. All that it writes but the
values depends on type and shape alone, as long as its checksum is disabled (the zip format's CRC-32, which torch.load
never checks, and which costs a third of the writing). So it is asked once for each type and shape, and a tensor is
three writes: what came before the values, the values, what came after.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.serialization import get_crc32_options, set_crc32_options

from checkpoint.storage import HashedFile

Frame = tuple[bytes, bytes]
"""What torch.save writes before a tensor's values, and after them."""


class TensorFile:
    """A file of tensors, one behind the other, each as torch.save would have written it."""

    def __init__(self, file: HashedFile) -> None:
        """`file`: open for writing."""
        self._file = file
        self._frames: dict[tuple[torch.dtype, torch.Size], Frame] = {}

    def write(self, tensor: Tensor) -> tuple[int, int]:
        """Append a tensor, on any device; returns its first byte in the file and the number of bytes.

        Raises:
            OSError: the disk refuses.
        """
        values = tensor.detach().cpu().contiguous()
        kind = (values.dtype, values.shape)
        if kind not in self._frames:
            self._frames[kind] = frame_of(values)
        before, after = self._frames[kind]
        start = self._file.tell()
        self._file.write(before)
        self._file.write(bytes_of(values))
        self._file.write(after)
        return start, self._file.tell() - start


def frame_of(tensor: Tensor) -> Frame:
    """What torch.save writes around the values of a contiguous tensor in CPU memory, which are neither read nor copied.

    Raises:
        RuntimeError: torch.save no longer writes the values as they are in memory, in one go.
    """
    values = bytes_of(tensor)
    # torch.save writes a tensor's whole storage, which may be larger than the tensor.
    alone = torch.frombuffer(values, dtype=tensor.dtype).view(tensor.shape) if values.size else tensor.clone()
    sink = _Sink(values.ctypes.data, values.nbytes)
    computes_crc32 = get_crc32_options()
    set_crc32_options(False)
    try:
        torch.save(alone, sink)  # type: ignore[arg-type]
    finally:
        set_crc32_options(computes_crc32)
    if values.size and sink.n_found != 1:
        raise RuntimeError(f"torch.save of torch {torch.__version__} writes tensors in a way that Keel does not know")
    return bytes(sink.before), bytes(sink.after)


def bytes_of(tensor: Tensor) -> Any:
    """The memory of a contiguous tensor on the CPU, as a numpy array of bytes."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


class _Sink:
    """Keeps what torch.save writes, but for the values, which it tells by their place in memory."""

    def __init__(self, address: int, n_bytes: int) -> None:
        self._values = (address, n_bytes)
        self.before = bytearray()
        self.after = bytearray()
        self.n_found = 0

    def write(self, data: Any) -> int:
        n_bytes = memoryview(data).nbytes
        if n_bytes and (np.frombuffer(data, dtype=np.uint8).ctypes.data, n_bytes) == self._values:
            self.n_found += 1
        else:
            (self.after if self.n_found else self.before).extend(data)
        return n_bytes

    def flush(self) -> None:
        """Do nothing: torch calls this at the end."""
