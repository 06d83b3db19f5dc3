"""What a step's samples take to read: by hand, for each kind of source, and a step waits for the rest."""

import pytest

from configs.layout import mesh_sizes
from configs.load import load
from tests.unit.planning.test_step_time import H100
from trainer.planning.data_time import data_time
from trainer.planning.step_time import estimate_step

WORDS = "--training.seq_len 4096 --training.global_batch_size 64 --training.micro_batch_size 1"
TOKENS = '[{name="a",kind="tokens",path="%s"}]'


def planned(source, ranks=8, words="", step_seconds=0.0):
    config = load("llama_8b.toml", [*WORDS.split(), *words.split(), "--data.sources", source], ranks).config
    return data_time(config, mesh_sizes(config, ranks), 8, step_seconds)


def test_ranks_that_share_a_disk_read_its_bytes_one_after_the_other():
    """8 windows a rank, with a token more; 128,256 words take four bytes. Two ranks of tp read the same samples."""
    eight = planned(TOKENS % "data")
    assert eight.n_bytes == 8 * 4097 * 4
    assert eight.seconds == pytest.approx(8 * eight.n_bytes / 0.9e9)
    shared = planned(TOKENS % "data", words="--mesh.tp 2")
    assert shared.n_bytes == 2 * eight.n_bytes
    assert shared.seconds == pytest.approx(eight.seconds)


def test_on_a_fast_disk_the_thread_that_prepares_windows_takes_longer():
    one = planned(TOKENS % "data", ranks=1, words="--model.vocab_size 32000")
    assert one.n_bytes == 64 * 4097 * 2
    assert one.seconds == pytest.approx(64 * (12e-6 + 2e-9 * 4096))
    assert one.n_bytes / 0.9e9 < one.seconds


def test_a_bucket_answers_16_requests_at_once_each_for_whole_blocks():
    """A window of 16,388 bytes is in 1.25 blocks of 64 KiB, in the mean."""
    blocks = 1 + 16387 / 65536
    request = 0.15 + blocks * 65536 / 85e6
    assert planned(TOKENS % "s3://bucket/data").seconds == pytest.approx(8 * request / 16)


def test_text_is_tokenized_by_the_rank_and_beyond_64_ranks_more_than_once():
    text = '[{name="a",kind="text",path="*.txt"}]'
    words = "--tokenizer.path a.model"
    assert planned(text, words=words).seconds == pytest.approx(8 * 4096 * 0.8e-6)
    wide = f"{words} --training.global_batch_size 128"
    assert planned(text, 128, wide).seconds == pytest.approx(2 * 4096 * 0.8e-6)
    assert planned(text, words=words).n_bytes == 0


def test_sources_have_their_shares():
    both = '[{name="a",kind="tokens",path="data",weight=3},{name="b",kind="synthetic"}]'
    assert planned(both).n_bytes == 6 * 4097 * 4
    of_tokens = 8 * planned(both).n_bytes / 0.9e9
    assert planned(both).seconds == pytest.approx(of_tokens + 2 * 4096 * 12.5e-9)


def test_a_step_waits_for_what_takes_longer_than_it():
    slow = planned(TOKENS % "s3://bucket/data")
    assert slow.waiting == slow.seconds
    assert planned(TOKENS % "s3://bucket/data", step_seconds=slow.seconds / 4).waiting == pytest.approx(
        0.75 * slow.seconds
    )
    assert planned(TOKENS % "s3://bucket/data", step_seconds=2 * slow.seconds).waiting == 0


def test_a_run_takes_the_wait_with_its_steps():
    """A small model's short windows from a bucket: 64 requests of 0.15 s, 16 at once, for each step."""
    words = "--training.compute_dtype bfloat16 --training.seq_len 64 --training.global_batch_size 64"
    words += " --data.prepare none"
    config = load("debug.toml", [*words.split(), "--data.sources", TOKENS % "s3://bucket/data"], 1).config
    step = estimate_step(config, 1, H100)
    assert step.data.waiting == pytest.approx(64 * (0.15 + (1 + 129 / 65536) * 65536 / 85e6) / 16 - step.seconds)
    assert step.data.waiting > 0
    waits = step.data.waiting + step.save.of_a_step
    assert step.seconds_with_waits == pytest.approx(step.seconds + waits)
