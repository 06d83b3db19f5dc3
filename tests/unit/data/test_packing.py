"""Packing: every token once, whole documents, and the same samples at any number of ranks and after any stop."""

import json
from itertools import chain, islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError
from scripts.prepare_data import main as prepare_data
from tests.preparing import prepare
from tests.unit.data.test_loader import SEED, VOCAB_SIZE, config
from trainer.data.loader import IGNORED, build_loader, merge_state_dicts
from trainer.data.packing import PackedSource, PackingWriter, best_fit, window_bounds
from trainer.data.sources import PADDING
from trainer.data.text import prepare as preparing
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece

SEQ_LEN = 16
ROOM = SEQ_LEN + 1
LENGTHS = st.lists(st.integers(1, 12), max_size=40)


def reference_best_fit(lengths, room):
    """The definition, by looking at every window."""
    left, windows = [], []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        fitting = [i for i, each in enumerate(left) if each >= lengths[index]]
        if not fitting:
            fitting = [len(left)]
            left.append(room)
            windows.append([])
        best = min(fitting, key=lambda i: left[i])
        left[best] -= lengths[index]
        windows[best].append(index)
    return windows


@given(LENGTHS)
def test_best_fit(lengths):
    windows = best_fit(lengths, 12)
    assert sorted(chain.from_iterable(windows)) == list(range(len(lengths)))
    assert all(sum(lengths[i] for i in window) <= 12 for window in windows)
    reference = reference_best_fit(lengths, 12)
    fills, expected = (sorted(sum(lengths[i] for i in window) for window in each) for each in (windows, reference))
    assert fills == expected


def test_a_window_may_have_room_for_more_than_any_memory():
    assert best_fit([2, 3, 1], 10**15) == [[1, 0, 2]]
    assert best_fit([], 10**15) == []


@given(LENGTHS)
def test_windows_follow_from_the_lengths_of_the_documents(lengths):
    windows = best_fit(lengths, 12)
    ordered = [lengths[i] for window in windows for i in window]
    bounds = window_bounds(np.cumsum([0, *ordered]), 12)
    assert bounds.tolist() == np.cumsum([0, *(sum(lengths[i] for i in window) for window in windows)]).tolist()


def test_a_document_that_is_too_long_for_a_window_is_found():
    with pytest.raises(ValueError, match="more than 12 tokens"):
        window_bounds(np.array([0, 13]), 12)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A tokenizer, texts from a word to several windows, and their packed folder of several files."""
    root = tmp_path_factory.mktemp("packed")
    dice = np.random.default_rng(0)
    words = ["".join(map(chr, dice.integers(97, 123, 6))) for _ in range(40)]
    texts = [" ".join(dice.choice(words, size)) for size in dice.integers(1, 9, 300)]
    train_sentencepiece(iter(texts), root / "tokenizer.model", VOCAB_SIZE)
    (root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preparing, "MIN_SHARD_BYTES", 2000)
        patch.setattr("trainer.data.text.documents.PIECE_BYTES", 2000)
        record = prepare(
            [str(root / "text.jsonl")], root / "out", root / "tokenizer.model", validation_fraction=0.1, pack=SEQ_LEN
        )
    assert len(list((root / "out/train").glob("*.tokens"))) > 3
    return root, texts, record


def windows_of(folder):
    source = PackedSource("web", TokenFolder(folder, VOCAB_SIZE), SEQ_LEN, SEED)
    found = []
    for address in range(0, source.n_windows * SEQ_LEN, SEQ_LEN):
        tokens, starts = np.zeros(ROOM, dtype=np.int64), np.zeros(ROOM, dtype=bool)
        source.read(address, tokens, starts)
        found.append((tokens.tolist(), np.flatnonzero(starts).tolist()))
    return found


def test_a_packed_folder_holds_whole_documents(corpus):
    root, texts, record = corpus
    tokenizer = load_tokenizer(root / "tokenizer.model")
    expected = []
    for text in texts:
        tokens = encode_document(tokenizer, text)
        expected += [tokens[i : i + ROOM] for i in range(0, len(tokens), ROOM)]
    found, n_windows, n_padding = [], 0, 0
    for split in ("train", "validation"):
        windows = windows_of(root / "out" / split)
        assert record["packed"][split]["windows"] == len(windows)
        assert record["packed"][split]["seq_len"] == SEQ_LEN
        padding = sum(tokens.count(PADDING) for tokens, _ in windows)
        assert record["packed"][split]["waste"] == pytest.approx(padding / (len(windows) * ROOM), abs=1e-6)
        for tokens, starts in windows:
            parts = [tokens[a:b] for a, b in zip(starts, [*starts[1:], ROOM], strict=True)]
            found += [part for part in parts if part[0] != PADDING]
            assert all(PADDING not in part for part in parts[:-1])
            assert set(parts[-1]) == {PADDING} or PADDING not in parts[-1]
        n_windows, n_padding = n_windows + len(windows), n_padding + padding
    assert sorted(found) == sorted(expected)
    assert n_padding < 0.1 * n_windows * ROOM
    n_cut = sum(record["packed"][split]["cut_documents"] for split in ("train", "validation"))
    assert n_cut == sum(len(encode_document(tokenizer, text)) > ROOM for text in texts)


def job(corpus, seq_len=SEQ_LEN, mask=False):
    root = corpus[0]
    sources = [{"name": "web", "kind": "tokens", "path": str(root / "out/train")}]
    training = {
        "steps": 10,
        "seq_len": seq_len,
        "global_batch_size": 12,
        "micro_batch_size": 1,
        "seed": SEED,
    }
    return config(root, data={"sources": sources, "document_mask": mask}, training=training)


def run(config, dp_size, start_sample, n_steps, states=None):
    """What all ranks get: {sample: [tokens, targets]}, and the sources' merged states."""
    loaders = [build_loader(config, rank, dp_size, start_sample, states=states) for rank in range(dp_size)]
    content = {}
    for loader in loaders:
        for batch in chain.from_iterable(islice(loader, n_steps)):
            rows = zip(batch.samples, batch.tokens.tolist(), batch.targets.tolist(), strict=True)
            content.update({sample: [tokens, targets] for sample, tokens, targets in rows})
    states = merge_state_dicts([json.loads(json.dumps(loader.state_dict())) for loader in loaders])["sources"]
    for loader in loaders:
        loader.close()
    return content, states


