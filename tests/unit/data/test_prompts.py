"""Prompts in a column of their own are read and not learned: tokens and mask, against a plain loop over records."""

import csv
import json

import datasets
import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import xxhash

from configs.errors import UserError
from scripts.prepare_data import main as prepare_data
from tests.preparing import call_of, prepare
from tests.unit.data.test_shares import content, small_parts
from trainer.data.text import finish
from trainer.data.text.shares import make_share
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

VOCAB_SIZE = 280
KEYS = {"prompt_key": "ask", "text_key": "say"}
PACKED = 40


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    train_sentencepiece(iter(["what is it? it is what it is. " * 20]), path, VOCAB_SIZE)
    return path


def records(n=60):
    """Prompts and answers of any length, some prompts empty, some answers empty, some records twice."""
    dice = np.random.default_rng(0)
    words = ["what", "is", "it", "?", "7", "\N{SNOWMAN}", "yes,\nno\t"]
    found = []
    for number in range(n):
        prompt = " ".join(dice.choice(words, dice.integers(0, 6)))
        answer = " ".join(dice.choice(words, dice.integers(0, 9)))
        found.append({"id": number, "say": answer, "ask": prompt})
    # The first two are one text once joined, and two documents all the same.
    return [{"id": n, "say": "it is", "ask": "what "}, {"id": n, "say": "what it is", "ask": ""}, *found, *found[:9]]


def write_jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_csv(path, rows):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, ["id", "say", "ask"], delimiter="\t" if path.suffix == ".tsv" else ",")
        writer.writeheader()
        writer.writerows(rows)


def write_parquet(path, rows):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=25)


WRITERS = {
    "x.jsonl": write_jsonl,
    "x.json": lambda path, rows: path.write_text(json.dumps(rows)),
    "x.csv": write_csv,
    "x.tsv": write_csv,
    "x.parquet": write_parquet,
    "saved": lambda path, rows: datasets.Dataset.from_list(rows).save_to_disk(path),
}


def documents_in(folder):
    """Of each document, its tokens and whether each gives loss."""
    tokens, gives_none = folder.read_with_mask(0, folder.n_tokens)
    cuts = folder.document_starts(0, folder.n_tokens)[1:]
    parts = zip(np.split(tokens, cuts), np.split(~gives_none, cuts), strict=True)
    return [list(zip(ids.tolist(), learned.tolist(), strict=True)) for ids, learned in parts]


def expected(tokenizer_path, rows):
    """The documents that the rows must become, by the documented rule."""
    tokenizer = load_tokenizer(tokenizer_path)
    found = []
    for row in rows:
        if row["say"]:
            prompt = [tokenizer.bos_id, *tokenizer.encode(row["ask"])]
            answer = [*tokenizer.encode(row["say"]), tokenizer.eos_id]
            found.append([*((token, False) for token in prompt), *((token, True) for token in answer)])
    return found


@pytest.mark.parametrize("name", WRITERS)
def test_a_document_is_its_prompt_and_its_text_of_which_the_text_gives_loss(tmp_path, tokenizer, name):
    rows = records()
    WRITERS[name](tmp_path / name, rows)
    with small_parts():
        record = prepare([str(tmp_path / name)], tmp_path / "out", tokenizer, **KEYS)
    found = documents_in(TokenFolder(tmp_path / "out/train", VOCAB_SIZE))
    assert found == expected(tokenizer, rows)
    n_learned = sum(learned for document in found for _, learned in document)
    assert record["masked"] == {"train": {"tokens_with_loss": n_learned, "documents_without_loss": 0}}
    assert record["empty_documents"] == sum(not row["say"] for row in rows) > 0
    n_bytes = sum(len(row["ask"].encode()) + len(row["say"].encode()) for row in rows if row["say"])
    assert record["train"]["text_bytes"] == n_bytes


def test_copies_have_the_same_prompt_and_text_and_are_never_on_both_sides(tmp_path, tokenizer):
    rows = records()
    write_jsonl(tmp_path / "x.jsonl", rows)
    options = KEYS | {"drop_duplicates": True, "validation_fraction": 0.4}
    record = prepare([str(tmp_path / "x.jsonl")], tmp_path / "out", tokenizer, **options)
    pairs = [(row["ask"], row["say"]) for row in rows]
    answered = [row for number, row in enumerate(rows) if row["say"] and pairs.index(pairs[number]) == number]
    assert record["duplicates"] == sum(bool(row["say"]) for row in rows) - len(answered) > 0
    sides = {"train": [], "validation": []}
    for row in answered:
        both = [row[key].encode() for key in ("ask", "say") if row[key]]
        is_held_out = xxhash.xxh3_64_intdigest(b"\xff".join(both)) < 0.4 * 2**64
        sides["validation" if is_held_out else "train"].append(row)
    for side, its_rows in sides.items():
        assert its_rows
        assert documents_in(TokenFolder(tmp_path / "out" / side, VOCAB_SIZE)) == expected(tokenizer, its_rows)


