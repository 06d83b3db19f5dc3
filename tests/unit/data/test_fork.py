"""A run that is forked with another mixture reads on where each source was left, or says why it can't."""

import json
from contextlib import closing
from itertools import islice

import numpy as np
import pytest

from configs.errors import ConfigError
from configs.own_code import admit
from configs.schema import Config
from trainer.data.fork import forked_position
from trainer.data.loader import build_loader
from trainer.data.order import Start
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece

SEQ_LEN = 8
VOCAB_SIZE = 64
N_WINDOWS = {"web": 23, "code": 9, "books": 14}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Token folders in which each token says which source and window it is of."""
    root = tmp_path_factory.mktemp("data")
    for number, (name, n_windows) in enumerate(N_WINDOWS.items()):
        tokens = [number * 20 + window % 20 for window in range(n_windows) for _ in range(SEQ_LEN)] + [0]
        (root / name).mkdir()
        with TokenFileWriter(root / name / "part.tokens", VOCAB_SIZE, "ab" * 16) as writer:
            writer.append(tokens)
    return root


def job(corpus, weights, **training):
    sources = [
        {"name": name, "kind": "tokens", "path": str(corpus / name), "weight": weight}
        for name, weight in weights.items()
    ]
    table = {"steps": 1, "seq_len": SEQ_LEN, "global_batch_size": 4, "micro_batch_size": 1, "seed": 3}
    return Config.model_validate(
        {
            "job": {"name": "test", "device": "cpu"},
            "model": {"dim": 8, "n_layers": 1, "n_heads": 1, "ffn_dim": 8, "vocab_size": VOCAB_SIZE},
            "training": table | training,
            "data": {"sources": sources},
            "optimizer": {"lr": 1e-3},
            "lr_schedule": {"warmup_steps": 1, "total_steps": 10},
        }
    )


BEGINNING = {"next_sample": 0, "sources": {}}


def read(config, position, n_steps):
    """The first token of each sequence of the next steps, and the position after them."""
    start = Start(**position.get("start", {}))
    given = {"states": position["sources"], "order": position.get("order"), "start": start}
    with closing(build_loader(config, 0, 1, position["next_sample"], **given)) as loader:
        rows = [int(batch.tokens[0, 0]) for step in islice(loader, n_steps) for batch in step]
        return rows, loader.state_dict()


def test_over_forks_an_epoch_has_every_window_once(corpus):
    seen = []
    before, position = None, BEGINNING
    for weights, n_steps in [
        ({"web": 3.0, "code": 1.0}, 10),
        ({"web": 1.0, "books": 2.0}, 9),
        ({"books": 1.0, "code": 1.0}, 8),
        ({"web": 1.0, "code": 2.0, "books": 1.0}, 30),
    ]:
        config = job(corpus, weights)
        if before:
            position = forked_position(position, before.model_dump(mode="json"), config)
        rows, position = read(config, position, n_steps)
        seen += rows
        before = config
    for number, (name, n_windows) in enumerate(N_WINDOWS.items()):
        found = [token - number * 20 for token in seen if token // 20 == number]
        whole = sorted(window % 20 for window in range(n_windows))
        epochs = [sorted(found[i : i + n_windows]) for i in range(0, len(found) - n_windows + 1, n_windows)]
        assert len(epochs) >= 1, name
        assert epochs == [whole] * len(epochs)


def test_the_same_mixture_goes_on_in_the_same_order(corpus):
    config = job(corpus, {"web": 3.0, "code": 1.0})
    _, position = read(config, BEGINNING, 5)
    forked = forked_position(position, config.model_dump(mode="json"), job(corpus, {"web": 3.0, "code": 1.0}))
    assert forked == position
    assert read(config, forked, 4) == read(config, position, 4)


def test_a_forked_position_is_resumed_in_the_same_order(corpus):
    first, second = job(corpus, {"web": 3.0, "code": 1.0}), job(corpus, {"web": 1.0, "books": 1.0})
    _, position = read(first, BEGINNING, 5)
    forked = forked_position(position, first.model_dump(mode="json"), second)
    straight, _ = read(second, forked, 6)
    begun, later = read(second, forked, 2)
    assert begun + read(second, later, 4)[0] == straight


def renamed(config, name):
    """The job, with its first source under another name."""
    config.data.sources[0].__dict__["name"] = name
    return config


@pytest.mark.parametrize("name", ["web", "web samples, of 2026", "2 of 3 samples"])
def test_a_source_may_have_any_name(corpus, name):
    first = renamed(job(corpus, {"web": 3.0, "code": 1.0}), name)
    _, position = read(first, BEGINNING, 5)
    before = first.model_dump(mode="json")
    forked = forked_position(position, before, renamed(job(corpus, {"web": 1.0, "books": 1.0}), name))
    assert forked["start"]["read"] == {name: 15, "code": 5}
    other = renamed(job(corpus, {"web": 1.0, "books": 1.0}, seed=4), name)
    with pytest.raises(ConfigError, match="has been read"):
        forked_position(position, before, other)


def test_a_source_that_is_partly_read_keeps_its_order(corpus):
    first = job(corpus, {"web": 3.0, "code": 1.0})
    _, position = read(first, BEGINNING, 5)
    with pytest.raises(ConfigError, match=r"'web' has been read \(15 sequences\).*training\.seed: 3 -> 4"):
        forked_position(position, first.model_dump(mode="json"), job(corpus, {"web": 1.0, "books": 1.0}, seed=4))


def unshuffled(config):
    """The job, with its first source as it lies."""
    config.data.sources[0].__dict__["shuffle"] = False
    return config


@pytest.mark.parametrize("seq_len", [SEQ_LEN, SEQ_LEN // 2])
def test_a_source_that_is_partly_read_is_shuffled_on_or_not(corpus, seq_len):
    """It has no order to keep if it is not, so the seed may change."""
    first = unshuffled(job(corpus, {"web": 3.0, "code": 1.0}))
    rows, position = read(first, BEGINNING, 5)
    before = first.model_dump(mode="json")
    with pytest.raises(ConfigError, match=r"'web' has been read \(15 sequences\).*\(shuffle: false -> true\)"):
        forked_position(position, before, job(corpus, {"web": 1.0}, seq_len=seq_len))
    other = unshuffled(job(corpus, {"web": 1.0}, seq_len=seq_len, seed=4))
    rows = [token for token in rows if token < 20] + read(other, forked_position(position, before, other), 2)[0]
    n_halves = SEQ_LEN // seq_len
    assert rows == [*range(15), *((15 + number // n_halves) % 20 for number in range(8))]


@pytest.mark.parametrize("reason", ["shuffle: false -> true", "training.seed: 3 -> 4"])
def test_a_source_that_a_mixture_left_out_keeps_its_order(corpus, reason):
    first = job(corpus, {"web": 3.0, "code": 1.0})
    seed = 4
    if reason.startswith("shuffle"):
        unshuffled(first)
        seed = 3
    _, position = read(first, BEGINNING, 5)
    between = job(corpus, {"books": 1.0}, seed=seed)
    _, position = read(between, forked_position(position, first.model_dump(mode="json"), between), 1)
    with pytest.raises(ConfigError, match=rf"'web' has been read \(15 sequences\).*\({reason}\)"):
        forked_position(position, between.model_dump(mode="json"), job(corpus, {"web": 1.0}, seed=seed))


def test_a_source_that_is_partly_read_goes_on_in_shorter_sequences(corpus):
    """The 8 of 23 windows of `web` that are left are read as 16 of half the length, before the next epoch."""
    first = job(corpus, {"web": 3.0, "code": 1.0})
    seen, position = read(first, BEGINNING, 5)
    shorter = job(corpus, {"web": 1.0}, seq_len=SEQ_LEN // 2)
    position = forked_position(position, first.model_dump(mode="json"), shorter)
    assert position["start"]["lengths"] == {"web": [[8, 15]], "code": [[8, 5]]}
    rest, later = read(shorter, position, 4)
    left = sorted({*range(20), 0, 1, 2} - set())
    windows = [token for token in seen if token < 20]
    counts = {token: windows.count(token) * 2 + rest.count(token) for token in left}
    assert counts == {token: 4 if token < 3 else 2 for token in left}
    halves, _ = read(shorter, later, 12)
    assert len(set(halves)) == 20
    with pytest.raises(ConfigError, match="another order"):
        read(shorter, later | {"start": {**later["start"], "lengths": {"web": [[8, 14]]}}}, 1)


def test_new_sources_may_have_longer_sequences(corpus):
    first = job(corpus, {"web": 3.0, "code": 1.0})
    _, position = read(first, BEGINNING, 5)
    longer = job(corpus, {"books": 1.0}, seq_len=2 * SEQ_LEN)
    forked = forked_position(position, first.model_dump(mode="json"), longer)
    rows, _ = read(longer, forked, 2)
    assert [token // 20 for token in rows] == [2] * 8
    assert len(set(rows)) > 3


def test_other_data_under_the_name_of_a_source_that_is_partly_read_is_refused(corpus):
    first = job(corpus, {"web": 3.0, "code": 1.0})
    _, position = read(first, BEGINNING, 5)
    other = job(corpus, {"web": 1.0})
    other.data.sources[0].__dict__["path"] = str(corpus / "books")
    with pytest.raises(ConfigError, match="23 windows -> 14 windows"):
        forked_position(position, first.model_dump(mode="json"), other)


class Counted:
    """A source of one's own, whose windows are its ordinals."""

    def __init__(self, settings, seq_len, vocab_size, seed):
        pass

    def addresses(self, ordinals):
        return ordinals

    def read(self, address, tokens, starts):
        tokens[:] = address

    def state(self):
        return {"fingerprint": "counted"}

    def check_unchanged(self):
        pass


