"""Whole matrices for an update that needs them, such as Muon's, where FSDP, tensor and expert parallelism shard them.

Each matrix has one owner among the ranks of a pipeline stage. The ranks send it their parts, it computes, and each rank
gets back its part of the result. So all ranks share the work: row shards, tensor-parallel ranks and replicas alike. A
replica could also compute all of its matrices alone and exchange nothing with other replicas. But the work costs more
than the bytes (five Newton-Schulz steps take at least 25 x rows operations for each element, in whose place two bytes
are sent), and with one result the replicas hold the same bits, whatever their devices round.

Owners are balanced by cost, and all ranks find them without communicating. A matrix that some ranks hold whole already,
such as an expert's, stays with one of them as long as that rank has no more than its share of the work.

Matrices are exchanged in buckets, by an all-to-all each way. A bucket's matrices arrive while the owners compute the
one before it, and results leave meanwhile. Parts come from the owner's own replica, and go to all replicas. With E
elements that N ranks hold as R replicas, all together send E elements to owners and R x E back, less what stays where
it is. Saving gathers nothing, since the optimizer's state is sharded like the parameters or, where it is a number for
each row, whole on every rank.
"""

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce
from itertools import accumulate, pairwise
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from parallelisms.init import ranges_at
from parallelisms.mesh import Mesh
from parallelisms.owner_partition import assign_owners

BUCKET_ELEMENTS = 32 << 20
"""Elements of an owner's matrices that are exchanged together: a GPU computes with them for milliseconds."""

Box = tuple[range, ...]
"""The global indices of a part of a parameter, for each dimension."""


@dataclass(frozen=True)
class _Matrix:
    """A matrix that one rank computes with."""

    parameter: int
    """Number of its parameter."""
    box: Box
    owner: int

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, columns), or (1, rows, columns) if its parameter stacks matrices."""
        return tuple(map(len, self.box))


@dataclass(frozen=True)
class _Piece:
    """The intersection of a rank's part of a parameter and a matrix."""

    number: int
    """The parameter's or the matrix's: of the tensor that holds the piece."""
    place: tuple[slice, ...]
    """Where it is in that tensor."""
    shape: tuple[int, ...]


Pieces = list[list[_Piece]]
"""What is exchanged with each rank, in the order in which both know it."""


@dataclass(frozen=True)
class _Bucket:
    """What a rank exchanges at once."""

    own: list[_Matrix]
    """The matrices that this rank owns."""
    leaving: Pieces
    """Pieces of this rank's parts that it sends to owners."""
    arriving: Pieces
    """Pieces of its own matrices."""
    returning: Pieces
    """The same for all ranks that hold them."""
    coming_back: Pieces
    """Pieces of this rank's parts, from their owners."""


