"""The loader: the same samples in the same order at any number of ranks, any micro-batch, after any resume."""

import copy
import json
import threading
import time
from itertools import islice

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError, UserError
from configs.run_change import run_key_diff
from configs.schema import Config
from trainer.data.loader import IGNORED, build_loader, merge_state_dicts
from trainer.data.order import Epochs, Mixture, derive_key, permute
from trainer.data.prefetch import Prefetcher
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

SEQ_LEN = 16
VOCAB_SIZE = 300
SEED = 5
GLOBAL_BATCH = 12
TABLES = {"web": 333, "code": 100}  # tokens in each folder


def write_tokens(path, documents, tokenizer_hash="ab" * 16):
    path.mkdir()
    with TokenFileWriter(path / "part.tokens", VOCAB_SIZE, tokenizer_hash) as writer:
        for document in documents:
            writer.append(document)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """A tokenizer, text, and two token folders with documents of 1 to 40 tokens."""
    root = tmp_path_factory.mktemp("data")
    words = np.random.default_rng(0).integers(97, 123, (200, 30)).astype(np.uint8)
    texts = [bytes(row).decode() for row in words]
    train_sentencepiece(iter(texts), root / "tokenizer.model", VOCAB_SIZE)
    (root / "text.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    tokenizer_hash = load_tokenizer(root / "tokenizer.model").hash
    for name, n_tokens in TABLES.items():
        tokens = np.random.default_rng(n_tokens).integers(0, VOCAB_SIZE, n_tokens)
        np.save(root / f"{name}.npy", tokens)
        cuts = np.cumsum(np.random.default_rng(1).integers(1, 40, 60))
        write_tokens(root / name, np.split(tokens, cuts[cuts < n_tokens]), tokenizer_hash)
    return root


def config(corpus, micro_batch=1, kinds=("tokens", "synthetic", "text"), **tables):
    """A job with the sources of `kinds`; `tables` replace or extend whole tables."""
    sources = {
        "tokens": [
            {"name": "web", "kind": "tokens", "path": str(corpus / "web"), "weight": 3.0},
            {"name": "code", "kind": "tokens", "path": str(corpus / "code"), "weight": 1.0},
        ],
        "synthetic": [{"name": "random", "kind": "synthetic", "weight": 0.5}],
        "text": [{"name": "text", "kind": "text", "path": str(corpus / "text.jsonl"), "weight": 2.0}],
    }
    job = {
        "job": {"name": "test", "device": "cpu"},
        "model": {"dim": 8, "n_layers": 1, "n_heads": 1, "ffn_dim": 8, "vocab_size": VOCAB_SIZE},
        "tokenizer": {"path": str(corpus / "tokenizer.model")},
        "training": {
            "steps": 10,
            "seq_len": SEQ_LEN,
            "global_batch_size": GLOBAL_BATCH,
            "micro_batch_size": micro_batch,
            "seed": SEED,
        },
        "data": {"sources": [source for kind in kinds for source in sources[kind]]},
        "optimizer": {"lr": 1e-3},
        "lr_schedule": {"total_steps": 10},
    }
    return Config.model_validate({name: job.get(name, {}) | tables.get(name, {}) for name in job | tables})


def run(config, dp_size, start_sample, n_steps, states=None):
    """What all ranks get: {sample: (tokens, targets)}, the samples' order in each step, and the merged state."""
    loaders = [build_loader(config, rank, dp_size, start_sample, states=states) for rank in range(dp_size)]
    content, order = {}, []
    for steps in islice(zip(*loaders, strict=True), n_steps):
        order.append([s for micro_step in zip(*steps, strict=True) for batch in micro_step for s in batch.samples])
        for batch in (batch for step in steps for batch in step):
            assert batch.tokens.is_contiguous()
            assert batch.targets.is_contiguous()
            assert torch.equal(batch.tokens[:, 1:], batch.targets[:, :-1])
            for sample, tokens, targets in zip(batch.samples, batch.tokens, batch.targets, strict=True):
                content[sample] = tokens.tolist() + targets[-1:].tolist()
    state = merge_state_dicts([json.loads(json.dumps(loader.state_dict())) for loader in loaders])
    for loader in loaders:
        loader.close()
    return content, order, state


N_STEPS = 8


@pytest.fixture(scope="module")
def straight(corpus):
    """All samples of the first steps, by one rank in one launch."""
    return run(config(corpus), 1, 0, N_STEPS)[0]


CUTS = [(dp, b) for dp in (1, 2, 3, 4, 6) for b in (1, 2, 3, 4, 6, 12) if GLOBAL_BATCH % (dp * b) == 0]


@pytest.mark.slow
@given(st.lists(st.tuples(st.sampled_from(CUTS), st.integers(1, 3)), min_size=1, max_size=3), st.booleans())
@settings(max_examples=40, deadline=None)
def test_samples_are_the_same_at_any_ranks_micro_batch_and_resume(corpus, straight, launches, keep_states):
    step, states = 0, None
    for (dp_size, micro_batch), n_steps in launches:
        n_steps = min(n_steps, N_STEPS - step)
        content, order, state = run(config(corpus, micro_batch), dp_size, step * GLOBAL_BATCH, n_steps, states)
        assert order == [list(range(t * GLOBAL_BATCH, (t + 1) * GLOBAL_BATCH)) for t in range(step, step + n_steps)]
        assert content == {sample: straight[sample] for sample in content}
        step += n_steps
        assert state["next_sample"] == step * GLOBAL_BATCH
        assert set(state["sources"]) == {"web", "code", "random", "text"}
        states = state["sources"] if keep_states else None


def test_samples_are_those_of_the_definition(corpus):
    """Against arithmetic done one sample at a time on the plain arrays, over several epochs."""
    job = config(corpus, kinds=("tokens",))
    content, _, _ = run(job, 2, 0, 10)
    mixture = Mixture(["web", "code"], [3.0, 1.0], SEED)
    ordinals = {"web": 0, "code": 0}
    for sample in range(10 * GLOBAL_BATCH):
        name = ("web", "code")[int(mixture.locate(np.array([sample]))[0][0])]
        n_windows = (TABLES[name] - 1) // SEQ_LEN
        epoch, index = divmod(ordinals[name], n_windows)
        start = int(permute(index, n_windows, derive_key("epoch", SEED, name, epoch))) * SEQ_LEN
        assert content[sample] == np.load(corpus / f"{name}.npy")[start : start + SEQ_LEN + 1].tolist()
        ordinals[name] += 1
    assert ordinals["code"] > 4 * 6


@pytest.mark.parametrize(("first", "then"), [(1, 4), (4, 2)])
def test_windows_that_are_not_shuffled_come_as_they_lie(corpus, first, then):
    """In each epoch, on any number of ranks, after a resume, and beside a source that is shuffled."""
    sources = [source.model_dump() for source in config(corpus, kinds=("tokens",)).data.sources]
    sources[1]["shuffle"] = False
    job = config(corpus, data={"sources": sources})
    content, _, _ = run(job, first, 0, 7)
    content |= run(job, then, 7 * GLOBAL_BATCH, 3)[0]
    drawn, _ = Mixture(["web", "code"], [3.0, 1.0], SEED).locate(np.arange(10 * GLOBAL_BATCH))
    found = [content[sample] for sample in np.flatnonzero(drawn == 1).tolist()]
    tokens = np.load(corpus / "code.npy")
    n_windows = (len(tokens) - 1) // SEQ_LEN
    starts = [SEQ_LEN * (number % n_windows) for number in range(len(found))]
    assert found == [tokens[start : start + SEQ_LEN + 1].tolist() for start in starts]
    assert len(found) > 3 * n_windows


def test_an_epoch_has_every_window_once(corpus):
    one_source = {"sources": [{"name": "code", "kind": "tokens", "path": str(corpus / "code")}]}
    content, _, _ = run(config(corpus, data=one_source, training=training(6)), 2, 0, 5)
    windows = [tuple(np.load(corpus / "code.npy")[i * SEQ_LEN : (i + 1) * SEQ_LEN + 1].tolist()) for i in range(6)]
    for epoch in range(5):
        assert sorted(tuple(content[6 * epoch + i]) for i in range(6)) == sorted(windows)


def training(global_batch_size, micro_batch_size=1, seq_len=SEQ_LEN):
    return {
        "steps": 1,
        "seq_len": seq_len,
        "global_batch_size": global_batch_size,
        "micro_batch_size": micro_batch_size,
        "seed": SEED,
    }


def test_document_mask_numbers_documents_and_restarts_positions(corpus):
    job = config(corpus, micro_batch=4)
    masked = config(corpus, micro_batch=4, data={"document_mask": True})
    plain, with_mask = (build_loader(each, 0, 1, 0) for each in (job, masked))
    boundaries = 0
    begins = {name: set(starts_of(corpus, name)) for name in TABLES}
    for plain_step, masked_step in islice(zip(plain, with_mask, strict=True), 5):
        for a, b in zip(plain_step, masked_step, strict=True):
            assert a.positions is None
            assert a.document_ids is None
            assert b.positions is not None
            assert b.document_ids is not None
            assert torch.equal(a.tokens, b.tokens)
            for row in range(4):
                name, start = find(corpus, b.tokens[row].tolist(), a.targets[row].tolist())
                if name is None:
                    continue
                position, document = -1, 0
                for j in range(SEQ_LEN):
                    new = start + j in begins[name]
                    document += new and j > 0
                    position = 0 if new else position + 1
                    crosses = start + j + 1 in begins[name]
                    boundaries += crosses
                    assert b.positions[row, j] == position
                    assert b.document_ids[row, j] == document
                    assert b.targets[row, j] == (IGNORED if crosses else a.targets[row, j])
    assert boundaries > 10
    plain.close()
    with_mask.close()


def starts_of(corpus, name):
    cuts = np.cumsum(np.random.default_rng(1).integers(1, 40, 60))
    return [0, *cuts[cuts < TABLES[name]].tolist()]


def find(corpus, tokens, targets):
    """The folder a window comes from and its first token there."""
    for name in TABLES:
        all_tokens = np.load(corpus / f"{name}.npy")
        for start in range(0, TABLES[name] - SEQ_LEN, SEQ_LEN):
            if all_tokens[start : start + SEQ_LEN + 1].tolist() == [*tokens, targets[-1]]:
                return name, start
    return None, 0


def test_a_synthetic_window_is_one_document(corpus):
    loader = build_loader(config(corpus, kinds=("synthetic",), data={"document_mask": True}), 0, 1, 0)
    batch = next(loader)[0]
    loader.close()
    assert batch.positions is not None
    assert batch.document_ids is not None
    assert batch.positions.tolist() == [list(range(SEQ_LEN))]
    assert not batch.document_ids.any()
    assert (batch.targets != IGNORED).all()


@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 1), (1, 4), (2, 3), (4, 4)])
def test_validation_is_every_sequence_once_and_every_pass_the_same(corpus, dp_size, micro_batch):
    sources = [{"name": "code", "kind": "tokens", "path": str(corpus / "code")}]
    job = config(corpus, micro_batch, training=training(48, micro_batch), validation=validation(sources, 5))
    loaders = [build_loader(job, rank, dp_size, 0, validation=True) for rank in range(dp_size)]
    tokens = np.load(corpus / "code.npy")
    for _ in range(2):
        passes = [list(loader) for loader in loaders]
        assert len({len(steps) for steps in passes}) == 1
        batches = [batch for steps in passes for (batch,) in steps]
        assert all(batch.tokens.shape == (micro_batch, SEQ_LEN) for batch in batches)
        assert sum(int((batch.targets != IGNORED).sum()) for batch in batches) == 5 * SEQ_LEN
        seen = {s: batch.targets[row].tolist() for batch in batches for row, s in enumerate(batch.samples)}
        starts = Epochs("code", (len(tokens) - 1) // SEQ_LEN, seed=0).window(np.arange(5)) * SEQ_LEN
        assert seen == {i: tokens[start + 1 : start + SEQ_LEN + 1].tolist() for i, start in enumerate(starts)}
    for loader in loaders:
        loader.close()


def validation(sources, sequences):
    return {"interval": 1, "sequences": sequences, "sources": sources}


@pytest.mark.parametrize(("dp_size", "micro_batch"), [(1, 1), (2, 2), (4, 3)])
def test_a_validation_reads_one_source_after_the_other(corpus, dp_size, micro_batch):
    """Each micro-batch is of one source, and all together are the mixture's first sequences."""
    sources = config(corpus).model_dump()["data"]["sources"]
    job = config(corpus, micro_batch, training=training(48, micro_batch), validation=validation(sources, 20))
    loaders = [build_loader(job, rank, dp_size, 0, validation=True) for rank in range(dp_size)]
    names = [source["name"] for source in sources]
    owners, _ = Mixture(names, [source["weight"] for source in sources], 0).locate(np.arange(20))
    seen, order = {}, []
    for steps in zip(*loaders, strict=True):
        batches = [batch for step in steps for batch in step]
        assert len({batch.source for batch in batches if batch.samples}) == 1
        assert all(batch.source is None for batch in batches if not batch.samples)
        order.append(batches[0].source)
        seen |= {sample: batch.source for batch in batches for sample in batch.samples}
    assert seen == {sample: names[owner] for sample, owner in enumerate(owners.tolist())}
    assert order == sorted(order, key=names.index)
    for loader in loaders:
        loader.close()


def test_a_validation_needs_a_sequence_of_each_source(corpus):
    path = str(corpus / "code")
    sources = [{"name": name, "kind": "tokens", "path": path, "weight": w} for name, w in (("a", 9.0), ("rare", 0.1))]
    with pytest.raises(ConfigError, match=r"validation\.sequences 4 has no sequence of the source 'rare'"):
        build_loader(config(corpus, validation=validation(sources, 4)), 0, 1, 0, validation=True)


@pytest.mark.parametrize(("kind", "path"), [("tokens", "code"), ("text", "text.jsonl")])
def test_validation_asks_for_no_more_than_there_is(corpus, kind, path):
    sources = [{"name": "held out", "kind": kind, "path": str(corpus / path)}]
    with pytest.raises(UserError, match=r"validation\.sequences"):
        build_loader(config(corpus, validation=validation(sources, 5000)), 0, 1, 0, validation=True)


def test_validation_on_text_can_be_repeated(corpus):
    sources = [{"name": "held out", "kind": "text", "path": str(corpus / "text.jsonl")}]
    loader = build_loader(config(corpus, validation=validation(sources, 6)), 0, 1, 0, validation=True)
    first, second = ([batch.tokens.tolist() for (batch,) in loader] for _ in range(2))
    loader.close()
    assert len(first) == 6
    assert first == second


def test_state_counts_what_was_handed_out_not_what_was_prefetched(corpus):
    loader = build_loader(config(corpus), 0, 1, 24)
    assert loader.state_dict()["next_sample"] == 24
    next(loader)
    states = [loader.state_dict()]
    time.sleep(0.2)  # the thread goes on meanwhile
    states.append(loader.state_dict())
    loader.close()
    assert states[0] == states[1]
    assert states[0]["next_sample"] == 24 + GLOBAL_BATCH
    windows = {cursor[0] for cursor in states[0]["sources"]["text"]["cursors"].values()}
    n_text = sum(i == 3 for i in Mixture(list("abcd"), [3, 1, 0.5, 2], SEED).locate(np.arange(36))[0])
    assert max(windows) <= n_text // 6 + 1


def test_a_closed_loader_goes_on_where_it_stood(corpus, straight):
    loader = build_loader(config(corpus), 0, 1, 0)
    list(islice(loader, 2))
    loader.close()
    batches = next(loader)
    loader.close()
    assert [batch.samples[0] for batch in batches] == list(range(24, 36))
    assert [batch.tokens[0].tolist() for batch in batches] == [straight[i][:-1] for i in range(24, 36)]


def test_changed_data_is_refused_on_a_resume(corpus, tmp_path):
    job = config(corpus, kinds=("tokens",))
    loader = build_loader(job, 0, 1, 0)
    states = loader.state_dict()["sources"]
    states["code"]["fingerprint"] = "of another folder"
    with pytest.raises(UserError, match="source 'code' has changed since the checkpoint"):
        build_loader(job, 0, 1, 12, states=states)
    allowed = config(corpus, kinds=("tokens",), job={"allow_run_change": True})
    build_loader(allowed, 0, 1, 12, states=states).close()


def test_a_run_that_has_the_removed_key_virtual_shards_goes_on(corpus):
    new = config(corpus, kinds=("text",)).model_dump()
    old = copy.deepcopy(new)
    old["data"]["sources"][0]["virtual_shards"] = 64
    assert run_key_diff(old, new) == []


@pytest.mark.parametrize(
    ("key", "value", "line"),
    [
        ("training.seq_len", 8, "training.seq_len: 16 -> 8"),
        ("training.seed", 6, "training.seed: 5 -> 6"),
        (
            "data.0.weight",
            1.0,
            "data.sources.0: web, 512 of 1024 samples, 20 windows -> web, 256 of 1024 samples, 20 w",
        ),
        ("data.1.name", "books", "data.sources.1: code, 171 of 1024 samples, 6 windows -> books, 171 of 1024 samples"),
        (
            "data.1.path",
            "web",
            "data.sources.1: code, 171 of 1024 samples, 6 windows -> code, 171 of 1024 samples, 20 w",
        ),
        (
            "data.1.shuffle",
            False,
            "data.sources.1: code, 171 of 1024 samples, 6 windows -> code, 171 of 1024 samples, 6 windows, not s",
        ),
        ("data.3", {"name": "new", "kind": "synthetic"}, "data.sources.3: (none) -> new, "),
    ],
)
def test_another_order_of_the_samples_is_refused_even_where_changes_are_allowed(corpus, key, value, line):
    """Going on at the old number in a new permutation reads a part of the epoch twice and another never."""
    job = config(corpus, kinds=("tokens", "text"), job={"allow_run_change": True})
    saved = merge_state_dicts([json.loads(json.dumps(build_loader(job, 0, 1, 0).state_dict()))])
    changed = job.model_dump()
    table, *path = key.split(".")
    if table == "training":
        changed[table][path[0]] = value
    elif len(path) == 1:
        changed["data"]["sources"].append(value)
    else:
        changed["data"]["sources"][int(path[0])][path[1]] = str(corpus / value) if path[1] == "path" else value
    with pytest.raises(ConfigError) as caught:
        build_loader(Config.model_validate(changed), 0, 1, 12, states=saved["sources"], order=saved["order"])
    assert f"\n  {line}" in str(caught.value)
    assert "--checkpoint.init_from" in str(caught.value)


def test_weights_of_the_same_shares_and_a_larger_batch_go_on_in_the_order(corpus):
    job = config(corpus, kinds=("tokens",), job={"allow_run_change": True})
    saved = build_loader(job, 0, 1, 0).state_dict()
    changed = job.model_dump()
    changed["training"]["global_batch_size"] = 24
    for source in changed["data"]["sources"]:
        source["weight"] *= 2
    loader = build_loader(Config.model_validate(changed), 0, 1, 12, states=saved["sources"], order=saved["order"])
    assert [i for batch in next(loader) for i in batch.samples] == list(range(12, 36))
    loader.close()


def test_an_error_in_the_thread_names_file_and_byte_in_the_main_thread(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr("trainer.data.token_file.FULL_CHECK_BYTES", 0)  # as with a large folder: checked when read
    write_tokens(tmp_path / "web", [list(range(200))], load_tokenizer(corpus / "tokenizer.model").hash)
    file = tmp_path / "web" / "part.tokens"
    content = bytearray(file.read_bytes())
    content[200] ^= 1
    file.write_bytes(content)
    sources = {"sources": [{"name": "web", "kind": "tokens", "path": str(tmp_path / "web")}]}
    loader = build_loader(config(corpus, data=sources), 0, 1, 0)
    with pytest.raises(UserError, match=r"part\.tokens, at byte \d+: the tokens are damaged"):
        next(loader)
    with pytest.raises(StopIteration):
        next(loader)
    loader.close()


def test_close_ends_the_thread_at_once(corpus):
    before = threading.active_count()
    loaders = [build_loader(config(corpus), 0, 1, 0) for _ in range(5)]
    for n_steps, loader in enumerate(loaders):
        list(islice(loader, n_steps))
    start = time.perf_counter()
    for loader in loaders:
        loader.close()
        loader.close()
    assert time.perf_counter() - start < 10
    assert threading.active_count() == before


def test_prefetching_stays_within_its_depth():
    made = []

    def items():
        for i in range(100):
            made.append(i)
            yield i

    prefetcher = Prefetcher(items, depth=2)
    assert next(prefetcher) == 0
    time.sleep(0.1)
    assert len(made) <= 1 + 2 + 1  # handed out, in the queue, and one waiting to get in
    assert list(prefetcher) == list(range(1, 100))
    prefetcher.close()


def test_a_micro_batch_moves_to_a_device(corpus):
    loader = build_loader(config(corpus), 0, 1, 0)
    batch = next(loader)[0]
    loader.close()
    moved = batch.to("meta")
    assert moved.tokens.device.type == moved.targets.device.type == "meta"
    assert moved.positions is None
    assert moved.samples == batch.samples
