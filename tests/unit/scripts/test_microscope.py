"""Which step trains on which document: against brute force over what the loader really reads."""

import json
import struct
import time
from collections import defaultdict
from dataclasses import replace
from itertools import accumulate, islice
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from checkpoint.manifest import Manifest, RunChange
from configs.load import load
from configs.run_stages import Border, RunStage
from configs.table import with_keys
from scripts.data import main
from scripts.microscope import history as histories
from scripts.microscope import run_data
from scripts.microscope.documents import Documents
from scripts.microscope.history import History, Stretch, read_history
from scripts.microscope.run_data import RunData, View
from tests.end_to_end.launch import TINY, launch_here
from tests.unit.small_job import JOB
from trainer.data.loader import build_loader
from trainer.data.order import Start
from trainer.data.packing import PackingWriter, write_mark
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.token_file import BLOCK_BYTES, Header, TokenFolder
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece

STEPS, BATCH, SEQ_LEN, VOCAB = 60, 8, 16, 400
BIRDS = ["owls", "swifts", "finches", "kites", "wrens", "storks", "terns", "larks", "gulls", "cranes", "quails", "jays"]
NAMES = ("small", "large", "packed")
LINES = [
    f"line {i} of a {kind} poem about {i * i} {BIRDS[i % 12]} and {BIRDS[i * i % 11]}\n"
    for kind in ("short", "long", "quiet", "loud", "melancholic")
    for i in range(400)
]


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    """A run of a mixture: three folders of token files, one packed, in several epochs, and synthetic samples."""
    folder = tmp_path_factory.mktemp("run")
    train_sentencepiece(iter(LINES), folder / "t.model", VOCAB)
    tokenizer = load_tokenizer(folder / "t.model")
    rng = np.random.default_rng(0)
    lines = iter(rng.permutation(LINES).tolist())  # each once, so that no two windows are equal
    for name, n_files in (("small", 1), ("large", 3), ("packed", 2)):
        (folder / name).mkdir()
        for number in range(n_files):
            writing = TokenFileWriter(folder / name / f"{number}.tokens", VOCAB, tokenizer.hash)
            with PackingWriter(writing, SEQ_LEN) if name == "packed" else writing as writer:
                for _ in range(12 * n_files):
                    text = "".join(islice(lines, rng.integers(1, 4)))
                    writer.append(encode_document(tokenizer, text))
    write_mark(folder / "packed", SEQ_LEN)
    sources = "".join(
        f'[[data.sources]]\nname = "{name}"\nkind = "tokens"\nweight = {weight}\npath = "{folder / name}"\n'
        + "shuffle = false\n" * (name == "large")
        for name, weight in (("small", 0.4), ("large", 0.3), ("packed", 0.1))
    )
    job = JOB.replace(
        '[[data.sources]]\nname = "random"\n', f'{sources}[[data.sources]]\nname = "random"\nweight = 0.2\n'
    )
    job = (
        job.replace("vocab_size = 512", f"vocab_size = {VOCAB}")
        .replace("seq_len = 32", f"seq_len = {SEQ_LEN}")
        .replace("steps = 10\nseq", f"steps = {STEPS}\nseq")
    )
    (folder / "config.toml").write_text(job + f'[tokenizer]\npath = "{folder / "t.model"}"\n')
    return folder


@pytest.fixture(scope="module")
def trained(run) -> dict[str, dict[int, list[tuple[int, int]]]]:
    """By source and token: the steps and samples of which it is a target, from the loader's own windows."""
    config = load(str(run / "config.toml")).config
    places = {name: _windows(run / name) for name in NAMES}
    found: dict[str, dict[int, list[tuple[int, int]]]] = {name: defaultdict(list) for name in NAMES}
    loader = build_loader(config, 0, 1, 0)
    for step in range(1, STEPS + 1):
        for batch in next(loader):
            for sample, tokens, targets in zip(batch.samples, batch.tokens, batch.targets, strict=True):
                window = _valid(tokens, targets)
                for name, starts in places.items():
                    if window in starts:
                        for token in range(starts[window] + 1, starts[window] + len(window)):
                            found[name][token].append((step, sample))
    loader.close()
    return found


def _valid(tokens, targets) -> tuple[int, ...]:
    """A row's window without padding."""
    n_valid = int((targets >= 0).sum())
    return (*tokens[:n_valid].tolist(), targets[n_valid - 1].item())


