"""Text to token ids and back, and training a tokenizer on your own text.

Keel tokenizes with SentencePiece, or with a `tokenizer.json` through the optional package `tokenizers` (Llama 3). Both
look the same to the rest of Keel: a vocabulary size, `encode` and `decode`, the ids of the special tokens around a
document, and a hash that token files record, so that a file can't be read with a different vocabulary.

Text is always text here: "<s>" in a source file becomes the pieces of three characters, never the special token.
"""

import errno
import io
import json
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import sentencepiece
import xxhash

from checkpoint.bucket_files import local_file
from checkpoint.find import MAX_TOKENIZER_BYTES
from configs.errors import ConfigError, UserError
from configs.files import exists, is_folder, replacing, whole
from configs.untrusted import parse_json, read_file, shortened

SPACE = "\u2581"
"""The character for a space in SentencePiece's pieces; it may also occur in a text."""

RUN_CHARACTERS = 1 << 18
"""Length from which a document is encoded in several runs."""

MAX_VOCABULARY = 1 << 24
MAX_GROWTH = 100
"""The most that the replacements of a tokenizer.json, applied in sequence, may lengthen a text, as a factor."""

BOS_NAMES = ("<|begin_of_text|>", "<s>", "<bos>", "[BOS]", "<\uff5cbegin\u2581of\u2581sentence\uff5c>")
EOS_NAMES = ("<|end_of_text|>", "</s>", "<eos>", "[EOS]", "<|endoftext|>", "<\uff5cend\u2581of\u2581sentence\uff5c>")


