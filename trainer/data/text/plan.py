"""What the shares of a preparation on many hosts agree on (see `shares`): who does what, of which content."""

import json
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import xxhash

from configs.errors import UserError
from configs.files import is_file, replacing
from configs.untrusted import parse_json, read_file
from trainer.data.text.bad_files import BadFiles
from trainer.data.text.documents import Piece, file_pieces, pieces
from trainer.data.text.hub import pin
from trainer.data.text.inputs import HUB, files_of
from trainer.data.text.listing import MAX_LIST_BYTES, content_hash, lines_of_changes, plain_files
from trainer.data.text.prepare import Call, divide
from trainer.data.text.prepared_folder import Settings, check_same
from trainer.data.text.shard import Shard

PLAN = "plan.jsonl"


@dataclass(frozen=True)
class RawShard(Shard):
    """A part of a token file's pieces, whose documents are put into the token file at the end."""

    @property
    def name(self) -> str:
        """Name of its files, in the order of the inputs."""
        return f"{self.index:05d}-{self.part:05d}"

    @property
    def folder(self) -> Path:
        """Where its files are once they are complete."""
        return self.working / "raw"

    @property
    def report_path(self) -> Path:
        """The file that records that it is complete."""
        return self.folder / f"{self.name}.json"


@dataclass(frozen=True)
class Listed:
    """A file, a saved dataset, or a dataset of the hub, with its pieces."""

    input: str
    path: str
    """The file or folder; of the hub, the dataset with its commit."""
    pieces: list[Piece]


