"""Text tokenised while training: the same samples whatever was read before, where it resumes, and by whom."""

import json
import os
import shutil
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from trainer.data.text import hub as inputs
from trainer.data.text import streaming
from trainer.data.text.streaming import Rows, TextSource, merge_states

SEQ_LEN = 7
N_SHARDS = 4


class Letters:
    """A tokenizer of one token a letter, which counts what it is asked to do."""

    vocab_size, bos_id, eos_id, hash = 200, 1, 2, "letters"

    def __init__(self):
        self.encoded = []

    def encode(self, text):
        self.encoded.append(text)
        return [ord(letter) for letter in text]


def texts(n):
    """Documents of very different lengths, each recognisable."""
    return [chr(48 + i % 70) * (i * 7 % 23) for i in range(n)]


@pytest.fixture(autouse=True, scope="module")
def few_shards():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(streaming, "VIRTUAL_SHARDS", N_SHARDS)
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Thirteen documents in two .jsonl files and a text file."""
    path = tmp_path_factory.mktemp("text")
    rows = texts(13)
    for name, part in (("a.jsonl", rows[:6]), ("b.jsonl", rows[6:12])):
        (path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    (path / "c.txt").write_text(rows[12])
    return path


def source(folder, state=None, repeat=True, tokenizer=None, seq_len=SEQ_LEN, earlier=()):
    reader: Any = tokenizer or Letters()
    return TextSource(str(folder), "text", reader, seq_len, repeat, state, earlier)


def window(source, ordinal, seq_len=SEQ_LEN):
    """The tokens of a sample, negative where a document begins."""
    tokens, starts = np.zeros(seq_len + 1, dtype=np.int64), np.zeros(seq_len + 1, dtype=bool)
    source.read(ordinal, tokens, starts)
    return np.where(starts, -tokens, tokens).tolist()


def reference(n_samples, n_shards=N_SHARDS):
    """The samples by the definition: rows j, j + V, ... of the text without end, put together and cut up."""
    rows = texts(13) * (1 + n_samples)
    samples = []
    for i in range(n_samples):
        shard = [t for text in rows[i % n_shards :: n_shards] for t in [-1, *map(ord, text), 2]]
        start = i // n_shards * SEQ_LEN
        samples.append(shard[start : start + SEQ_LEN + 1])
    return samples


N_SAMPLES = 150  # some five epochs
EXPECTED = reference(N_SAMPLES)


def test_samples_are_those_of_the_definition(folder):
    text = source(folder)
    assert [window(text, i) for i in range(N_SAMPLES)] == EXPECTED


@given(st.lists(st.integers(0, N_SAMPLES - 1), min_size=1, max_size=30))
@settings(max_examples=40, deadline=None)
def test_samples_do_not_depend_on_what_was_read_before(folder, ordinals):
    text = source(folder)
    assert [window(text, i) for i in ordinals] == [EXPECTED[i] for i in ordinals]


@given(st.integers(1, 4), st.integers(1, 3), st.lists(st.integers(1, 6), min_size=1, max_size=4), st.booleans())
@settings(max_examples=40, deadline=None)
def test_a_resume_goes_on_exactly_at_any_number_of_ranks(folder, n_ranks, per_rank, rounds, keep_cursors):
    """Several launches, each at another number of ranks, with and without cursors."""
    done, state = 0, None
    for launch, n_rounds in enumerate(rounds):
        size = n_ranks + launch
        ranks = [source(folder, state) for _ in range(size)]
        for _ in range(n_rounds):
            for rank in ranks:
                mine = np.arange(done, min(done + per_rank, N_SAMPLES))
                rank.addresses(mine)
                assert [window(rank, i) for i in mine.tolist()] == [EXPECTED[i] for i in mine.tolist()]
                done = min(done + per_rank, N_SAMPLES)
        merged = merge_states([rank.state() for rank in ranks])
        state = json.loads(json.dumps(merged)) if keep_cursors else None


def reference_of_stages(stages):
    """The samples if each stage, (seq_len, samples), cuts on where the last has left every shard."""
    streams = [
        [t for text in (texts(13) * 60)[shard::N_SHARDS] for t in [-1, *map(ord, text), 2]] for shard in range(N_SHARDS)
    ]
    samples = []
    for seq_len, n_samples in stages:
        for _ in range(n_samples):
            stream = streams[len(samples) % N_SHARDS]
            samples.append(stream[: seq_len + 1])
            del stream[:seq_len]
    return samples


@given(
    st.lists(st.tuples(st.sampled_from([1, 3, 7, 8, 20]), st.integers(0, 30)), min_size=1, max_size=4),
    st.booleans(),
    st.randoms(use_true_random=False),
)
@settings(max_examples=60, deadline=None)
def test_windows_of_another_length_go_on_at_the_next_token_of_each_shard(folder, stages, keep_cursors, dice):
    """With and without cursors, and whatever is read first in a stage."""
    expected = reference_of_stages(stages)
    earlier: list[list[int]] = []
    state, done = None, 0
    for seq_len, n_samples in stages:
        text = source(folder, state, seq_len=seq_len, earlier=earlier)
        ordinals = list(range(done, done + n_samples))
        done += n_samples
        for ordinal in dice.sample(ordinals, len(ordinals)):
            text.addresses(np.array([ordinal]))
            assert window(text, ordinal, seq_len) == expected[ordinal]
        for ordinal in ordinals:  # in order, after which the cursors are the next stage's
            assert window(text, ordinal, seq_len) == expected[ordinal]
        state = json.loads(json.dumps(text.state())) if keep_cursors else None
        earlier.append([seq_len, done])


def test_a_rank_tokenises_only_its_shards(folder):
    ranks = [source(folder, tokenizer=Letters()) for _ in range(2)]
    for first in range(0, 40, 4):
        for rank, text in enumerate(ranks):
            mine = np.arange(first + 2 * rank, first + 2 * rank + 2)
            text.addresses(mine)
            assert [window(text, i) for i in mine.tolist()] == [EXPECTED[i] for i in mine.tolist()]
    encoded = [text._tokenizer.encoded for text in ranks]
    total = source(folder)
    for i in range(40):
        window(total, i)
    assert len(encoded[0]) + len(encoded[1]) <= len(total._tokenizer.encoded)


def test_cursors_save_tokenising_again(folder):
    first = source(folder)
    for i in range(100):
        window(first, i)
    resumed = source(folder, first.state())
    assert [window(resumed, i) for i in range(100, 104)] == EXPECTED[100:104]
    assert len(resumed._tokenizer.encoded) < len(first._tokenizer.encoded) / 5


def test_a_resume_reads_the_rows_once(folder, monkeypatch):
    first = source(folder)
    for i in range(50):
        window(first, i)
    begun = []
    from_row = Rows.from_row

    def noted(rows, row):
        begun.append(row)
        return from_row(rows, row)

    monkeypatch.setattr(Rows, "from_row", noted)
    resumed = source(folder, first.state())
    resumed.addresses(np.arange(50, 54))
    assert [window(resumed, i) for i in (53, 52, 51, 50)] == EXPECTED[53:49:-1]
    assert len(begun) == 1


def test_cursors_beyond_the_sample_are_not_used(folder):
    first = source(folder)
    for i in range(100):
        window(first, i)
    resumed = source(folder, first.state())
    assert [window(resumed, i) for i in range(40, 60)] == EXPECTED[40:60]


def test_cursors_of_another_text_are_not_used(folder, tmp_path):
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": "other" * 9}) + "\n" for _ in range(20)))
    other = source(tmp_path)
    for i in range(40):
        window(other, i)
    text = source(folder, other.state())
    assert text.state()["fingerprint"] != other.state()["fingerprint"]
    assert [window(text, i) for i in range(40, 60)] == EXPECTED[40:60]


def test_a_long_document_is_tokenised_once_while_others_come_round(tmp_path):
    """The last shard has a document of many windows, which waits for it in each epoch of the others."""
    rows = ["a", "bb", "ccc", "d" * 400]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    letters = Letters()
    stream = source(tmp_path, tokenizer=letters)
    ordinals = np.arange(40 * N_SHARDS)
    found = [window(stream, ordinal) for ordinal in stream.addresses(ordinals).tolist()]
    for ordinal in (1, 3, 158, 159):
        shard = rows[ordinal % N_SHARDS]
        letters_of_shard = [-1, *map(ord, shard), 2] * 400
        begin = ordinal // N_SHARDS * SEQ_LEN
        assert found[ordinal] == letters_of_shard[begin : begin + SEQ_LEN + 1]
    assert letters.encoded.count(rows[3]) == 1
    held = {id(tokens) for _, tokens in stream._shards[3].documents}
    assert len(held) == 1  # of the epochs that wait, all share their tokens


def test_of_few_documents_each_has_a_shard(folder, monkeypatch):
    monkeypatch.setattr(streaming, "VIRTUAL_SHARDS", 64)
    text = source(folder)
    assert text.layout == "13 virtual shards"
    assert [window(text, i) for i in range(40)] == reference(40, n_shards=13)


def test_a_text_without_tokens_is_an_error(tmp_path):
    (tmp_path / "none").mkdir()
    with pytest.raises(UserError, match="none: no text, so there would be no token to train on"):
        source(tmp_path / "none")
    (tmp_path / "empty").mkdir()
    for name in "ab":
        (tmp_path / "empty" / f"{name}.txt").write_text("")
        with pytest.raises(UserError, match="empty: no text, so there would be no token to train on"):
            window(source(tmp_path / "empty"), 0)
    (tmp_path / "rows.jsonl").write_text("")
    for _ in range(2):
        with pytest.raises(UserError, match=r"rows\.jsonl: no text"):
            window(source(tmp_path / "rows.jsonl"), 0)


@pytest.mark.parametrize("n_texts", [3, 8])
def test_a_shard_whose_documents_have_no_tokens_is_an_error(tmp_path, n_texts):
    """With neither BOS nor EOS: as many documents as shards, or twice as many of which every fourth is empty."""
    rows = ["" if i % N_SHARDS == 1 else "abc" for i in range(n_texts)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    letters = Letters()
    letters.bos_id = letters.eos_id = None
    text = source(tmp_path, tokenizer=letters)
    assert window(text, 0) == [-97, 98, 99] * 2 + [-97, 98]
    with pytest.raises(UserError, match=r"document 2 has no token .* nor has any other that its virtual shard gets"):
        window(text, 1)


def test_empty_documents_of_a_shard_that_also_has_others_are_passed(tmp_path):
    rows = ["abc" if i == 4 else "" for i in range(5)]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in rows))
    letters = Letters()
    letters.bos_id = letters.eos_id = None
    assert window(source(tmp_path, tokenizer=letters), 1) == [-97, 98, 99] * 2 + [-97, 98]


def test_validation_reads_in_order_and_never_twice(folder):
    text = source(folder, repeat=False)
    expected = reference(5, n_shards=1)
    for _ in range(2):
        assert [window(text, i) for i in range(5)] == expected
    with pytest.raises(UserError, match="validation needs more text: it has only 13 document"):
        text.addresses(np.arange(100))


def test_a_bad_line_is_named(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "good"}\n{"text": \n')
    with pytest.raises(UserError, match=r"x\.jsonl:2"):
        window(source(tmp_path), 3)


def replace_text(file, old, new):
    """Other text of the same size, at the same time of writing."""
    times = file.stat()
    content = file.read_text().replace(old, new, 1)
    assert len(content) == times.st_size
    file.write_text(content)
    os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


@pytest.mark.parametrize("name", ["a.jsonl", "b.jsonl", "c.txt"])
def test_other_text_of_the_same_size_is_another_text(folder, tmp_path, name):
    copy = tmp_path / "text"
    shutil.copytree(folder, copy)
    before = source(copy)
    window(before, 9)
    state = before.state()
    assert source(copy, state).state() == state
    letter = texts(13)[{"a.jsonl": 5, "b.jsonl": 11, "c.txt": 12}[name]][-1]
    replace_text(copy / name, letter, "~")
    after = source(copy, state).state()
    assert after["fingerprint"] != state["fingerprint"]
    assert after["cursors"] == {}


def test_the_same_text_in_another_place_is_the_same_text(folder, tmp_path):
    before = source(folder)
    window(before, 9)
    state = before.state()
    copy = shutil.copytree(folder, tmp_path / "text")
    (copy / "a.jsonl").rename(copy / "0.jsonl")
    after = source(copy, state).state()
    assert after == state | {"path": str(copy)}
    (copy / "0.jsonl").rename(copy / "0.txt")  # which is read in another way
    assert source(copy, state).state()["cursors"] == {}


def test_a_run_of_an_older_keel_whose_fingerprint_has_the_path_goes_on(folder, tmp_path):
    before = source(folder)
    window(before, 9)
    _, with_path = streaming._fingerprints(streaming.pieces(str(folder)), Letters.hash)
    state = before.state() | {"fingerprint": with_path}
    assert with_path != before.state()["fingerprint"]
    assert source(folder, state).state() == state
    copy = shutil.copytree(folder, tmp_path / "text")
    assert source(copy, state).state()["cursors"] == {}


def test_of_a_large_text_blocks_of_every_file_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(streaming, "FULL_CHECK_BYTES", 1000)
    monkeypatch.setattr(streaming, "_BLOCK_BYTES", 10)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 3000)
    before = source(tmp_path).state()["fingerprint"]
    for name in "abc":
        for place in (0, 2999):
            (tmp_path / f"{name}.txt").write_text(name * place + "~" + name * (2999 - place))
            assert source(tmp_path).state()["fingerprint"] != before
        (tmp_path / f"{name}.txt").write_text(name * 3000)
    assert source(tmp_path).state()["fingerprint"] == before
    (tmp_path / "b.txt").write_text("x" * 3000)
    assert source(tmp_path).state()["fingerprint"] != before


class Hub:
    """The packages of the hub, with a dataset whose main branch moves."""

    def __init__(self):
        self.commits = {None: "a" * 40, "v1": "b" * 40}
        self.opened = []

    def HfApi(self):
        return self

    def dataset_info(self, name, revision=None):
        assert name == "us/text"
        return SimpleNamespace(sha=self.commits[revision])

    def load_dataset(self, name, config, split, streaming, revision):
        self.opened.append((name, config, revision) if split == "train" else (name, config, revision, split))
        rows = [{"text": f"{revision[0]}{i}" * 9} for i in range(8)]
        return SimpleNamespace(num_shards=1, shard=lambda num_shards, index: rows)


@pytest.fixture
def hub(monkeypatch):
    hub = Hub()
    monkeypatch.setitem(sys.modules, "datasets", hub)
    monkeypatch.setitem(sys.modules, "huggingface_hub", hub)
    inputs._commit.cache_clear()
    yield hub
    inputs._commit.cache_clear()


def test_a_dataset_of_the_hub_is_read_at_the_commit_where_the_run_began(hub):
    first = source("hub:us/text:en")
    assert first.state()["path"] == f"hub:us/text:en@{'a' * 40}"
    expected = window(first, 5)
    state = json.loads(json.dumps(merge_states([first.state()])))
    inputs._commit.cache_clear()  # another launch
    hub.commits[None] = "c" * 40
    resumed = source("hub:us/text:en", state)
    assert resumed.state() == state
    assert window(resumed, 5) == expected
    assert {commit for *_, commit in hub.opened} == {"a" * 40}
    assert hub.opened[0] == ("us/text", "en", "a" * 40)
    for other in ("hub:us/text:en@" + "c" * 40, "hub:us/text:de"):  # what somebody has asked for is not passed over
        assert source(other, state).state()["fingerprint"] != state["fingerprint"]
    assert source("hub:us/text:en").state()["path"] == f"hub:us/text:en@{'c' * 40}"
    assert source("hub:us/text@v1").state()["path"] == f"hub:us/text@{'b' * 40}"
    with pytest.raises(UserError, match="hub:us/text: cannot open the dataset"):
        source("hub:us/text@v2")


def test_a_split_of_a_dataset(hub):
    first = source("hub:us/text:en#validation")
    assert first.state()["path"] == f"hub:us/text:en@{'a' * 40}#validation"
    window(first, 5)
    assert set(hub.opened) == {("us/text", "en", "a" * 40, "validation")}
    for other in ("hub:us/text:en", "hub:us/text:en#test", "hub:us/text#validation"):
        assert source(other, first.state()).state()["fingerprint"] != first.state()["fingerprint"]
    hub.commits[None] = "c" * 40
    inputs._commit.cache_clear()
    assert source("hub:us/text:en#validation", first.state()).state()["path"] == first.state()["path"]


def test_a_checkpoint_cannot_name_another_dataset(hub):
    state = source("hub:us/text").state() | {"path": f"hub:them/text@{'d' * 40}"}
    assert source("hub:us/text", state).state()["path"] == f"hub:us/text@{'a' * 40}"
