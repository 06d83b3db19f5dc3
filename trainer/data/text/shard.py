"""One shard of a preparation: the part of the text that one process tokenizes at a time, and its token files."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any, Self

import numpy as np
import xxhash

from configs.files import exists, write_json
from trainer.data.packing import PackingWriter
from trainer.data.text.bad_files import PATIENCE, BadFiles
from trainer.data.text.documents import Document, Piece, read
from trainer.data.text.fill_in import SUFFIX_FIRST, FimTokens, encode_rearranged, fim_tokens
from trainer.data.text.loss_mask import encode_masked, parts_of
from trainer.data.text.prepared_folder import TRAIN, VALIDATION, Settings, Split, read_json
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import SUFFIX
from trainer.data.tokenizer import encode_document, load_tokenizer


@dataclass(frozen=True)
class Shard:
    """One unit of work, for one process."""

    index: int
    pieces: list[Piece]
    working: Path
    """The hidden folder next to OUTPUT."""
    launch: str
    """Names the folder for its unfinished work; no other launch, on any host, has the same."""
    tokenizer_path: Path
    settings: Settings
    max_bad_files: int
    duplicates: tuple[int, ...] = ()
    """Documents that are copies of earlier ones, by their number in the shard."""
    part: int = 0
    """Which part of its token files' documents it has, if several shards share them (see `shares`)."""
    content: tuple[str, ...] = ()
    """A hash of each piece's content, if that tells whether its files have changed instead of the modification times,
    which differ from host to host."""

    @property
    def name(self) -> str:
        """Name of its files, without the suffix."""
        return f"{self.index:05d}"

    @property
    def n_bytes(self) -> int:
        """Bytes of text, for the progress display."""
        return sum(piece.n_bytes for piece in self.pieces)

    @property
    def unfinished(self) -> Path:
        """The folder in which its token files are written."""
        return self.working / f"unfinished.{self.launch}"

    @property
    def report_path(self) -> Path:
        """The file that records the shard's counts once its token files are complete."""
        return self.working / "reports" / f"{self.name}.json"

    @cached_property
    def inputs_hash(self) -> str:
        """Hash of the shard's inputs: files, their portions, sizes, content or time of change, and what is left out."""
        versions: Sequence[str | int] = self.content or [
            os.stat(piece.path).st_mtime_ns if os.path.exists(piece.path) else 0 for piece in self.pieces
        ]
        facts = [[asdict(piece) for piece in self.pieces], versions, self.duplicates]
        return xxhash.xxh3_128_hexdigest(json.dumps(facts).encode())

    def report(self) -> dict[str, Any] | None:
        """The counts of the finished shard; None if it is unfinished, or its input has changed since."""
        if not exists(self.report_path):
            return None
        report = read_json(self.report_path)
        return report if report.get("inputs_hash") == self.inputs_hash else None


def is_validation(text: bytes, fraction: float) -> bool:
    """Whether a document belongs to the validation set, decided by its hash, which is uniform over 64 bits."""
    return xxhash.xxh3_64_intdigest(text) < fraction * 2**64


def write_shard(shard: Shard) -> dict[str, Any]:
    """Write a shard's token files into the folder for unfinished work; returns its report."""
    bad = BadFiles(shard.max_bad_files, PATIENCE)
    copies = set(shard.duplicates)
    empty = duplicates = 0
    with Outputs(shard) as outputs:
        for number, document in enumerate(documents_of(shard, bad)):
            if not document.text:
                empty += 1
                continue
            is_copy = number in copies
            if is_copy and document.text.strip():
                duplicates += 1
                continue
            is_held_out = is_validation(document.content, shard.settings.validation_fraction)
            tokens = encode(shard, document, is_held_out)
            if not len(tokens):  # white space, of a tokenizer that drops it and has neither BOS nor EOS
                empty += 1
                continue
            if is_copy:
                duplicates += 1
                continue
            outputs.add(VALIDATION if is_held_out else TRAIN, tokens, document.n_bytes)
    return outputs.report(bad, empty, duplicates)