class Following(Counted):
    """The same, whose inputs are the numbers from 0 on, in windows of any lengths."""

    def __init__(self, settings, seq_len, vocab_size, seed, earlier=()):
        self.seq_len = seq_len
        self.first = 0
        self.input = 0
        for length, until in earlier:
            self.input += length * (until - self.first)
            self.first = until

    def read(self, address, tokens, starts):
        tokens[:] = self.input + (address - self.first) * self.seq_len + np.arange(self.seq_len + 1)


def with_own(config, name="Counted"):
    """The job, in which `web` is a source of one's own."""
    kind = f"{__name__}:{name}"
    admit(kind, "data.sources.0.kind")
    config.data.sources[0].__dict__["kind"] = kind
    return config


def test_a_source_of_ones_own_that_comes_back_in_another_length_is_refused(corpus):
    """Its windows would be others, also if a stage without it has changed the length."""
    first = with_own(job(corpus, {"web": 3.0, "code": 1.0}))
    _, position = read(first, BEGINNING, 5)
    without = job(corpus, {"books": 1.0}, seq_len=2 * SEQ_LEN)
    position = forked_position(position, first.model_dump(mode="json"), without)
    _, position = read(without, position, 2)
    longer = with_own(job(corpus, {"web": 1.0, "books": 1.0}, seq_len=2 * SEQ_LEN))
    with pytest.raises(
        ConfigError, match=r'"web" .* was read in sequences of 8 before, and is in sequences of 16 now, and its class'
    ):
        forked_position(position, without.model_dump(mode="json"), longer)
    as_before = with_own(job(corpus, {"web": 1.0}))
    position = forked_position(position, without.model_dump(mode="json"), as_before)
    assert read(as_before, position, 1)[0] == [15, 16, 17, 18]


