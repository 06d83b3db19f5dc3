"""The tokenizers of exported folders: transformers gives Keel's ids, character for character."""

import json
import sysconfig
from pathlib import Path

import pytest
import sentencepiece

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_import import import_hf
from checkpoint.manifest import read_manifest
from configs.errors import UserError
from scripts import export_hf as script
from scripts.export.hf_tokenizer import find_tokenizer, tokenizer_files
from tests.unit.hf_support import TINY, make_model, save
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

CASES = [
    "",
    " ",
    "  two leading",
    "a\n\n\nb\t",
    "héllo  世界 🙂\r\n",
    "x" * 50,
    "1234567",
    "\x00\x7f",
    "<s>",
    "e\u0301 ①",
]


def stdlib_texts(n_files, n_characters):
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:n_files]
    return [file.read_text(errors="replace")[:n_characters] for file in files]


@pytest.fixture(scope="module")
def sentencepiece_model(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "own.model"
    train_sentencepiece(iter(stdlib_texts(12, 30_000)), path, 900)
    return path


def write(files, folder):
    folder.mkdir()
    for name, content in files.files.items():
        (folder / name).write_bytes(content)
    (folder / "config.json").write_text('{"model_type": "llama"}')
    return folder


@pytest.mark.parametrize("loader", ["AutoTokenizer", "LlamaTokenizer"])
def test_the_same_ids_on_real_text(tmp_path, sentencepiece_model, loader):
    import transformers

    ours = load_tokenizer(sentencepiece_model)
    theirs = getattr(transformers, loader).from_pretrained(
        write(tokenizer_files(sentencepiece_model), tmp_path / "hf"), split_special_tokens=True
    )
    texts = [text.replace("\u2581", "") for text in stdlib_texts(40, 8_000)] + CASES
    assert len(texts) > 40
    for text in texts:
        ids = ours.encode(text)
        assert theirs.encode(text, add_special_tokens=False) == ids
        assert theirs.decode(ids) == text
    assert theirs.encode("a") == [ours.bos_id, *ours.encode("a")]
    assert (theirs.bos_token_id, theirs.eos_token_id, len(theirs)) == (ours.bos_id, ours.eos_id, ours.vocab_size)


def test_a_space_before_the_text(tmp_path):
    """Llama 2's own tokenizer puts one there, and takes it away again."""
    from transformers import AutoTokenizer

    path = tmp_path / "llama.model"
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter("\n".join(stdlib_texts(6, 20_000)).splitlines()),
        model_prefix=str(path.with_suffix("")),
        model_type="bpe",
        vocab_size=600,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        byte_fallback=True,
        minloglevel=2,
    )
    ours = load_tokenizer(path)
    theirs = AutoTokenizer.from_pretrained(write(tokenizer_files(path), tmp_path / "hf"))
    for text in ["a b", "def f(x):\n    return x", " leading"]:
        assert theirs.encode(text, add_special_tokens=False) == ours.encode(text)
        assert theirs.decode(ours.encode(text)) == text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"model_type": "unigram"}, "it is not a BPE model"),
        ({"normalization_rule_name": "nmt_nfkc"}, "it normalizes text"),
        ({"byte_fallback": False}, "it has no byte pieces"),
        ({"user_defined_symbols": ["<pad>"]}, "it has user-defined pieces"),
    ],
)
def test_models_without_an_exact_counterpart(tmp_path, capsys, options, reason):
    path = tmp_path / "other.model"
    settings = {
        "model_type": "bpe",
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "byte_fallback": True,
        "vocab_size": 400,
        "minloglevel": 2,
    }
    lines = "\n".join(stdlib_texts(4, 10_000)).splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(path.with_suffix("")), **(settings | options)
    )
    with pytest.raises(UserError, match=reason):
        tokenizer_files(path)
    checkpoint = save(tmp_path / "step-00000001", make_model(TINY["tied"]))
    arguments = [str(checkpoint), str(tmp_path / "out"), "--tokenizer"]
    assert script.main([*arguments, str(path)]) == 1
    assert "--tokenizer none" in " ".join(capsys.readouterr().err.split())
    assert script.main([*arguments, "none"]) == 0


def test_a_tokenizer_json_goes_as_it_is(tmp_path, sentencepiece_model):
    """As Llama 3's does; its marks are found by their names."""
    from transformers import AutoTokenizer

    content = json.loads(tokenizer_files(sentencepiece_model).files["tokenizer.json"])
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(content))
    files = tokenizer_files(path)
    assert files.files["tokenizer.json"] == path.read_bytes()
    assert files.files.keys() == {"tokenizer.json", "tokenizer_config.json"}
    theirs = AutoTokenizer.from_pretrained(write(files, tmp_path / "hf"))
    assert (theirs.bos_token, theirs.eos_token) == ("<s>", "</s>")
    assert (files.bos_id, files.eos_id) == (1, 2)


def test_a_job_without_a_tokenizer():
    assert tokenizer_files(None) == TokenizerFiles()


def test_the_tokenizer_goes_with_the_model_both_ways(tmp_path, sentencepiece_model):
    checkpoint = save(tmp_path / "step-00000001", make_model(TINY["tied"]))
    export_hf(checkpoint, tmp_path / "hf", tokenizer_files(sentencepiece_model))
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    tokenizer = find_tokenizer(tmp_path / "hf")
    assert tokenizer == tmp_path / "hf/tokenizer.model"
    import_hf(tmp_path / "hf", tmp_path / "back", tokenizer)
    manifest = read_manifest(tmp_path / "back")
    assert manifest.config["tokenizer"] == {"path": str(tmp_path / "back/tokenizer.model")}
    assert manifest.tokenizer_hash == load_tokenizer(sentencepiece_model).hash
    assert (tmp_path / "back/tokenizer.model").read_bytes() == sentencepiece_model.read_bytes()
    (tmp_path / "hf/tokenizer.model").write_bytes(b"as Llama 3's, of another kind")
    assert find_tokenizer(tmp_path / "hf") == tmp_path / "hf/tokenizer.json"
    (tmp_path / "hf/tokenizer.json").unlink()
    assert find_tokenizer(tmp_path / "hf") is None