class WholeMatrices:
    """Computes with whole matrices, of parameters of which each rank of a pipeline stage holds a part."""

    def __init__(self, mesh: Mesh | None) -> None:
        """`mesh`: None if this rank holds all parameters whole, and is to compute with them alone."""
        self._mesh = mesh
        self._buckets: dict[tuple[int, ...], list[_Bucket]] = {}
        """What is exchanged for parameters, by their ids: some may be frozen at times."""

    @cached_property
    def _places(self) -> list[Mapping[str, int]]:
        """Each rank's coordinates in the mesh."""
        if self._mesh is None:
            return [dict.fromkeys(("replicas", "shard", "tp"), 0)]
        return [self._mesh.place(rank) for rank in range(self._mesh.sizes.stage_ranks)]

    @property
    def _rank(self) -> int:
        return self._mesh.stage.get_local_rank() if self._mesh else 0

    def map(
        self,
        function: Callable[[Tensor], Tensor],
        parameters: Mapping[Tensor, int],
        parts: Sequence[Tensor],
        measure: Callable[[Tensor, Tensor], None] | None = None,
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Apply a function to whole matrices; all ranks of the stage must call it.

        Args:
            function: maps a matrix to one of the same shape, which depends on nothing else.
            parameters: how many matrices each holds, one below the other: (n x rows, columns) or (n, rows, columns).
            parts: this rank's part of the tensor to map for each parameter, all of one dtype.
            measure: called with a result, (..., rows, columns), and a tensor of zeros, (..., rows), in the parameters'
                dtype or wider; writes a number for each row into the latter.

        Returns:
            This rank's part of each result; and with `measure`, the numbers of all rows of each parameter.
        """
        key = tuple(map(id, parameters))
        if key not in self._buckets:
            self._buckets[key] = self._planned(parameters)
        device = self._mesh.device if self._mesh else parts[0].device
        results = [torch.empty_like(part) for part in parts]
        numbers, of_rows = _numbers_of_rows(parameters if measure else (), device)
        coming: _Transfer | None = None
        buckets = self._buckets[key]
        for bucket, arriving in zip(buckets, self._ahead(buckets, parts, device), strict=True):
            wholes = [arriving.sent.new_empty(matrix.shape) for matrix in bucket.own]
            arriving.unpack(wholes)
            mapped = [function(whole.flatten(end_dim=-2)).view(whole.shape) for whole in wholes]
            if measure:
                for matrix, result in zip(bucket.own, mapped, strict=True):
                    measure(result, of_rows[matrix.parameter][slices(matrix.box[:-1])])
            back = self._send(mapped, bucket.returning, bucket.coming_back, parts[0].dtype, device)
            if coming:
                coming.unpack(results)
            coming = back
        if coming:
            coming.unpack(results)
        if measure and len(self._places) > 1:
            assert self._mesh is not None
            # Each row's number from the owner of its matrix: the others add zeros, which changes no bit.
            dist.all_reduce(numbers, group=self._mesh.stage.get_group())
        return results, of_rows

    def _ahead(
        self, buckets: Sequence[_Bucket], parts: Sequence[Tensor], device: torch.device
    ) -> Iterator["_Transfer"]:
        """Yield the exchange of each bucket, once that of the next one has begun."""
        ahead: _Transfer | None = None
        for bucket in buckets:
            begun = self._send(parts, bucket.leaving, bucket.arriving, parts[0].dtype, device)
            if ahead:
                yield ahead
            ahead = begun
        if ahead:
            yield ahead

    def _send(
        self, tensors: Sequence[Tensor], leaving: Pieces, arriving: Pieces, dtype: torch.dtype, device: torch.device
    ) -> "_Transfer":
        """Begin to send pieces of `tensors` to each rank, and to receive others from each."""
        sent = torch.empty(_elements(leaving), dtype=dtype, device=device)
        _copy(_views(sent, leaving), [tensors[piece.number][piece.place] for to in leaving for piece in to])
        if len(self._places) == 1:
            return _Transfer(sent, sent, arriving, None)
        received = torch.empty(_elements(arriving), dtype=dtype, device=device)
        assert self._mesh is not None
        # Parts of matrices to their owners, or parts of results back.
        work = dist.all_to_all_single(
            received, sent, _sizes(arriving), _sizes(leaving), group=self._mesh.stage.get_group(), async_op=True
        )
        return _Transfer(sent, received, arriving, work)

    # ------------------------------------------------------------------ who computes what

    def _planned(self, parameters: Mapping[Tensor, int]) -> list[_Bucket]:
        known: dict[Hashable, _Layout] = {}  # most layers are cut alike
        layouts = [known.setdefault(_kind(parameter), _Layout(parameter, self._places)) for parameter in parameters]
        boxes = [(number, box) for number, (p, n) in enumerate(parameters.items()) for box in _boxes(p, n)]
        owners = self._owners([(layouts[number], box) for number, box in boxes])
        filling: dict[int, list[_Matrix]] = {}
        elements = [0] * len(self._places)
        for (number, box), owner in zip(boxes, owners, strict=True):
            # An owner's n-th bucket has the matrices after the first n x BUCKET_ELEMENTS elements of all that it owns.
            filling.setdefault(elements[owner] // BUCKET_ELEMENTS, []).append(_Matrix(number, box, owner))
            elements[owner] += prod(map(len, box))
        return [self._bucket(filling[number], layouts) for number in sorted(filling)]

    def _owners(self, matrices: Sequence[tuple["_Layout", Box]]) -> list[int]:
        """The owner of each matrix."""
        costs = dict(enumerate(_cost(box) for _, box in matrices))
        loads = [0] * len(self._places)
        owners: dict[int, int] = {}
        for number, (layout, box) in enumerate(matrices):
            holder = min(layout.holders(box), key=loads.__getitem__, default=None)
            if holder is not None and (loads[holder] + costs[number]) * len(loads) <= sum(costs.values()):
                owners[number] = holder
                loads[holder] += costs[number]
        owners |= assign_owners({number: cost for number, cost in costs.items() if number not in owners}, loads)
        return [owners[number] for number in costs]

    def _bucket(self, matrices: Sequence[_Matrix], layouts: Sequence["_Layout"]) -> _Bucket:
        ranks = range(len(self._places))
        me = self._rank
        own = [matrix for matrix in matrices if matrix.owner == me]
        leaving, arriving, returning, coming_back = ([list[_Piece]() for _ in ranks] for _ in range(4))
        bucket = _Bucket(own, leaving, arriving, returning, coming_back)
        for matrix in matrices:
            layout = layouts[matrix.parameter]
            piece = layout.piece_of_part(matrix, me)
            if piece:
                bucket.coming_back[matrix.owner].append(piece)
                if layout.replica[me] == layout.replica[matrix.owner]:
                    bucket.leaving[matrix.owner].append(piece)
        for number, matrix in enumerate(own):
            layout = layouts[matrix.parameter]
            for rank in ranks:
                piece = layout.piece_of_matrix(number, matrix, rank)
                if piece:
                    bucket.returning[rank].append(piece)
                    if layout.replica[rank] == layout.replica[me]:
                        bucket.arriving[rank].append(piece)
        return bucket


class _Layout:
    """Which part of a parameter each rank holds."""

    def __init__(self, parameter: Tensor, places: Sequence[Mapping[str, int]]) -> None:
        names: tuple[str, ...] = ()
        cutting: set[str] = set()
        if isinstance(parameter, DTensor):
            names = parameter.device_mesh.mesh_dim_names or ()
            cutting = {name for name, cut in zip(names, parameter.placements, strict=True) if not cut.is_replicate()}
        shards = ("expert_shard", "ep") if "ep" in names else ("shard",)
        others = [name for name in ("replicas", *shards, "tp") if name not in cutting]
        self._holders: dict[Box, list[int]] = {}
        self.parts = [tuple(ranges_at(parameter, [place[name] for name in names])) for place in places]
        self.replica = [tuple(place[name] for name in others) for place in places]
        """Each rank's coordinates on the axes that do not cut it: those of all ranks that together hold it once."""

    def holders(self, box: Box) -> list[int]:
        """The ranks that hold all of a box."""
        if box not in self._holders:
            self._holders[box] = [rank for rank, part in enumerate(self.parts) if _overlap(part, box) == box]
        return self._holders[box]

    def piece_of_part(self, matrix: _Matrix, rank: int) -> _Piece | None:
        """A matrix's piece in a rank's part."""
        part = self.parts[rank]
        return _piece(matrix.parameter, part, _overlap(part, matrix.box))

    def piece_of_matrix(self, number: int, matrix: _Matrix, rank: int) -> _Piece | None:
        """A rank's piece in the matrix, whose number is given."""
        return _piece(number, matrix.box, _overlap(self.parts[rank], matrix.box))


def _kind(parameter: Tensor) -> Hashable:
    """The same for parameters that are cut in the same way."""
    if not isinstance(parameter, DTensor):
        return parameter.shape
    return parameter.shape, parameter.device_mesh.mesh_dim_names, parameter.placements


def _boxes(parameter: Tensor, n: int) -> list[Box]:
    """The n matrices of a parameter, one below the other."""
    rows = parameter.shape[0] // n
    others = tuple(map(range, parameter.shape[1:]))
    return [(range(first, first + rows), *others) for first in range(0, n * rows, rows)]


def _cost(box: Box) -> int:
    """What a product of the matrix and its transpose costs."""
    *rows, columns = map(len, box)
    return prod(rows) * columns * min(prod(rows), columns)


def _overlap(part: Box, box: Box) -> Box:
    return tuple(range(max(a.start, b.start), min(a.stop, b.stop)) for a, b in zip(part, box, strict=True))


def _piece(number: int, within: Box, box: Box) -> _Piece | None:
    """A box of a tensor that has the indices `within`; None if it is empty."""
    if not all(map(len, box)):
        return None
    place = tuple(slice(b.start - a.start, b.stop - a.start) for a, b in zip(within, box, strict=True))
    return _Piece(number, place, tuple(map(len, box)))


def _numbers_of_rows(parameters: Collection[Tensor], device: torch.device) -> tuple[Tensor, list[Tensor]]:
    """Zeros for the rows of all parameters, in one flat tensor; and views of it in each parameter's shape."""
    dtype = reduce(torch.promote_types, (parameter.dtype for parameter in parameters), torch.float32)
    shapes = [parameter.shape[:-1] for parameter in parameters]
    numbers = torch.zeros(sum(shape.numel() for shape in shapes), dtype=dtype, device=device)
    parts = numbers.split([shape.numel() for shape in shapes])
    return numbers, [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]


def slices(box: Sequence[range]) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(each.start, each.stop) for each in box)


