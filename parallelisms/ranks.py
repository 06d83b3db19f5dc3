"""Exchange of JSON between ranks, and a rank's local part of a tensor; `checkpoint/` uses it as well.

torch's own gather and broadcast of objects unpickle what arrives, so a value from another rank could run code. Here
values are JSON: floats arrive as they are (NaN and infinities, too), tuples as lists, and keys are texts.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from configs.errors import KeelError

Kind = TypeVar("Kind", bound=Exception)
Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]


def gather(value: Json, group: dist.ProcessGroup | None = None) -> list[Any]:
    """The value of each rank of `group` (None: all ranks), in rank order; all must call it."""
    mine = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    n = dist.get_world_size(group)
    if n == 1:
        return [_decoded(mine)]
    device = _device(group)
    sizes = torch.empty(n, dtype=torch.int64, device=device)
    dist.all_gather(list(sizes.split(1)), torch.tensor([len(mine)], device=device), group=group)
    lengths = sizes.tolist()
    padded = torch.zeros(max(lengths), dtype=torch.uint8)
    padded[: len(mine)] = mine
    rows = torch.empty(n, len(padded), dtype=torch.uint8, device=device)
    dist.all_gather(list(rows), padded.to(device), group=group)
    return [_decoded(row[:length]) for row, length in zip(rows.cpu(), lengths, strict=True)]


def on_rank_zero(group: dist.ProcessGroup | None, action: Callable[[], Json]) -> Any:
    """Run `action` on the first rank of `group` only (None: of all); all ranks return its result or raise its error."""
    failure: Exception | None = None
    content = b""
    if is_first(group):
        try:
            content = json.dumps([action(), None]).encode()
        except Exception as error:
            failure = error
            content = json.dumps([None, error_as_json(error)]).encode()
    result, told = json.loads(broadcast(content, group))
    if told is not None:
        raise failure or error_of(told)
    return result


def on_each_rank(group: dist.ProcessGroup | None, action: Callable[[], None]) -> None:
    """Run `action` on every rank of `group` (None: all); all raise the error of the first that fails."""
    failure: Exception | None = None
    try:
        action()
    except Exception as error:
        failure = error
    told = gather(error_as_json(failure) if failure else None, group)
    if first := next(filter(None, told), None):
        raise failure or error_of(first)


def error_as_json(error: Exception) -> list[Json]:
    """An error for another rank."""
    if isinstance(error, OSError):
        place = error.filename and str(error.filename)
        return ["OSError", type(error).__name__, error.errno, error.strerror or str(error), place]
    return [type(error).__name__, *map(str, error.args)]


def error_of(told: list[Any]) -> Exception:
    """An error that another rank has told: of the same type if it is Keel's or the system's, else a RuntimeError."""
    kind, *arguments = told
    if kind == "OSError":
        name, *arguments = arguments
        # Those of Python itself follow from the number; others may be made in another way.
        files = {each.__name__: each for each in _kinds_of(OSError) if each.__init__ is OSError.__init__}
        return files.get(name, OSError)(*arguments)
    known = {each.__name__: each for each in _kinds_of(KeelError)}
    return known[kind](*arguments) if kind in known else RuntimeError(f"{kind}: {', '.join(arguments)}")


def local_part(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor: its shard of a DTensor, otherwise the tensor itself."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def swap(tensor: Tensor, to: int, source: int, group: dist.ProcessGroup) -> Callable[[], Tensor]:
    """Send a tensor to a rank of `group`; returns a function that waits for what `source` sent, of the same shape."""
    arriving = torch.empty_like(tensor)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, tensor, group=group, group_peer=to),
            dist.P2POp(dist.irecv, arriving, group=group, group_peer=source),
        ]
    )

    def wait() -> Tensor:
        for work in works:
            work.wait()
        return arriving

    return wait


def is_first(group: dist.ProcessGroup | None) -> bool:
    """Whether this is the first rank of `group` (None: of all)."""
    return dist.get_rank(group) == 0


def broadcast(content: bytes, group: dist.ProcessGroup | None) -> bytes:
    """The bytes of the group's first rank, on all, which must call it."""
    if dist.get_world_size(group) == 1:
        return content
    device = _device(group)
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    sent = torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device) if content else _room(size, device)
    dist.broadcast(sent, group=group, group_src=0)
    return bytes(sent.cpu().numpy())


def _room(size: Tensor, device: torch.device) -> Tensor:
    return torch.empty(int(size), dtype=torch.uint8, device=device)


def _device(group: dist.ProcessGroup | None) -> torch.device:
    """Where the group exchanges tensors: on the CPU if it can, since there nothing waits for a GPU's queue."""
    is_cpu = "cpu:" in dist.get_backend_config(group)
    return torch.device("cpu") if is_cpu else torch.device("cuda", torch.cuda.current_device())


def _decoded(content: Tensor) -> Any:
    return json.loads(bytes(content.numpy()))


def _kinds_of(kind: type[Kind]) -> Iterator[type[Kind]]:
    yield kind
    for each in kind.__subclasses__():
        yield from _kinds_of(each)