class Tokenizer(Protocol):
    """The interface of a tokenizer to the rest of Keel."""

    vocab_size: int
    bos_id: int | None
    eos_id: int | None
    hash: str
    """xxh3_128 of the tokenizer's file, in hex."""

    def encode(self, text: str) -> list[int]:
        """Encode `text`, without special tokens around it."""

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids`; special tokens produce no text."""

    def id_of(self, piece: str) -> int | None:
        """The id of a piece, such as a special token, by its name; None if there is no such piece."""

    def token_bytes(self) -> np.ndarray:
        """Bytes of UTF-8 text per id: int32 of shape (vocab_size,), 0 for special tokens."""


def load_tokenizer(path: str | Path, vocab_size: int | None = None) -> Tokenizer:
    """Load a SentencePiece `.model` or a `tokenizer.json`.

    Raises:
        UserError: the file is missing or unreadable, or needs a missing package.
        ConfigError: `vocab_size` is given, and is smaller than the tokenizer's.
    """
    path = local_file(path)
    try:
        content = read_file(path, MAX_TOKENIZER_BYTES)
    except OSError as error:
        remedy = "check tokenizer.path, or --tokenizer of a command"
        raise UserError(f"{whole(path)}: cannot read the tokenizer ({error.strerror}); {remedy}") from None
    tokenizer = JsonTokenizer(path, content) if path.suffix == ".json" else SentencePieceTokenizer(path, content)
    if vocab_size is not None and vocab_size < tokenizer.vocab_size:
        raise ConfigError(
            f"model.vocab_size is {vocab_size}, but the tokenizer {path} has {tokenizer.vocab_size} tokens; "
            f"set model.vocab_size = {tokenizer.vocab_size} or more, or name another tokenizer"
        )
    return tokenizer


def encode_document(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a whole document: BOS, the text, EOS; a special token that the tokenizer lacks is left out.

    With both, every token of a document has its context and its target inside the document: the first word is predicted
    from BOS, the end is predicted as EOS, and no sample depends on which document happens to come next.

    A long document is encoded in runs of lines, because SentencePiece slows down with length (36 MB took 2.7 times as
    long in one piece as in runs). No piece crosses the border of two runs.
    """
    return within_document(tokenizer, encode_runs(tokenizer, text))


def within_document(tokenizer: Tokenizer, tokens: Sequence[int]) -> list[int]:
    """The tokens of a whole document, with BOS and EOS."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    return [*begin, *tokens, *end]


def encode_runs(tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text of any length, without special tokens around it."""
    if len(text) <= RUN_CHARACTERS:
        return tokenizer.encode(text)
    return list(chain.from_iterable(tokenizer.encode(run) for run in _runs(text)))


def _runs(text: str) -> Iterator[str]:
    """Split a text after the first line end beyond each RUN_CHARACTERS."""
    start = 0
    while start < len(text):
        end = text.find("\n", start + RUN_CHARACTERS) + 1 or len(text)
        yield text[start:end]
        start = end


_SPACED = "a\n\n\tb  c"


def losses_of(tokenizer: Tokenizer) -> list[str]:
    """What a tokenizer takes from the texts that a model learns, as sentences: nothing, of one that Keel trained."""
    found = []
    if tokenizer.bos_id is None and tokenizer.eos_id is None:
        found.append("the tokenizer has neither BOS nor EOS, so no token tells a model where a document ends")
    with suppress(UserError):  # of some, a character without a token
        text = tokenizer.decode(tokenizer.encode(_SPACED))
        if text != _SPACED:  # SentencePiece's own defaults make one space of all white space
            found.append(
                f"the tokenizer does not give texts back as they were: {_SPACED!r} becomes {text!r}; what it drops, no "
                "model learns"
            )
    return found


class SentencePieceTokenizer:
    """A SentencePiece model; `decode(encode(text)) == text` for every text if Keel trained it."""

    def __init__(self, path: Path, content: bytes) -> None:
        """Read the model from `content`, the bytes of `path`.

        Raises:
            UserError: they are not a model.
        """
        try:
            self._model = sentencepiece.SentencePieceProcessor()
            self._model.load_from_serialized_proto(content)
            self.vocab_size: int = self._model.get_piece_size()
            self._lengths = [self._bytes_of(i) for i in range(self.vocab_size)]
        except (RuntimeError, UnicodeDecodeError):  # a piece may not be UTF-8
            raise UserError(f"{path}: not a SentencePiece model; expected a .model or a tokenizer.json") from None
        self.bos_id = _id_or_none(self._model.bos_id())
        self.eos_id = _id_or_none(self._model.eos_id())
        self.hash = xxhash.xxh3_128_hexdigest(content)

    def encode(self, text: str) -> list[int]:
        """Encode `text`, without special tokens around it."""
        if SPACE in text and self._space_character:
            parts = ([*self._space_character, *self._model.encode(part)] for part in text.split(SPACE))
            return list(chain.from_iterable(parts))[len(self._space_character) :]
        return self._model.encode(text)

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids`; special tokens produce no text."""
        return self._model.decode([int(i) for i in ids])

    def id_of(self, piece: str) -> int | None:
        """The id of a piece by its name; None if there is no such piece."""
        found: int = self._model.piece_to_id(piece)  # that of the unknown piece if there is none
        return found if self._model.id_to_piece(found) == piece else None

    def token_bytes(self) -> np.ndarray:
        """Bytes of text per id, (vocab_size,): a piece's own length, 1 for a byte piece, 0 for special tokens."""
        return np.array(self._lengths, dtype=np.int32)

    def _bytes_of(self, i: int) -> int:
        if self._model.is_control(i) or self._model.is_unknown(i) or self._model.is_unused(i):
            return 0
        return 1 if self._model.is_byte(i) else len(self._model.id_to_piece(i).replace(SPACE, " ").encode())

    @cached_property
    def _space_character(self) -> list[int]:
        """The byte pieces of SPACE itself, which SentencePiece would decode to a space.

        Empty where that cannot be fixed: without byte pieces, or if every encoded part gets a leading space.
        """
        adds_space = self._model.encode_as_pieces("a")[0].startswith(SPACE)
        ids = [self._model.piece_to_id(f"<0x{byte:02X}>") for byte in SPACE.encode()]
        return ids if all(map(self._model.is_byte, ids)) and not adds_space else []