@dataclass(frozen=True)
class Plan:
    """What all shares agree on."""

    settings: Settings
    shares: int
    listed: list[Listed]
    hash: str
    """xxh3_128 of the file that holds the plan, in hex."""

    @cached_property
    def portions(self) -> list[list[Piece]]:
        """The pieces of each token file, in order."""
        return divide([piece for each in self.listed for piece in each.pieces])

    def parts(self, portion: int) -> int:
        """The number of shares that divide a token file's pieces among them."""
        return max(1, len(range(portion, self.shares, len(self.portions))))

    def is_whole(self, portion: int) -> bool:
        """Whether a share writes the token file, and nothing is left to do for it."""
        return self.parts(portion) == 1 and not self.settings.drop_duplicates

    def share_of(self, shard: Shard) -> int:
        """The share that has a unit of work."""
        return (shard.index + shard.part * len(self.portions)) % self.shares

    def pieces_of(self, portion: int) -> list[list[Piece]]:
        """The parts of a token file's pieces, which have about the same number of bytes, and may be empty."""
        n_parts = self.parts(portion)
        parts: list[list[Piece]] = [[] for _ in range(n_parts)]
        total = max(1, sum(piece.n_bytes for piece in self.portions[portion]))
        start = 0
        for piece in self.portions[portion]:
            parts[min(n_parts - 1, start * n_parts // total)].append(piece)
            start += piece.n_bytes
        return parts

    def whole(self, call: Call, portion: int) -> Shard:
        """A token file as the work of one process."""
        return Shard(portion, self.portions[portion], *self._common(call))

    def shards(self, call: Call, portion: int) -> list[Shard]:
        """The units of work for a token file."""
        if self.is_whole(portion):
            return [self.whole(call, portion)]
        parts = enumerate(self.pieces_of(portion))
        return [RawShard(portion, own, *self._common(call), part=part) for part, own in parts if own]

    def _common(self, call: Call) -> tuple[Path, str, Path, Settings, int]:
        """What all units of work are told."""
        return call.working, call.launch, call.tokenizer_path, self.settings, call.max_bad_files

    def of_share(self, call: Call, share: int) -> list[Shard]:
        """A share's units of work."""
        n_portions = len(self.portions)
        portions = range(share % n_portions, n_portions, self.shares) if n_portions else ()
        found = [shard for portion in portions for shard in self.shards(call, portion)]
        return [shard for shard in found if self.share_of(shard) == share]

    def inputs_of_share(self, call: Call, share: int) -> list[Listed]:
        """What a share reads: the inputs of its pieces, and those that it examines."""
        touched = {piece.path for shard in self.of_share(call, share) for piece in shard.pieces}
        return [each for i, each in enumerate(self.listed) if each.path in touched or i % self.shares == share]


def list_inputs(settings: Settings, bad: BadFiles) -> list[Listed]:
    """All inputs as they are now, in order; what is skipped is added to `bad`.

    Raises:
        UserError: one does not exist or cannot be listed.
    """
    found = []
    for name in settings.inputs:
        if name.startswith(HUB):
            found.append(Listed(name, pin(name), pieces(name)))
        else:
            found += [Listed(name, str(file), file_pieces(file)) for file in files_of(name, bad)]
    return found


def make_plan(call: Call, shares: int) -> None:
    """List the inputs for all shares.

    Of two shares that begin at once, the later may replace the plan by an equal one; should it differ, the other share
    does not count, since its record names the plan.
    """
    content = plan_content(call, shares)
    call.working.mkdir(parents=True, exist_ok=True)
    with replacing(call.working / PLAN, call.launch) as file:
        file.write(content)


def plan_content(call: Call, shares: int) -> bytes:
    """A plan of the inputs as they are now, as `read_plan` reads it."""
    call.progress(0, None, f"listing the files of {', '.join(call.settings.inputs)}")
    rows: list[Any] = [{"shards": shares, "settings": asdict(call.settings)}]
    for each in list_inputs(call.settings, BadFiles()):
        rows.append([each.input, each.path, [astuple(piece) for piece in each.pieces]])
    return b"".join(json.dumps(row).encode() + b"\n" for row in rows)


def read_plan(call: Call) -> Plan:
    """The plan in the working folder.

    Raises:
        UserError: it is damaged, or of other settings.
    """
    path = call.working / PLAN
    raw = read_file(path, MAX_LIST_BYTES)
    try:
        head, *rows = [parse_json(line) for line in raw.splitlines()]
        listed = [Listed(name, place, [Piece(*piece) for piece in own]) for name, place, own in rows]
        plan = Plan(Settings(**head["settings"]), head["shards"], listed, xxhash.xxh3_128_hexdigest(raw))
    except (ValueError, TypeError, KeyError):
        raise UserError(f"{path}: not in the form that this Keel writes. {call.advice}") from None
    check_same(call.work, asdict(plan.settings), call.settings, call.advice)
    return plan


# ------------------------------------------------------------------------------------------- content


def contents(parts: Sequence[Piece], known: dict[str, str] | None = None) -> tuple[str, ...]:
    """A hash of each piece's content: of its own bytes in a .jsonl file, otherwise of the file that it is in.

    Args:
        known: hashes of whole files by their path.
    """
    whole = dict(known or {})
    return tuple(_content(piece, whole) for piece in parts)


def _content(piece: Piece, whole: dict[str, str]) -> str:
    if piece.kind == "hub":
        return piece.path  # with the commit
    path = Path(piece.path)
    if piece.kind == "jsonl":
        return content_hash(path, piece.start, piece.stop) if is_file(path) else ""  # a pipe must not be waited for
    if piece.path not in whole:
        hashes = [content_hash(file) for file in plain_files(path)]
        whole[piece.path] = hashes[0] if len(hashes) == 1 else xxhash.xxh3_128_hexdigest("".join(hashes).encode())
    return whole[piece.path]


def require_as_planned(call: Call, listed: Sequence[Listed], now: Sequence[Listed]) -> None:
    """Compare the inputs, by names and sizes, with the plan.

    Raises:
        UserError: some were added, removed or changed.
    """
    before, after = ({each.path: each.pieces for each in some} for some in (listed, now))
    if lines := lines_of_changes(before.keys(), after.keys(), lambda path: before[path] != after[path]):
        what = "the inputs are no longer those of which the first shard has made a list:"
        raise UserError("\n".join([what, *lines, f"Restore them. {call.advice}"]))
