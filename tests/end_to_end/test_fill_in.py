"""A job that learns to fill in the middle, from text to a filled gap."""

import json
import random

import pytest

from scripts import sample
from tests.end_to_end.launch import TINY, launch

JOB = f"""
base = "{TINY}"
[model]
vocab_size = 288
[tokenizer]
path = "t.model"
train_on = ["text.jsonl"]
[data]
document_mask = true
[data.prepare]
input = ["text.jsonl"]
output = "data"
fim_rate = 1.0
fim_spm_rate = 0.0
pack = true
[[data.sources]]
name = "text"
kind = "tokens"
path = "data/train"
[training]
steps = 600
seq_len = 32
global_batch_size = 32
micro_batch_size = 32
[lr_schedule]
warmup_steps = 50
total_steps = 600
[metrics]
interval = 100
"""


@pytest.mark.slow
def test_a_job_learns_from_both_sides_of_a_gap(tmp_path, monkeypatch, capsys):
    """In each text the last letter stands twice, so what is missing before it can be read behind the gap alone."""
    dice = random.Random(0)
    texts = [dice.choice("abcdefghij") + 2 * dice.choice("klmnopqrst") for _ in range(20_000)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    (tmp_path / "job.toml").write_text(JOB)
    launch(tmp_path, "", config=tmp_path / "job.toml")
    monkeypatch.chdir(tmp_path)
    filled = []
    for letter in "klmnopqrst":
        assert sample.main(["run", "c", "--suffix", letter, "--temperature", "0", "--max-tokens", "5"]) == 0
        text = capsys.readouterr().out.removesuffix("\n")
        assert (text[0], text[-1]) == ("c", letter)
        filled.append(text == f"c{letter}{letter}")
    assert sample.main(["run", "c", "--suffix", "kl" * 40]) == 1
    assert "tokens with the suffix, and the model's seq_len is 32; give less text" in capsys.readouterr().err
    assert sum(filled) >= 7  # of one side, a tenth can be guessed