class JsonTokenizer:
    """A `tokenizer.json` of the package `tokenizers`; its special tokens are found by their usual names.

    Only the parts of the file that map text to ids are used. Truncation and padding, which are in files saved after
    use with them, are not, nor is the post-processor, which adds special tokens or duplicates the text.
    """

    def __init__(self, path: Path, content: bytes) -> None:
        """Read the tokenizer from `content`, the bytes of `path`.

        Raises:
            UserError: they are not a tokenizer.
        """
        try:
            import tokenizers
        except ImportError:
            raise UserError(
                f"{path}: a tokenizer.json needs the package tokenizers; install it: pip install tokenizers"
            ) from None
        self._path = path
        with _panics_as_errors(f"{path}: not a tokenizer.json"):
            description = _parse_description(content)
            self._model = tokenizers.Tokenizer.from_str(json.dumps(description))
            self._added = self._model.get_added_tokens_decoder()
            special = {token.content for token in self._added.values() if token.special}
            own = _without_pieces(special, description)
            self._encoder = self._model if own is description else tokenizers.Tokenizer.from_str(json.dumps(own))
            self._encoder.encode_special_tokens = True  # a special token's name in a text is text
            self._decoder: dict[str, Any] = description["decoder"] or {}
            self._ids: dict[str, int] = self._model.get_vocab(with_added_tokens=True)
            self.vocab_size = max(self._ids.values(), default=0) + 1
            if self.vocab_size > MAX_VOCABULARY:
                raise ValueError(f"its ids go up to {self.vocab_size - 1:,}; Keel reads less than {MAX_VOCABULARY:,}")
        self.bos_id = self._first_id(BOS_NAMES)
        self.eos_id = self._first_id(EOS_NAMES)
        self.hash = xxhash.xxh3_128_hexdigest(content)

    def encode(self, text: str) -> list[int]:
        """Encode `text`, without special tokens around it."""
        with _panics_as_errors(f"{self._path}: can't encode a text"):
            return self._encoder.encode(text, add_special_tokens=False).ids

    def decode(self, ids: Sequence[int]) -> str:
        """Decode `ids`; special tokens produce no text."""
        with _panics_as_errors(f"{self._path}: can't decode"):
            return self._model.decode([int(i) for i in ids], skip_special_tokens=True)

    def id_of(self, piece: str) -> int | None:
        """The id of a piece by its name; None if there is no such piece."""
        return self._ids.get(piece)

    def pieces(self) -> dict[int, str]:
        """The vocabulary's name for each id."""
        return {i: piece for piece, i in self._ids.items()}

    def token_bytes(self) -> np.ndarray:
        """Bytes of text per id, (vocab_size,), 0 for special tokens and unused ids.

        Raises:
            UserError: the pieces do not tell their length (they are neither byte-level nor like SentencePiece's).
        """
        kinds = {step["type"] for step in [self._decoder, *self._decoder.get("decoders", [])] if step}
        if not kinds & {"ByteLevel", "ByteFallback", "Metaspace"}:
            raise UserError(
                f"{self._path}: its decoder {sorted(kinds)} does not tell how many bytes a token stands for"
            )
        lengths = np.zeros(self.vocab_size, dtype=np.int32)
        for piece, i in self._ids.items():
            lengths[i] = len(piece) if "ByteLevel" in kinds else _bytes_of_piece(piece)
        for i, token in self._added.items():
            own = len(token.content.encode()) if "ByteLevel" in kinds else _bytes_of_piece(token.content)
            lengths[i] = 0 if token.special else own
        return lengths

    def _first_id(self, names: Sequence[str]) -> int | None:
        """The id of the first of these names; of special tokens, if one is: to Gemma, "<s>" is a tag of HTML."""
        special = {token.content: i for i, token in self._added.items() if token.special}
        ids = next((ids for ids in (special, self._ids) if not ids.keys().isdisjoint(names)), {})
        return next((ids[name] for name in names if name in ids), None)


def _parse_description(content: bytes) -> dict[str, Any]:
    """Parse the JSON of a tokenizer and remove truncation, padding and post-processor.

    Raises:
        ValueError: it is not such JSON, or its replacements may lengthen a text too much.
    """
    description = parse_json(content)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (growth := _growth(description[part])) > MAX_GROWTH:
            raise ValueError(f"its {part} makes a text up to {growth:,} times longer; Keel allows at most {MAX_GROWTH}")
    return description | dict.fromkeys(("truncation", "padding", "post_processor"))


def _without_pieces(names: Collection[str], description: dict[str, Any]) -> dict[str, Any]:
    """The tokenizer whose pieces of these names, its special tokens, match no text; ids stay as they are.

    Unigram looks for every piece of its vocabulary in a text, and its special tokens are among them, with the best
    score. A piece without a name keeps its id. BPE builds pieces up by merges, and none leads to a special token.
    """
    model = description["model"]
    if not isinstance(model["vocab"], list):  # Unigram's is one, of pieces and scores
        return description
    pieces = {piece for piece, _ in model["vocab"]} & {*names}
    vocab = [["" if piece in pieces else piece, score] for piece, score in model["vocab"]]
    added = [token for token in description["added_tokens"] if token["content"] not in pieces]
    return description | {"model": model | {"vocab": vocab}, "added_tokens": added}


def _growth(step: Any) -> int:
    """The factor by which a step, or all steps in it applied in sequence, may lengthen a text."""
    if isinstance(step, list):
        return prod(map(_growth, step))
    if not isinstance(step, dict):
        return 1
    added = step.get("content") or step.get("prepend") or ""
    is_text = isinstance(added, str) and step.get("type") in ("Replace", "Prepend")
    own = max(1, len(added)) if is_text else 1
    return own * prod(_growth(value) for value in step.values() if isinstance(value, list))


