"""Tokenizers, of both formats."""

import json
import random
from pathlib import Path
from typing import Any

from scripts.export.hf_tokenizer import tokenizer_files
from tests.torture.kinds.kind import TEXT, Kind
from tests.torture.mutations import mutated_bytes, mutated_json
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece


def _sentencepiece(folder: Path) -> Path:
    train_sentencepiece(iter(TEXT.splitlines()), folder / "own.model", 500)
    return folder / "own.model"


def _mutated_sentencepiece(content: bytes, dice: random.Random) -> bytes:
    from sentencepiece import sentencepiece_model_pb2

    if dice.random() < 0.5:
        return mutated_bytes(content, dice)
    model = sentencepiece_model_pb2.ModelProto.FromString(content)
    for _ in range(dice.choice((1, 3))):
        piece = dice.choice(model.pieces)
        change = dice.randrange(6)
        if change == 0:
            piece.piece = dice.choice(("", "x" * 100_000, "\x1b[2J", "\u2581", "<0xFF>", "<0xZZ>"))
        elif change == 1:
            piece.score = dice.choice((float("nan"), float("inf"), -1e38, 0.0))
        elif change == 2:
            piece.type = dice.randint(1, 6)
        elif change == 3:
            mark = dice.choice(("unk_id", "bos_id", "eos_id", "pad_id", "vocab_size", "model_type"))
            number = dice.choice((1, 2, 4)) if mark == "model_type" else dice.choice((-1, 2**31 - 1, 3))
            setattr(model.trainer_spec, mark, number)
        elif change == 4:
            model.normalizer_spec.precompiled_charsmap = dice.randbytes(dice.choice((1, 8, 400)))
        else:
            model.pieces.extend([piece] * dice.choice((1, 500)))
    return model.SerializeToString()


def _json_tokenizer(folder: Path) -> Path:
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "\u2581")])
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(tokenizers.Regex(r"\p{L}+|\p{N}{1,3}|\s+"), "isolated"), pre_tokenizers.ByteLevel(False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=["<s>", "</s>"], show_progress=False)
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.enable_truncation(16)
    tokenizer.enable_padding(length=32)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def _mutated_tokenizer(content: bytes, dice: random.Random) -> bytes:
    if dice.random() < 0.6:
        return mutated_json(content, dice)
    values = json.loads(content)
    replace_it = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * dice.choice((2, 1000))}
    vocabulary = values["model"]["vocab"]
    bombs: tuple[dict[str, Any], ...] = (
        {"normalizer": {"type": "Sequence", "normalizers": [replace_it] * dice.choice((1, 3, 6))}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "x" * 1000}] * 9}},
        {"padding": {**values["padding"], "strategy": {"Fixed": 2**30}}},
        {"padding": {**values["padding"], "pad_to_multiple_of": 0}},
        {"truncation": {**values["truncation"], "stride": 99, "max_length": dice.choice((0, 1, 2**63))}},
        {"model": {**values["model"], "vocab": {**vocabulary, "zzz": dice.choice((2**32 - 1, 2**31, 2**24))}}},
        {"model": {**values["model"], "dropout": dice.choice((0.5, 2.0))}},
        {"model": {"type": "Unigram", "unk_id": dice.choice((0, 5, None)), "vocab": [["a", 0.0]]}},
        {"model": {"type": "WordLevel", "vocab": {"a": 2**32 - 1}, "unk_token": "a"}},
        {"added_tokens": [{**values["added_tokens"][0], "id": dice.choice((0, 2**32 - 1)), "content": ""}]},
        {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(["}, "behavior": "Isolated", "invert": False}},
        {"decoder": {"type": "Sequence", "decoders": [replace_it] * 6}},
        {"post_processor": {"type": "Sequence", "processors": [values["post_processor"]] * 3}},
    )
    return json.dumps(values | dice.choice(bombs)).encode()


def _read_tokenizer(path: Path) -> str:
    """As a run and an export read it."""
    tokenizer = load_tokenizer(path)
    text = TEXT[:3_000] + "a" * 50 + "\u2581\n"
    ids = encode_document(tokenizer, text)
    assert all(0 <= i < tokenizer.vocab_size for i in ids), "an id out of range"
    assert len(ids) < 100 * len(text), "a text that has grown"
    tokenizer.decode(ids[:200])
    assert len(tokenizer.token_bytes()) == tokenizer.vocab_size
    tokenizer_files(path)
    return ""


KINDS = (
    Kind("tokenizer.json", _json_tokenizer, _mutated_tokenizer, _read_tokenizer),
    Kind("SentencePiece", _sentencepiece, _mutated_sentencepiece, _read_tokenizer),
)