def test_samples_are_the_same_at_any_ranks_and_resume(corpus):
    straight, _ = run(job(corpus), 1, 0, 9)
    first, states = run(job(corpus), 3, 0, 4)
    rest, _ = run(job(corpus), 2, 4 * 12, 5, states)
    assert {**first, **rest} == straight
    assert len(straight) == 9 * 12


def test_an_epoch_has_every_window_once(corpus):
    windows = windows_of(corpus[0] / "out/train")
    source = PackedSource("web", TokenFolder(corpus[0] / "out/train", VOCAB_SIZE), SEQ_LEN, SEED)
    for epoch in range(2):
        ordinals = np.arange(len(windows)) + epoch * len(windows)
        assert sorted(source.addresses(ordinals).tolist()) == list(range(0, len(windows) * SEQ_LEN, SEQ_LEN))


@pytest.mark.parametrize("mask", [False, True])
def test_padding_counts_in_no_loss(corpus, mask):
    loader = build_loader(job(corpus, mask=mask), 0, 1, 0)
    n_padded = 0
    windows = {tuple(tokens): starts for tokens, starts in windows_of(corpus[0] / "out/train")}
    for _ in range(5):
        for batch in next(loader):
            for row in range(len(batch.tokens)):
                tokens, targets = batch.tokens[row].tolist(), batch.targets[row].tolist()
                [(window, starts)] = [
                    (window, starts)
                    for window, starts in windows.items()
                    if all(b in (PADDING, a) for a, b in zip(tokens, window, strict=False))
                ]
                ends = set(starts) if mask else set()
                expected = [
                    IGNORED if window[i + 1] == PADDING or i + 1 in ends else window[i + 1] for i in range(SEQ_LEN)
                ]
                assert targets == expected
                own = [token for token in window[:SEQ_LEN] if token != PADDING]
                assert tokens == (own * SEQ_LEN)[:SEQ_LEN]  # not one token, whose experts would be crowded
                n_padded += PADDING in window
    loader.close()
    assert n_padded > 3


def test_a_packed_source_in_the_order_of_its_text_is_refused(corpus):
    config = job(corpus)
    config.data.sources[0].__dict__["shuffle"] = False
    with pytest.raises(UserError, match=r"train: packed by best fit, longest documents first, so with shuffle = false"):
        build_loader(config, 0, 1, 0)


def test_another_seq_len_is_refused_with_the_reason(corpus):
    with pytest.raises(UserError, match=r"train: packed for training.seq_len = 16, but the job has 8"):
        build_loader(job(corpus, seq_len=8), 0, 1, 0)
    with pytest.raises(UserError, match="pack: 16 then, None now"):
        prepare(
            [str(corpus[0] / "text.jsonl")],
            corpus[0] / "out",
            corpus[0] / "tokenizer.model",
            validation_fraction=0.1,
        )


def test_a_mark_on_files_that_are_not_packed_is_noticed(tmp_path):
    with TokenFileWriter(tmp_path / "a.tokens", VOCAB_SIZE, "ab" * 16) as writer:
        writer.append(range(40))
    (tmp_path / "packed.json").write_text('{"seq_len": 16}')
    folder = TokenFolder(tmp_path, VOCAB_SIZE)
    with pytest.raises(UserError, match="not packed for 16: a document has more than 17 tokens"):
        PackedSource("web", folder, SEQ_LEN, SEED)
    (tmp_path / "packed.json").write_text('{"seq_len": "16"}')
    with pytest.raises(UserError, match=r"packed\.json: cannot be read"):
        PackedSource("web", folder, SEQ_LEN, SEED)


def test_an_error_leaves_no_file(tmp_path):
    file = TokenFileWriter(tmp_path / "a.tokens", 9, "ab" * 16)
    with pytest.raises(ValueError, match="outside"), PackingWriter(file, 4) as writer:  # found when it is packed
        writer.append([100])
    with pytest.raises(TypeError), PackingWriter(file, 4) as writer:
        writer.append(None)
    assert list(tmp_path.iterdir()) == []


def test_the_command_says_the_waste(corpus, tmp_path, capsys):
    root = corpus[0]
    command = [str(root / "text.jsonl"), "--output", str(tmp_path / "out"), "--pack", "64", "--processes", "1"]
    assert prepare_data([*command, "--tokenizer", str(root / "tokenizer.model")]) == 0
    packed = json.loads((tmp_path / "out/prepare.json").read_text())["packed"]["train"]
    said = capsys.readouterr().out
    assert f"{packed['windows']:,} windows for training.seq_len = 64, {packed['waste']:.2%} of them padding" in said
