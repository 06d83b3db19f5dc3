"""Windows of token folders and of random tokens."""

import numpy as np
import pytest

from configs.errors import UserError
from trainer.data.sources import SyntheticSource, TokenSource
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import TokenFolder

SEQ_LEN = 8
DOCUMENTS = [list(range(start, start + length)) for start, length in [(0, 5), (5, 1), (6, 20), (26, 9), (35, 15)]]


@pytest.fixture
def folder(tmp_path):
    """Tokens 0, 1, ..., 49 in five documents over two files."""
    for name, documents in (("a", DOCUMENTS[:3]), ("b", DOCUMENTS[3:])):
        with TokenFileWriter(tmp_path / f"{name}.tokens", 100, "ab" * 16) as writer:
            for document in documents:
                writer.append(document)
    return TokenFolder(tmp_path, 100)


def read(source, ordinal, seq_len=SEQ_LEN):
    """The window and the document starts of the `ordinal`-th sample."""
    tokens, starts = np.zeros(seq_len + 1, dtype=np.int64), np.zeros(seq_len + 1, dtype=bool)
    source.read(int(source.addresses(np.array([ordinal]))[0]), tokens, starts)
    return tokens.tolist(), np.flatnonzero(starts).tolist()


def test_windows_are_slices_that_share_one_token(folder):
    source = TokenSource("web", folder, SEQ_LEN, seed=0)
    assert source.n_windows == (50 - 1) // SEQ_LEN
    windows = sorted(read(source, i)[0] for i in range(6))
    assert windows == [list(range(i * SEQ_LEN, (i + 1) * SEQ_LEN + 1)) for i in range(6)]


def test_what_is_read_once_is_a_fair_sample_that_no_seed_changes(folder):
    orders = [[read(TokenSource("web", folder, SEQ_LEN, seed, once=True), i)[0] for i in range(6)] for seed in (0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != sorted(orders[0])


def test_document_starts_are_marked(folder):
    source = TokenSource("web", folder, SEQ_LEN, seed=0)
    begins = {document[0] for document in DOCUMENTS}
    for i in range(6):
        tokens, starts = read(source, i)
        assert starts == [j for j, token in enumerate(tokens) if token in begins]


def test_every_epoch_reads_every_window_once(folder):
    source = TokenSource("web", folder, SEQ_LEN, seed=0)
    epochs = [[read(source, epoch * 6 + i)[0][0] for i in range(6)] for epoch in range(5)]
    assert all(sorted(epoch) == [SEQ_LEN * i for i in range(6)] for epoch in epochs)
    assert len(set(map(tuple, epochs))) > 1


def test_a_window_may_take_all_tokens(folder):
    assert read(TokenSource("web", folder, 49, seed=0), 0, 49)[0] == list(range(50))


def test_a_corpus_too_short_for_a_window_shows_the_arithmetic(folder):
    with pytest.raises(UserError, match=r"it has 50 tokens, and training.seq_len = 50 needs 50 \+ 1"):
        TokenSource("web", folder, 50, seed=0)


def test_validation_does_not_begin_anew_silently(folder):
    source = TokenSource("web", folder, SEQ_LEN, seed=0, once=True)
    with pytest.raises(UserError, match=r"holds 50 tokens = 6 sequences of 8; validation.sequences asks for 7"):
        source.addresses(np.arange(7))


def test_random_tokens_are_keyed_by_seed_name_and_ordinal():
    def draw(seed=1, name="random", ordinal=5):
        return tuple(read(SyntheticSource(name, 1000, seed), ordinal, 64)[0])

    assert draw() == draw()
    assert len({draw(), draw(seed=2), draw(name="other"), *(draw(ordinal=i) for i in range(5))}) == 8


def test_random_tokens_cover_the_vocabulary_evenly():
    source = SyntheticSource("random", 10, 0)
    counts = np.bincount(np.concatenate([read(source, i, 999)[0] for i in range(100)]), minlength=10)
    assert len(counts) == 10
    assert np.abs(counts - 10_000).max() < 500  # five standard deviations


def test_random_documents_have_the_mean_length_and_leave_the_tokens_as_they_are():
    source = SyntheticSource("random", 1000, 0, document_length=16)
    windows = [read(source, i, 1023) for i in range(50)]
    starts = sum(len(window[1]) for window in windows)
    assert abs(starts / (50 * 1024) - 1 / 16) < 0.006  # five standard deviations
    assert windows[3][0] == read(SyntheticSource("random", 1000, 0), 3, 1023)[0]
    assert windows[3][1] == read(source, 3, 1023)[1]