def _windows(path: Path) -> dict[tuple[int, ...], int]:
    folder, start, windows = TokenFolder(path, VOCAB), 0, {}
    starts = folder.document_starts(0, folder.n_tokens).tolist()
    while start + SEQ_LEN < folder.n_tokens or (path.name == "packed" and start < folder.n_tokens):
        stop = start + SEQ_LEN + 1
        if path.name == "packed":  # whole documents, as many as fit in the rest of the file
            last_in_file = next(end for end in _file_ends(folder) if end > start)
            stop = max(end for end in [*starts[1:], folder.n_tokens] if start < end <= min(stop, last_in_file))
        window = tuple(folder.read(start, stop - start).tolist())
        assert window not in windows  # no two are equal
        windows[window] = start
        start = stop if path.name == "packed" else start + SEQ_LEN
    return windows


def _file_ends(folder: TokenFolder) -> list[int]:
    return list(accumulate(file.n_tokens for file in folder.files))


def test_uses_of_every_document(run, trained):
    data = RunData(run)
    epochs = set()
    for name in NAMES:
        documents = Documents(data.tokens_of(name).folder)
        assert len(documents) >= 12
        for number in range(len(documents)):
            document = documents[number]
            expected = {use for token in range(document.start, document.stop) for use in trained[name][token]}
            uses = list(data.uses(name, document.start, document.stop))
            epochs |= {use.epoch for use in uses}
            assert {(use.step, use.sample) for use in uses if use.step <= STEPS} == expected
    assert len(epochs) > 3


def test_every_token_is_in_the_document_that_is_said(run):
    for name in NAMES:
        folder = TokenFolder(run / name, VOCAB)
        documents, starts = Documents(folder), folder.document_starts(0, folder.n_tokens)
        for token in range(folder.n_tokens):
            document = documents.at(token)
            assert document.number == np.searchsorted(starts, token, side="right") - 1
            assert document.start == starts[document.number] <= token < document.stop
        assert [d.number for d in documents.between(0, folder.n_tokens)] == list(range(len(documents)))


def test_step_shows_what_the_loader_reads(run, capsys):
    loader = build_loader(load(str(run / "config.toml")).config, 0, 1, 0)
    tokenizer = load_tokenizer(run / "t.model")
    for step in (1, 2, 3):
        batches = next(loader)
        assert main(["step", str(run), str(step), "--json"]) == 0
        said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        assert [each["sample"] for each in said] == [n for batch in batches for n in batch.samples]
        rows = [row for batch in batches for row in zip(batch.tokens, batch.targets, strict=True)]
        for each, (tokens, targets) in zip(said, rows, strict=True):
            if each["source"] == "random":
                assert each["documents"] == []
                continue
            window = _valid(tokens, targets)
            assert sum(part["tokens"] for part in each["documents"]) == len(window)
            assert "".join(part["text"] for part in each["documents"]) == tokenizer.decode(window)
    loader.close()


def test_find_a_text(run, capsys):
    tokenizer = load_tokenizer(run / "t.model")
    text = "wrens and "
    assert main(["find", str(run), text, "--json", "--most", "1000"]) == 0
    said = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = 0
    for name in NAMES:
        folder = TokenFolder(run / name, VOCAB)
        for document in Documents(folder).between(0, folder.n_tokens):
            expected += tokenizer.decode(folder.read(document.start, document.stop - document.start)).count(text)
    assert len(said) == expected > 0
    for place in said:
        start, stop = place["tokens"]
        spelled = tokenizer.decode(TokenFolder(run / place["source"], VOCAB).read(start, stop - start))
        assert text in spelled
        assert len(spelled) < len(text) + 20


def test_no_text_is_no_text_to_look_for(run, capsys):
    assert main(["find", str(run), ""]) == 1
    assert "name either a text or --document N" in capsys.readouterr().err


def test_ledger(run, trained, capsys):
    assert main(["ledger", str(run), "--step", str(STEPS), "--json"]) == 0
    rows = {row["source"]: row for row in map(json.loads, capsys.readouterr().out.splitlines())}
    for name in NAMES:
        samples = {use for uses in trained[name].values() for use in uses}
        assert rows[name]["samples"] == len(samples)
        assert rows[name]["tokens"] == rows[name]["samples"] * SEQ_LEN >= sum(map(len, trained[name].values()))
    assert sum(row["samples"] for row in rows.values()) == STEPS * BATCH


