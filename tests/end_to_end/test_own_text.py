"""A job that prepares one's own text, packed: it trains on all of it, and notices text that comes later."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.launch import curve, launch_here
from trainer.data.tokenizer import load_tokenizer

N_TEXTS = 60


@pytest.mark.slow
def test_a_job_packs_its_text_and_notices_more_of_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    text, tokens = tmp_path / "text", tmp_path / "tokens"
    text.mkdir()
    rows = [json.dumps({"content": f"Text number {i}, and {i**5}. " * (1 + i % 4)}) + "\n" for i in range(N_TEXTS)]
    (text / "a.json").write_text("".join([*rows, rows[0]]))
    (text / "logo.png").write_bytes(b"\0\xff")
    source = f'[{{name = "text", kind = "tokens", path = "{tokens}/%s"}}]'
    keys = {
        "model.vocab_size": "290",
        "tokenizer.path": str(tmp_path / "t.model"),
        "tokenizer.train_on": json.dumps([str(text)]),
        "data.prepare.input": json.dumps([str(text)]),
        "data.prepare.output": str(tokens),
        "data.prepare.text_key": "content",
        "data.prepare.drop_duplicates": "true",
        "data.prepare.pack": "true",
        "data.prepare.mask_until": ", and ",
        "data.prepare.validation_fraction": "0.3",
        "data.sources": source % "train",
        "validation.sources": source % "validation",
        "validation.interval": "2",
        "validation.sequences": "4",
        "training.steps": "4",
        "training.seq_len": "64",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    assert launch_here(tmp_path, *words) == 0
    losses = [loss for _, loss, _ in curve(tmp_path / "run")]
    assert len(losses) == 4
    assert losses[-1] < losses[0]
    record = json.loads((tokens / "prepare.json").read_text())
    assert record["train"]["documents"] + record["validation"]["documents"] == N_TEXTS
    assert record["duplicates"] == 1
    assert record["packed"]["train"]["seq_len"] == 64
    assert 0 < record["masked"]["train"]["tokens_with_loss"] < record["train"]["tokens"]
    said = capsys.readouterr().out
    assert "skipped: 1 binary files" in said
    assert "windows for training.seq_len = 64" in said

    assert launch_here(tmp_path, *words, "--training.seq_len", "32", "--data.prepare.pack", "false") == 78
    said = capsys.readouterr().err
    assert "pack: 64 then, None now" in said
    assert "Change them back, since this run has begun with it. To train on other text, begin another run" in said
    assert "delete" not in said

    (text / "more.json").write_text(rows[0] + rows[1])
    (text / "a.json").unlink()
    assert launch_here(tmp_path, *words, "--training.steps", "6") == 0  # goes on, with the text that it has
    said = capsys.readouterr().err
    changes = f"  added: {text}/more.json\n  removed: {text}/a.json\n"
    assert said.count(f"{tokens}: its text has changed since it was prepared; this run continues with what it has") == 1
    assert f"{changes}To train on other text, begin another run: set another job.name and data.prepare.output" in said
    assert [step for step, *_ in curve(tmp_path / "run")] == [1, 2, 3, 4, 5, 6]

    assert launch_here(tmp_path, *words, "--job.output_dir", str(tmp_path / "new")) == 78
    said = capsys.readouterr().err
    assert f"{tokens}: was made from other files:\n{changes}Choose another output folder" in said
    assert (tokens / "prepare.json").is_file()


def test_a_job_prepares_prompts_and_learns_what_answers_them(tmp_path: Path):
    tokens = tmp_path / "tokens"
    rows = [json.dumps({"ask": f"What is {i} + {i}?", "say": f" It is {2 * i}."}) + "\n" for i in range(N_TEXTS)]
    (tmp_path / "a.jsonl").write_text("".join(rows))
    keys = {
        "model.vocab_size": "277",
        "tokenizer.path": str(tmp_path / "t.model"),
        "tokenizer.train_on": json.dumps([str(tmp_path / "a.jsonl")]),
        "data.prepare.input": json.dumps([str(tmp_path / "a.jsonl")]),
        "data.prepare.output": str(tokens),
        "data.prepare.text_key": "say",
        "data.prepare.prompt_key": "ask",
        "data.sources": f'[{{name = "text", kind = "tokens", path = "{tokens}/train"}}]',
        "training.steps": "2",
    }
    words = [word for key, value in keys.items() for word in (f"--{key}", value)]
    assert launch_here(tmp_path, *words) == 0
    assert len(curve(tmp_path / "run")) == 2
    record = json.loads((tokens / "prepare.json").read_text())
    tokenizer = load_tokenizer(tmp_path / "t.model")
    learned = sum(len(tokenizer.encode(json.loads(row)["say"])) + 1 for row in rows)  # and EOS
    assert record["masked"]["train"] == {"tokens_with_loss": learned, "documents_without_loss": 0}
