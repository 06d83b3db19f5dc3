"""Export of Keel's tokenizers to Hugging Face: the files that `transformers` and libraries built on it read.

A `tokenizer.json` is copied unchanged. A SentencePiece model is copied unchanged, too, along with a `tokenizer.json`
that gives the same ids, so that no reader has to guess its settings (`LlamaTokenizer`, for one, prepends a space unless
told not to). Two differences remain in how `transformers` treats text: it reads "<s>" as the special token (unless
`split_special_tokens = True`), and the character U+2581 as a space.
"""

import json
from pathlib import Path
from typing import Any

from checkpoint.export.hf_export import TokenizerFiles
from checkpoint.export.hf_folder import require_inside
from configs.errors import KeelError, UserError
from trainer.data.tokenizer import SPACE, JsonTokenizer, load_tokenizer

SENTENCEPIECE_NAME = "tokenizer.model"
JSON_NAME = "tokenizer.json"
CONFIG_NAME = "tokenizer_config.json"

_BPE = 2
_MAX_PIECE = 1024  # SentencePiece's have 16 characters at most; each is split in two at every place
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _BYTE = range(1, 7)
"""Enum values in sentencepiece_model.proto: TrainerSpec.ModelType and SentencePiece.Type."""


def tokenizer_files(path: str | Path | None) -> TokenizerFiles:
    """Make the files for a Hugging Face folder from the tokenizer at `path`; none if there is no tokenizer.

    Raises:
        UserError: the tokenizer can't be read, or has no exact counterpart.
    """
    if path is None:
        return TokenizerFiles()
    path = Path(path)
    tokenizer = load_tokenizer(path)
    content = path.read_bytes()
    if isinstance(tokenizer, JsonTokenizer):
        files = {JSON_NAME: content}
        tokens = tokenizer.pieces()
        settings = {}
    else:
        model = _parse(path, content)
        tokens = {i: piece.piece for i, piece in enumerate(model.pieces)}
        files = {SENTENCEPIECE_NAME: content, JSON_NAME: _json_bytes(_to_json(model, tokenizer.bos_id))}
        # For users who request LlamaTokenizer by name; it builds its own tokenizer from the pieces and these settings.
        settings = {"add_prefix_space": model.normalizer_spec.add_dummy_prefix, "legacy": False}
    marks = {"bos_token": tokenizer.bos_id, "eos_token": tokenizer.eos_id}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # uses tokenizer.json as it is, in all versions
        "clean_up_tokenization_spaces": False,
        **settings,
        **{name: tokens[i] for name, i in marks.items() if i is not None},
    }
    return TokenizerFiles(files | {CONFIG_NAME: _json_bytes(config)}, tokenizer.bos_id, tokenizer.eos_id)


def find_tokenizer(folder: Path) -> Path | None:
    """The tokenizer in a Hugging Face folder that Keel can read, or None.

    A SentencePiece model comes first: it is the original, and Keel's own if Keel made the folder. (Llama 3's
    `tokenizer.model` is of another kind.)

    Raises:
        UserError: it is a link that leads out of the folder.
    """
    for name in (SENTENCEPIECE_NAME, JSON_NAME):
        require_inside(folder / name)
        try:
            load_tokenizer(folder / name)
        except KeelError:
            continue
        return folder / name
    return None


def _parse(path: Path, content: bytes) -> Any:
    """Parse the model's protobuf.

    Raises:
        UserError: tokenizer.json can't express the model exactly.
    """
    from sentencepiece import sentencepiece_model_pb2

    try:
        model = sentencepiece_model_pb2.ModelProto.FromString(content)  # type: ignore[attr-defined]
    except Exception as error:  # protobuf's DecodeError, which would need an import of protobuf
        raise UserError(f"{path} can't be read: {error}") from None
    normalizer = model.normalizer_spec
    unlike = {
        "its special tokens are not among its pieces": not 0 <= model.trainer_spec.unk_id < len(model.pieces),
        f"it has a piece of more than {_MAX_PIECE} characters": any(len(p.piece) > _MAX_PIECE for p in model.pieces),
        "it is not a BPE model": model.trainer_spec.model_type != _BPE,
        "it normalizes text": bool(normalizer.precompiled_charsmap) or normalizer.remove_extra_whitespaces,
        "it does not mark spaces": not normalizer.escape_whitespaces,
        "it puts spaces at the end of words": model.trainer_spec.treat_whitespace_as_suffix,
        "it has no byte pieces": not model.trainer_spec.byte_fallback,
        "it has user-defined pieces": any(piece.type == _USER_DEFINED for piece in model.pieces),
    }
    reasons = [reason for reason, holds in unlike.items() if holds]
    if reasons:
        raise UserError(f"{path} has no exact counterpart as a {JSON_NAME}: {'; '.join(reasons)}")
    return model


def _to_json(model: Any, bos_id: int | None) -> dict[str, Any]:
    """The tokenizer.json of a SentencePiece BPE model: its pieces, and the merges that its scores imply."""
    pieces = {piece.piece: i for i, piece in enumerate(model.pieces)}
    unknown = model.trainer_spec.unk_id
    marks = [i for i, piece in enumerate(model.pieces) if piece.type in (_UNKNOWN, _CONTROL)]
    prefix = [{"type": "Prepend", "prepend": SPACE}] if model.normalizer_spec.add_dummy_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    space = {"pattern": {"String": " "}, "content": SPACE}
    back = {"pattern": {"String": SPACE}, "content": " "}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_mark(i, model.pieces[i].piece) for i in marks],
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, {"type": "Replace", **space}]},
        "pre_tokenizer": None,
        "post_processor": None if bos_id is None else _bos_first(bos_id, model.pieces[bos_id].piece),
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", **back}, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": model.pieces[unknown].piece,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": pieces,
            "merges": _merges(model),
        },
    }


def _merges(model: Any) -> list[list[str]]:
    """Every pair of pieces that makes a piece, best score first.

    Among all neighbors that make a piece, SentencePiece merges those with the best score; a tokenizer.json lists the
    pairs in that order. Pairs that make the same piece are in the order of their halves' ids.
    """
    ids = {piece.piece: i for i, piece in enumerate(model.pieces) if piece.type == _NORMAL}
    merges = []
    for piece in ids:
        halves = ((piece[:cut], piece[cut:]) for cut in range(1, len(piece)))
        pairs = [(ids[left], ids[right]) for left, right in halves if left in ids and right in ids]
        merges += [(-model.pieces[ids[piece]].score, *pair) for pair in pairs]
    return [[model.pieces[left].piece, model.pieces[right].piece] for _, left, right in sorted(merges)]


def _mark(i: int, content: str) -> dict[str, Any]:
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    return {"id": i, "content": content, **flags}


def _bos_first(bos_id: int, bos: str) -> dict[str, Any]:
    """The post-processor that puts BOS before a text, as Keel puts it before every document."""

    def sequence(name: str, type_id: int) -> list[dict[str, Any]]:
        mark = {"SpecialToken": {"id": bos, "type_id": type_id}}
        return [mark, {"Sequence": {"id": name, "type_id": type_id}}]

    return {
        "type": "TemplateProcessing",
        "single": sequence("A", 0),
        "pair": [*sequence("A", 0), *sequence("B", 1)],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }


def _json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False, indent=1) + "\n").encode()