def test_the_ledger_of_a_fork_counts_what_was_read_in_sequences_of_another_length(run):
    data = RunData(run)
    before = {row.source: row for row in data.ledger(40)}
    read = data.views[0].mixture.read_before(40 * BATCH)
    config = with_keys(data.config, training={"seq_len": 2 * SEQ_LEN})
    data.views = [View(config, Start().following(40 * BATCH, read, (SEQ_LEN, 2 * SEQ_LEN)))]
    data.history = History([Stretch(1, 0, BATCH)], 50)
    for row in data.ledger(40):
        assert (row.samples, row.tokens) == (before[row.source].samples, before[row.source].tokens)
        assert row.epochs is None or row.epochs == pytest.approx(before[row.source].epochs, rel=0.05)
    assert sum(row.tokens for row in data.ledger(50)) == 40 * BATCH * SEQ_LEN + 10 * BATCH * 2 * SEQ_LEN


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("step {run} 0", "steps are numbered from 1"),
        ("step {run}/small 1", "small is not a run folder: it has no config.toml"),
        ("find {run}", "name either a text or --document N"),
        ("find {run} --document 3", "--document needs --source, as the run has several: small, large, packed"),
        ("find {run} --document 12 --source small", "small has 12 documents, numbered from 0; no 12"),
        ("find {run} --document 1 --source random", "only documents of token files"),
        ("find {run} --document 1 --source rando", "has no source 'rando'; its sources: small, large, packed, random"),
    ],
)
def test_mistakes(run, capsys, words, message):
    assert main(words.format(run=run).split()) == 1
    assert message in capsys.readouterr().err


@given(st.data())
def test_histories_by_brute_force(data):
    """Steps as a run takes them: the batch size may change at a launch, and a rewind passes samples over."""
    stretches, taken, batch, sample = [Stretch(1, 0, 4)], {}, 4, 0
    for _ in range(data.draw(st.integers(1, 4))):
        for _ in range(data.draw(st.integers(0, 5))):
            taken[max(taken, default=0) + 1] = range(sample, sample + batch)
            sample += batch
        last = max(taken, default=0)
        if data.draw(st.booleans()) and last:
            to_step = data.draw(st.integers(0, last - 1))
            taken = {step: samples for step, samples in taken.items() if step <= to_step}
            stretches = [each for each in stretches if each.first_step <= to_step] + [
                Stretch(to_step + 1, sample, batch)
            ]
        else:
            batch = data.draw(st.sampled_from([2, 4, 8]))
            stretches = [*stretches, Stretch(last + 1, sample, batch)]
    history, last = History(stretches, max(taken, default=0)), max(taken, default=0)
    assert {step: history.samples(step) for step in taken} == taken
    steps = {each: step for step, samples in taken.items() for each in samples}
    assert [history.step_of(each) for each in range(sample)] == [steps.get(each) for each in range(sample)]
    assert [each for part in history.trained(last) for each in part] == sorted(steps)


REWOUND = [(20, 27, 215), (20, 26, 263)]
"""Steps that a run with a batch of 8 went back to from which spikes, and the last samples that it passed over."""


@pytest.mark.parametrize(
    ("rewinds", "changes", "expected"),
    [
        (REWOUND, [], {20: (152, 8), 21: (264, 8), 31: (344, 8)}),
        (REWOUND[:1], [(23, "8 -> 4")], {20: (152, 8), 21: (216, 8), 24: (240, 4), 31: (268, 4)}),
        (REWOUND[:1], [(20, "8 -> 4")], {20: (152, 8), 21: (216, 4), 31: (256, 4)}),
        ([*REWOUND, (30, 35, 383)], [(10, "4 -> 8")], {10: (36, 4), 11: (40, 8), 21: (264, 8), 31: (384, 8)}),
    ],
    ids=["twice, the second time from an earlier step", "then a batch", "a batch, then back", "and to a later step"],
)
def test_a_history_is_what_happened_in_its_order(monkeypatch, rewinds, changes, expected):
    incidents = [
        {"step": to_step, "what": "rewind", "spike_step": spike, "to_step": to_step, "samples": [160, last]}
        for to_step, spike, last in rewinds
    ]
    saved = {"run": {"step": 30, "incidents": incidents}, "data": {"next_sample": expected[31][0]}}
    manifest = Manifest(**dict.fromkeys(Manifest.__dataclass_fields__))
    lines = [RunChange(step, [f"training.global_batch_size: {line}"]) for step, line in changes]
    monkeypatch.setattr(histories, "steps_in", lambda folder: [30])
    monkeypatch.setattr(histories, "read_manifest", lambda folder: replace(manifest, run_changes=lines))
    monkeypatch.setattr(histories, "read_trainer_state", lambda folder: saved)
    monkeypatch.setattr(histories, "check_saved_state", lambda saved: None)
    config = with_keys(load(str(TINY), ()).config, training={"global_batch_size": 8})
    history = read_history(Path("run"), [RunStage(Border(), config)])
    assert {step: (history.samples(step).start, len(history.samples(step))) for step in expected} == expected