@contextmanager
def _panics_as_errors(message: str) -> Iterator[None]:
    """Turn what the package raises into UserError: plain Exception, and for internal errors pyo3's PanicException,
    which is a BaseException."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        what = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise UserError(f"{message} ({shortened(str(what), 400)})") from None


def _bytes_of_piece(piece: str) -> int:
    """Bytes of a SentencePiece-like piece: `<0x0A>` is one byte, others their text."""
    is_byte = len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">")
    return 1 if is_byte else len(piece.replace(SPACE, " ").encode())


def _id_or_none(i: int) -> int | None:
    return i if i >= 0 else None


_FIXED_PIECES = 259
"""What every tokenizer that Keel trains has: unknown, BOS, EOS and bytes."""


def train_sentencepiece(
    texts: Iterator[str],
    output: Path,
    vocab_size: int,
    at_end: Callable[[], None] = lambda: None,
    control_tokens: Sequence[str] = (),
) -> None:
    """Train a BPE tokenizer of `vocab_size` pieces on `texts` and write it to `output` atomically.

    Text is not normalized, and every character can be encoded (byte fallback), so that decoding restores exactly what
    was encoded. Pieces of spaces and newlines are allowed: without them, source code takes 1.7 times the tokens. The
    same texts give the same file. Ids: 0 unknown, 1 BOS, 2 EOS, then control tokens, 256 bytes, and pieces.

    Args:
        at_end: called once all texts are read, before the training.
        control_tokens: names of further tokens that no text has.

    Raises:
        UserError: the texts are too few for the vocabulary, or `output` cannot be written. Anything that `texts` raises
            is raised as well.
    """
    if output.suffix == ".json":
        raise UserError(f"{output}: a SentencePiece model would be read as a tokenizer.json; name it .model")
    if vocab_size > MAX_VOCABULARY:  # SentencePiece holds it in 32 bits
        raise UserError(f"{output}: a tokenizer of {vocab_size:,} pieces; Keel trains one of up to {MAX_VOCABULARY:,}")
    _require_writable(output)
    reader = _Reader(texts, at_end)
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=reader.read(),
            model_writer=model,
            model_type="bpe",
            vocab_size=vocab_size,
            character_coverage=0.9995,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            allow_whitespace_only_pieces=True,
            split_digits=True,
            byte_fallback=True,
            unk_id=0,
            bos_id=1,
            eos_id=2,
            control_symbols=[*control_tokens],
            max_sentence_length=2**30,  # SentencePiece skips longer documents; its default is 4,192 bytes
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        fixed = _FIXED_PIECES + len(control_tokens)
        raise reader.error or _training_error(error, reader, output, vocab_size, fixed) from None
    _write_whole(output, model.getvalue())


def _require_writable(output: Path) -> None:
    """Refuse, before texts are read for minutes, an output that could not be written."""
    with _named(output):
        folder = next(parent for parent in output.absolute().parents if exists(parent))
        refusals = {
            errno.EISDIR: is_folder(output),
            errno.ENOTDIR: not is_folder(folder),
            errno.EACCES: not os.access(folder, os.W_OK | os.X_OK),
        }
        if refused := [number for number, is_refused in refusals.items() if is_refused]:
            raise OSError(refused[0], os.strerror(refused[0]))


def _write_whole(output: Path, content: bytes) -> None:
    with _named(output):
        output.parent.mkdir(parents=True, exist_ok=True)
        with replacing(output, str(os.getpid())) as file:
            file.write(content)


@contextmanager
def _named(output: Path) -> Iterator[None]:
    """Name the tokenizer that the disk refuses."""
    try:
        yield
    except OSError as error:
        raise UserError(f"{output}: cannot write the tokenizer ({error.strerror})") from None


class _Reader:
    """Passes texts to SentencePiece and keeps their source's error, which SentencePiece would replace by its own."""

    def __init__(self, texts: Iterator[str], at_end: Callable[[], None]) -> None:
        self._texts = texts
        self._at_end = at_end
        self.error: BaseException | None = None
        self.n_bytes = 0

    def read(self) -> Iterator[str]:
        try:
            for text in filter(None, self._texts):
                self.n_bytes += len(text.encode())
                yield text
            self._at_end()
        except BaseException as error:  # Ctrl-C, too
            self.error = error
            raise


def _training_error(error: RuntimeError, reader: _Reader, output: Path, vocab_size: int, fixed: int) -> UserError:
    reason = str(error).rpartition("] ")[2].strip()  # SentencePiece's message, without its source position
    reason = reason.partition(" or decrease character_coverage")[0]  # an option of SentencePiece's own command
    if not reader.n_bytes:  # SentencePiece names its own variable
        reason = "all documents are empty, or there are none"
    return UserError(
        f"cannot train a tokenizer of {vocab_size} pieces on {reader.n_bytes} bytes of text for {output}: {reason}\n"
        f"Give it more text, or another vocabulary size (at least {fixed} plus the characters of the text)"
    )