class Outputs:
    """The token files of a shard while they are written, one for each split, and what has gone into them."""

    def __init__(self, shard: Shard) -> None:
        """Begin the files; enter it before the first document."""
        self._shard = shard
        self._writers = {name: _writer(shard, name) for name in shard.settings.splits}
        self._splits = {name: Split() for name in self._writers}
        self._masked = {name: {"tokens_with_loss": 0, "documents_without_loss": 0} for name in self._writers}
        self._prefix = _fim_tokens(shard.tokenizer_path).prefix if shard.settings.fim_rate else None
        self._rearranged = 0

    def __enter__(self) -> Self:
        with ExitStack() as stack:
            for writer in self._writers.values():
                stack.enter_context(writer)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def add(self, name: str, tokens: Sequence[int] | np.ndarray, n_bytes: int) -> None:
        """Add a document, as its token file stores it, to a split; `n_bytes`: of its text."""
        if self._shard.settings.has_mask:
            with_loss = len(tokens) - int((np.asarray(tokens) & 1).sum())
            self._masked[name]["tokens_with_loss"] += with_loss
            self._masked[name]["documents_without_loss"] += not with_loss
        # Of some tokenizers, a text may have these tokens anywhere, but a rearranged document begins with one.
        self._rearranged += name == TRAIN and self._prefix is not None and self._prefix in tokens[:2]
        self._writers[name].append(tokens)
        self._splits[name].add(1, len(tokens), n_bytes)

    def report(self, bad: BadFiles, empty_documents: int, duplicates: int) -> dict[str, Any]:
        """What the files contain, once they are complete."""
        return {
            **{name: asdict(split) for name, split in self._splits.items()},
            "empty_documents": empty_documents,
            "duplicates": duplicates,
            "rearranged": self._rearranged,
            "packed": {
                name: {"windows": writer.n_windows, "cut_documents": writer.n_cut}
                for name, writer in self._writers.items()
                if isinstance(writer, PackingWriter)
            },
            "masked": self._masked,
            "bad_files": bad.messages,
            "skipped": bad.skipped,
            "inputs_hash": self._shard.inputs_hash,
        }


def hash_shard(shard: Shard) -> bytes:
    """xxh3_128 of each of a shard's documents, 16 bytes each."""
    bad = BadFiles(shard.max_bad_files, PATIENCE)
    return b"".join(xxhash.xxh3_128_digest(document.content) for document in documents_of(shard, bad))


def documents_of(shard: Shard, bad: BadFiles) -> Iterator[Document]:
    """A shard's documents, in order; unreadable parts are added to `bad`."""
    for piece in shard.pieces:
        yield from read(piece, shard.settings.keys, bad, shard.settings.separator)
        read_bytes.add(piece.n_bytes)


class _ReadBytes:
    """Counts the bytes of the pieces that this process has read, to show progress."""

    def __init__(self) -> None:
        self.add: Callable[[int], None] = lambda n_bytes: None

    def add_to(self, counter: "Synchronized[int]") -> None:
        """Add to a counter that processes share from now on."""

        def add(n_bytes: int) -> None:
            with counter.get_lock():
                counter.value += n_bytes

        self.add = add


read_bytes = _ReadBytes()


_load_once = cache(load_tokenizer)


@cache
def _fim_tokens(tokenizer_path: Path) -> FimTokens:
    return fim_tokens(_load_once(tokenizer_path))


def _writer(shard: Shard, split: str) -> TokenFileWriter | PackingWriter:
    path = shard.unfinished / split / (shard.name + SUFFIX)
    settings = shard.settings
    writer = TokenFileWriter(path, settings.vocab_size, settings.tokenizer_hash, settings.has_mask)
    return PackingWriter(writer, settings.pack) if settings.pack else writer


def encode(shard: Shard, document: Document, is_held_out: bool) -> Sequence[int] | np.ndarray:
    """A document as its token file stores it; one that is held out for validation is never rearranged."""
    tokenizer = _load_once(shard.tokenizer_path)
    settings = shard.settings
    if settings.prompt_key is not None:
        return encode_masked(tokenizer, [(document.prompt, False), (document.text, True)])
    if settings.mask_until is not None:
        return encode_masked(tokenizer, parts_of(document.text, settings.mask_until, settings.mask_after))
    if settings.fim_rate and not is_held_out:
        suffix_first = SUFFIX_FIRST if settings.fim_spm_rate is None else settings.fim_spm_rate
        tokens = _fim_tokens(shard.tokenizer_path)
        return encode_rearranged(tokenizer, tokens, document.text, settings.fim_rate, suffix_first)
    return encode_document(tokenizer, document.text)


def make_folders(working: Path, settings: Settings, launch: str) -> None:
    """Make the folders in which a launch writes shards, and to which `keep` moves them."""
    (working / "reports").mkdir(exist_ok=True)
    for folder in ("output", f"unfinished.{launch}"):
        for split in settings.splits:
            (working / folder / split).mkdir(parents=True, exist_ok=True)


def keep(shard: Shard, report: dict[str, Any]) -> None:
    """Move a written shard's token files to their final folder, and record that the shard is finished."""
    for split in shard.settings.splits:
        name = Path(split, shard.name + SUFFIX)
        os.replace(shard.unfinished / name, shard.working / "output" / name)
    write_json(shard.report_path, report, shard.launch)