@pytest.mark.parametrize("options", [{}, {"pack": PACKED}, {"drop_duplicates": True}], ids=str)
@pytest.mark.parametrize("n", [2, 40])
def test_shares_give_the_bytes_of_one_process(tmp_path, tokenizer, n, options):
    write_jsonl(tmp_path / "x.jsonl", records())
    write_parquet(tmp_path / "y.parquet", records(30))
    inputs = [str(tmp_path / name) for name in ("x.jsonl", "y.parquet")]
    options = options | KEYS | {"validation_fraction": 0.2}
    with small_parts():
        prepare(inputs, tmp_path / "one", tokenizer, **options)
        for share in reversed(range(n)):
            make_share(call_of(inputs, tmp_path / "out", tokenizer, **options), share, n)
        finish.finish(call_of(inputs, tmp_path / "out", tokenizer, **options))
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_a_long_prompt_is_cut_by_packing_and_keeps_its_mask(tmp_path, tokenizer):
    rows = [{"ask": "what is it? " * 30, "say": "it is"}, {"ask": "it?", "say": "7"}]
    write_jsonl(tmp_path / "x.jsonl", rows)
    prepare([str(tmp_path / "x.jsonl")], tmp_path / "out", tokenizer, pack=PACKED, **KEYS)
    found = documents_in(TokenFolder(tmp_path / "out/train", VOCAB_SIZE))
    first, second = expected(tokenizer, rows)
    parts = [first[at : at + PACKED + 1] for at in range(0, len(first), PACKED + 1)]
    assert sorted(found) == sorted([*parts, second])


def test_where_no_token_crosses_the_border_the_whole_text_has_the_same_tokens(tmp_path, tokenizer):
    """The rule of TRL's SFTTrainer: encode both as one text, and mask as many tokens as the prompt alone has."""
    rows = [{"ask": f"what is it? {n}?", "say": f" it is {n * n}."} for n in range(50)]
    write_jsonl(tmp_path / "x.jsonl", rows)
    prepare([str(tmp_path / "x.jsonl")], tmp_path / "out", tokenizer, **KEYS)
    model = load_tokenizer(tokenizer)
    for row, found in zip(rows, documents_in(TokenFolder(tmp_path / "out/train", VOCAB_SIZE)), strict=True):
        whole = [model.bos_id, *model.encode(row["ask"] + row["say"]), model.eos_id]
        n_masked = 1 + len(model.encode(row["ask"]))
        assert found == [(token, place >= n_masked) for place, token in enumerate(whole)]


# --------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("x.jsonl", '{"say": "a"}\n', r"x\.jsonl:1: no text under the key 'ask'; the keys are \['say'\]; --prompt-key"),
        ("x.jsonl", '{"say": "a", "ask": null}\n', r"x\.jsonl:1: 'ask' is null, not a text"),
        ("x.jsonl", '{"ask": "a"}\n', r"x\.jsonl:1: no text under the key 'say'.*--text-key \(text_key in a job\)"),
        ("x.csv", "say,id\na,b\n", r"x\.csv: no column 'ask'; there are \['say', 'id'\]; --prompt-key \(prompt_key in"),
        ("x.csv", "ask,id\na,b\n", r"x\.csv: no column 'say'.*; --text-key \(text_key in a job\) names another"),
        ("x.txt", "a text", r"x\.txt: it has no records, and so no prompt 'ask' \(prompt_key\); give files of records"),
        ("x.json", '["a text"]', r"x\.json: it has no records, and so no prompt 'ask' \(prompt_key\)"),
    ],
)
def test_what_has_no_prompt_is_named(tmp_path, tokenizer, name, content, said):
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=said):
        prepare([str(tmp_path / name)], tmp_path / "out", tokenizer, **KEYS)
    assert not (tmp_path / "out").exists()


def test_a_parquet_file_without_the_column_is_named(tmp_path, tokenizer):
    write_parquet(tmp_path / "x.parquet", [{"say": "a"}])
    with pytest.raises(UserError, match=r"x\.parquet: no column 'ask'; there are \['say'\]; --prompt-key"):
        prepare([str(tmp_path / "x.parquet")], tmp_path / "out", tokenizer, **KEYS)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--prompt-key", "ask", "--mask-until", "x"], "--prompt-key and --mask-until both say what gives loss"),
        (["--prompt-key", "text"], "--prompt-key and --text-key both name 'text'"),
        (["--prompt-key", ""], "an empty name names no field or column"),
    ],
)
def test_options_that_contradict_are_refused(tmp_path, tokenizer, capsys, words, said):
    with pytest.raises(SystemExit):
        prepare_data([str(tmp_path), "--output", "out", "--tokenizer", str(tokenizer), *words])
    assert said in capsys.readouterr().err


def test_the_command_says_the_counts_and_refuses_another_column_for_the_same_folder(tmp_path, tokenizer, capsys):
    write_jsonl(tmp_path / "x.jsonl", [{"say": "yes", "ask": "it?", "other": "is it?"}])
    command = [str(tmp_path / "x.jsonl"), "--output", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    command += ["--processes", "1", "--text-key", "say"]
    assert prepare_data([*command, "--prompt-key", "ask"]) == 0
    [document] = documents_in(TokenFolder(tmp_path / "out/train", VOCAB_SIZE))
    learned = sum(gives_loss for _, gives_loss in document)
    said = " ".join(capsys.readouterr().out.split())
    assert f"{learned} tokens ({learned / len(document):.2%}) give loss; 0 documents have no such token" in said
    assert prepare_data([*command, "--prompt-key", "other"]) == 1
    assert "prompt_key: 'ask' then, 'other' now" in capsys.readouterr().err