# --------------------------------------------------------------------------- buffers


@dataclass(frozen=True)
class _Transfer:
    """An exchange that is under way."""

    sent: Tensor
    received: Tensor
    pieces: Pieces
    work: dist.Work | None

    def unpack(self, tensors: Sequence[Tensor]) -> None:
        """Wait (on a GPU: make its stream wait), and copy the pieces into the tensors that hold them."""
        if self.work is not None:
            self.work.wait()
        targets = [tensors[piece.number][piece.place] for of_rank in self.pieces for piece in of_rank]
        _copy(targets, _views(self.received, self.pieces))


def _views(flat: Tensor, pieces: Pieces) -> list[Tensor]:
    every = [piece for of_rank in pieces for piece in of_rank]
    ends = accumulate((prod(piece.shape) for piece in every), initial=0)
    return [flat[start:end].view(piece.shape) for piece, (start, end) in zip(every, pairwise(ends), strict=True)]


def _copy(targets: list[Tensor], sources: list[Tensor]) -> None:
    if targets:
        torch._foreach_copy_(targets, sources)


def _sizes(pieces: Pieces) -> list[int]:
    return [sum(prod(piece.shape) for piece in of_rank) for of_rank in pieces]


def _elements(pieces: Pieces) -> int:
    return sum(_sizes(pieces))