def test_a_source_of_ones_own_goes_on_in_other_lengths_if_it_can(corpus):
    """In each length also after a resume."""
    found = []
    position, before = BEGINNING, None
    for seq_len, n_steps in ((4, 2), (2, 1), (4, 1)):
        now = with_own(job(corpus, {"web": 1.0}, seq_len=seq_len), "Following")
        if before:
            position = forked_position(position, before.model_dump(mode="json"), now)
        for _ in range(n_steps):
            firsts, position = read(now, position, 1)
            found += [number for first in firsts for number in range(first, first + seq_len)]
        before = now
    assert found == list(range(4 * (2 * 4 + 2 + 4)))


def test_text_goes_on_at_its_next_token_in_other_lengths_also_after_a_stage_without_it(corpus, tmp_path):
    """The samples of each virtual shard, put together, are its documents without a gap."""
    documents = [f"document {number}: " + "abc " * (number % 5) for number in range(12)]
    (tmp_path / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    path = tmp_path / "t.model"
    train_sentencepiece(iter(documents), path, 282)
    tokenizer = load_tokenizer(path)
    shards = [encode_document(tokenizer, text) * 40 for text in documents]  # of so few documents, each has one
    n_read = 0
    before, position = None, BEGINNING
    for seq_len, weights in [(8, {"text": 1.0, "web": 1.0}), (16, {"web": 1.0}), (16, {"text": 2.0, "web": 1.0})] * 2:
        config = job(corpus, weights, seq_len=seq_len)
        config.model.__dict__["vocab_size"] = 282
        config.tokenizer.__dict__["path"] = str(path)
        for source in config.data.sources:
            if source.name == "text":
                source.__dict__.update(kind="text", path=str(tmp_path / "text.jsonl"))
            else:
                source.__dict__.update(kind="synthetic", path=None)
        if before:
            position = forked_position(position, before.model_dump(mode="json"), config)
        start = Start(**position.get("start", {}))
        given = {"states": position["sources"], "order": position.get("order"), "start": start}
        with closing(build_loader(config, 0, 1, position["next_sample"], **given)) as loader:
            for batch in (batch for step in islice(loader, 7) for batch in step if batch.source == "text"):
                shard = shards[n_read % len(shards)]
                assert batch.tokens[0].tolist() == shard[:seq_len]
                assert batch.targets[0].tolist() == shard[1 : seq_len + 1]
                del shard[:seq_len]
                n_read += 1
            position = loader.state_dict()
        before = config
    assert n_read > 5 * len(shards)