def test_a_stage_to_whose_border_a_run_went_back_begins_with_the_samples_that_were_passed_over(tmp_path, monkeypatch):
    other = '[{name = "random", kind = "synthetic"}, {name = "other", kind = "synthetic"}]'
    (tmp_path / "config.toml").write_text(f"{JOB}\n[[stages]]\nat_step = 10\ndata.sources = {other}\n")
    first, second = (stage.config for stage in load(str(tmp_path / "config.toml"), is_stored=True).stages)
    batch = first.training.global_batch_size
    begun = View(first, Start()).next(10 * batch, second).start
    history = History([Stretch(1, 0, batch), Stretch(11, 13 * batch, batch)], 20, begun)
    monkeypatch.setattr(run_data, "read_history", lambda folder, stages: history)
    data = RunData(tmp_path)
    assert [data.view_of(step).start for step in (1, 10, 11, 20)] == [Start(), Start(), begun, begun]


def test_a_corpus_of_a_trillion_tokens_takes_less_than_a_second(run, tmp_path, capsys):
    """A sparse file of 2 TB, with the checksums of the blocks that are read: looked at without an index."""
    n_tokens, n_documents = 10**12, 1000
    (tmp_path / "huge").mkdir()
    path = tmp_path / "huge" / "0.tokens"
    header = Header(VOCAB, n_tokens, n_documents, "00" * 16, bytes(16))
    with path.open("wb") as file:
        try:
            file.truncate(header.file_bytes)
        except OSError:
            pytest.skip("this file system has no files of 2 TB")
        file.write(header.pack())
        offsets = header.tables_start + 8 * header.n_blocks
        file.seek(offsets)
        file.write(struct.pack(f"<{n_documents}Q", *(i * n_tokens // n_documents for i in range(n_documents))))
        config = (run / "config.toml").read_text().replace(str(run / "large"), str(tmp_path / "huge"))
        (tmp_path / "config.toml").write_text(config.replace("steps = 60", "steps = 1000000000"))
        step = 987_654_321
        readings = [each for each in RunData(tmp_path).readings(step) if each.source == "large"]
        for reading in readings:
            for token in (reading.pieces[0][0], reading.pieces[0][0] + SEQ_LEN):
                block = token * 2 // BLOCK_BYTES
                file.seek(header.tables_start + 8 * block)
                file.write(xxhash.xxh3_64_digest(bytes(BLOCK_BYTES))[::-1])
    assert readings
    started = time.process_time()
    assert main(["step", str(tmp_path), str(step)]) == 0
    document = Documents(TokenFolder(tmp_path / "huge", VOCAB, check_content=False)).at(readings[0].pieces[0][0])
    start = readings[0].pieces[0][0]
    uses = list(RunData(tmp_path).uses("large", start + 1, start + SEQ_LEN + 1))
    assert time.process_time() - started < 1
    assert step in [use.step for use in uses]
    assert f"document {document.number} (17 of 1000000000 tokens, 0.tokens)" in capsys.readouterr().out


@pytest.mark.slow
def test_a_batch_that_a_resume_changed(tmp_path):
    words = ("--checkpoint.interval", "3", "--job.allow_run_change", "true", "--training.micro_batch_size", "1")
    for steps, batch in ((3, 8), (5, 4), (7, 2)):
        sizes = ("--training.steps", str(steps), "--training.global_batch_size", str(batch))
        assert launch_here(tmp_path, *words, *sizes) == 0
    run = RunData(tmp_path / "run")
    found = [run.history.samples(step) for step in range(1, 9)]
    assert [len(samples) for samples in found] == [8, 8, 8, 4, 4, 2, 2, 2]
    assert [sample for samples in found for sample in samples] == [*range(38)]
    assert [row.samples for row in run.ledger(7)] == [36]


def test_a_step_beyond_the_end_of_the_run_is_said_to_be_never_trained(run, capsys):
    assert main(["step", str(run), "100000"]) == 0
    assert f"(never trained: the run ends at training.steps = {STEPS})" in capsys.readouterr().out
