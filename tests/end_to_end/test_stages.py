"""A run of three stages: stopped anywhere, also at and between borders, and on another mesh, it is the same run."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from scripts import data, fork
from scripts.microscope.run_data import RunData
from scripts.page.figures import marks
from scripts.page.recorded import read_run
from tests.end_to_end.launch import TINY, assert_same_tensors, curve, launch, records, tensors
from trainer.data.packing import PackingWriter, write_mark
from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

VOCAB = 270
BORDERS = (7, 13)
STAGES = f"""
base = "{TINY}"
[model]
vocab_size = {VOCAB}
[tokenizer]
path = "t.model"
[data]
sources = [
  {{name = "web", kind = "tokens", path = "web", weight = 3}},
  {{name = "code", kind = "tokens", path = "code"}},
]
[checkpoint]
mode = "sync"

[[stages]]
at_step = 7
training.seq_len = 32
training.global_batch_size = 4
optimizer.groups = [{{pattern = "embed_tokens.weight", freeze_until_step = 10}}]
data.sources = [
  {{name = "web", kind = "tokens", path = "web"}},
  {{name = "code", kind = "tokens", path = "code"}},
  {{name = "books", kind = "tokens", path = "books"}},
]

[[stages]]
at_tokens = {7 * 128 + 6 * 128 - 5}
training.seq_len = 24
training.global_batch_size = 8
training.z_loss_weight = 1e-3
training.max_norm = 0.5
data.document_mask = true
model.rope_theta = 50000.0
optimizer.lr = 5e-3
optimizer.weight_decay = 0.3
optimizer.groups = [{{pattern = "*norm.weight", lr_scale = 0.5}}]
lr_schedule.name = "linear"
lr_schedule.total_steps = 7
lr_schedule.min_lr_ratio = 0.0
validation.interval = 3
validation.sequences = 4
validation.sources = [{{name = "held out", kind = "synthetic"}}]
"""


SIZES = {"web": 1100, "code": 700, "books": 900}
"""Tokens of each source; "code" is packed for the first stage."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    root = tmp_path_factory.mktemp("stages")
    rng = np.random.default_rng(0)
    lines = [" ".join(map(str, rng.integers(0, 999, 12))) for _ in range(200)]
    train_sentencepiece(iter(lines), root / "t.model", VOCAB)
    tokenizer = load_tokenizer(root / "t.model")
    for name, n_tokens in SIZES.items():
        (root / name).mkdir()
        file = TokenFileWriter(root / name / "a.tokens", VOCAB, tokenizer.hash)
        with PackingWriter(file, 16) if name == "code" else file as writer:
            for _ in range(n_tokens // 50):
                writer.append(rng.integers(3, VOCAB, 50).tolist())
    write_mark(root / "code", 16)
    (root / "job.toml").write_text(STAGES)
    launch(root, "--job.output_dir straight", config=root / "job.toml")
    return root


def test_each_stage_begins_where_it_says(folder: Path):
    found = {record["step"]: record for record in records(folder / "straight")}
    assert found[7]["tokens"] == 7 * 128
    assert found[13]["tokens"] == 13 * 128
    assert found[20]["tokens"] == 13 * 128 + 7 * 192
    lr = {step: record["lr"] for step, record in found.items()}
    assert lr[13] < lr[7] < 1e-2  # the schedule of the run goes on
    assert [lr[14], lr[15], lr[20]] == pytest.approx([5e-3, 5e-3 * 6 / 7, 5e-3 / 7])
    assert [step for step, record in found.items() if "validation_loss" in record] == [15, 18]
    said = (folder / "straight" / "run.log").read_text()
    assert "step 8 begins stage 2: 4 sequences of 32 tokens per step" in said
    assert "step 14 begins stage 3: 8 sequences of 24 tokens per step" in said


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["in one process", pytest.param("compiled", marks=pytest.mark.long)])
def test_stops_in_each_stage_and_at_its_borders_leave_no_trace(folder: Path, mode):
    words = "--compile.enable true" if mode == "compiled" else ""
    straight = "straight"
    if words:
        straight = "straight-compiled"
        launch(folder, f"{words} --job.output_dir {straight}", config=folder / "job.toml")
    for steps in (5, 7, 10, 13, 16, 20):
        launch(
            folder, f"{words} --job.output_dir stopped-{mode[:2]} --training.steps {steps}", config=folder / "job.toml"
        )
    run = folder / f"stopped-{mode[:2]}"
    assert curve(run) == curve(folder / straight)
    assert_same_tensors(tensors(run), tensors(folder / straight))


EXACT = "--training.reduction '\"exact\"'"
DOUBLE = "--training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64"
EXPERTS = f"{DOUBLE} --model.n_experts 4 --model.experts_per_token 2 --model.ffn_dim 32"
DDP = "--mesh.dp_replicate 2 --mesh.dp_shard 1"
OWNER = f"{DDP} --fsdp.partition owner"
MESHES = {  # the run's words, and the mesh of each launch: two ranks, or one process
    "bits": (EXACT, ["--mesh.dp_shard 2", DDP, "--mesh.pp 2", None, "--mesh.pp 2", DDP]),
    "bits, owner": (EXACT, [OWNER, None, "--mesh.dp_shard 2 --fsdp.zero_stage 1", OWNER, "--mesh.dp_shard 2", None]),
    "rounding": (DOUBLE, ["--mesh.cp 2", OWNER, "--mesh.tp 2", None, "--mesh.cp 2", OWNER]),
    "experts": (EXPERTS, ["--mesh.ep 2", None, f"--mesh.ep 2 {OWNER}", "--mesh.cp 2", "--mesh.ep 2", "--mesh.pp 2"]),
}


@pytest.mark.slow
@pytest.mark.parametrize("meshes", MESHES)
def test_a_run_stopped_in_each_stage_and_at_its_borders_goes_on_on_other_meshes(folder: Path, meshes):
    """With exact sums with the same bits, else to 1e-10."""
    words, launches = MESHES[meshes]
    straight, moved = (folder / f"{name}, {meshes}" for name in ("straight", "moved"))
    launch(folder, f"{words} --job.output_dir '{straight}'", config=folder / "job.toml")
    for steps, mesh in zip((5, 7, 10, 13, 16, 20), launches, strict=True):
        own = f"{words} {mesh or ''} --job.output_dir '{moved}' --training.steps {steps}"
        launch(folder, own, 2 if mesh else 0, config=folder / "job.toml")
    if words is EXACT:
        assert curve(moved) == curve(straight)
        assert_same_tensors(tensors(moved), tensors(straight))
        return
    assert curve(moved) == [pytest.approx(point, rel=1e-10) for point in curve(straight)]
    ours = tensors(moved)
    for name, tensor in tensors(straight).items():
        assert (ours[name] - tensor).norm() <= 1e-10 * tensor.norm(), name


def test_a_stage_is_added_to_a_run_that_has_ended_and_a_trained_one_stays(folder: Path):
    launch(folder, "--job.output_dir added --training.steps 10", config=folder / "job.toml")
    job = (folder / "job.toml").read_text()
    other = folder / "other.toml"
    other.write_text(job.replace("training.seq_len = 32", "training.seq_len = 16"))
    refused = launch(folder, "--job.output_dir added", config=other, expect=78).said
    assert "from step 8 on:" in refused
    assert "training.seq_len: 32 -> 16" in refused
    other.write_text(job.replace("training.seq_len = 24", "training.seq_len = 16"))
    launch(folder, "--job.output_dir added --training.steps 14", config=other)
    assert curve(folder / "added")[:13] == curve(folder / "straight")[:13]
    assert curve(folder / "added")[13] != curve(folder / "straight")[13]
    stored = json.loads((folder / "added/checkpoints/step-00000014/MANIFEST.json").read_text())["config"]["stages"]
    assert [stage["training"]["seq_len"] for stage in stored] == [32, 16]


def test_the_stored_job_is_the_same_run(folder: Path):
    launch(folder, "--job.output_dir again", config=folder / "straight" / "config.toml")
    assert curve(folder / "again") == curve(folder / "straight")


def test_keel_data_sees_through_the_stages(folder: Path, capsys):
    """The readings of all steps are inputs that a run reads once in an epoch, and `uses` is their inverse."""
    run = RunData(copied(folder, "straight"))
    read: dict[tuple[str, int], list[tuple[int, int, int]]] = {}
    for step, length in [(n, 16 if n <= 7 else 32 if n <= 13 else 24) for n in range(1, 21)]:
        for reading in run.readings(step):
            n_targets = sum(stop - 1 - start for start, stop in reading.pieces)
            assert n_targets <= length if reading.source == "code" else n_targets == length  # the rest is padding
            for start, stop in reading.pieces:
                for target in range(start + 1, stop):
                    read.setdefault((reading.source, target), []).append((reading.epoch, reading.sample, step))
    assert max(len(uses) for uses in read.values()) == 2
    for uses in read.values():
        assert len({epoch for epoch, *_ in uses}) == len(uses)
    for name, size in SIZES.items():
        for target in range(size):
            found = [(use.epoch, use.sample, use.step) for use in run.uses(name, target, target + 1)]
            assert found == read.get((name, target), []), (name, target)
    ledger = {row.source: row for row in run.ledger(20)}
    assert sum(row.tokens for row in ledger.values()) == 3008
    assert {row.passed_over for row in ledger.values()} == {0}
    assert 1.2 < ledger["web"].epochs < 1.3
    assert data.main(["step", str(folder / "straight"), "8"]) == 0
    assert "samples 56 to 59, 32 tokens each" in capsys.readouterr().out


def copied(folder: Path, name: str) -> Path:
    """The run, with paths that do not depend on the current folder."""
    config = folder / name / "config.toml"
    config.write_text(re.sub(r'path = "(\w+[.\w]*)"', rf'path = "{folder}/\1"', config.read_text()))
    return folder / name


def test_a_fork_at_a_border_that_changes_nothing_is_the_run(folder: Path, capsys, monkeypatch):
    monkeypatch.chdir(folder)
    launch(folder, "--job.output_dir short --training.steps 7", config=folder / "job.toml")
    assert fork.main(["short", "--output", "forked", "--training.steps", "20"]) == 0
    assert "nothing of what is learned differs" in capsys.readouterr().out
    launch(folder, "", config=folder / "forked" / "config.toml")
    assert curve(folder / "forked") == curve(folder / "straight")
    assert fork.main(["short", "--output", "other", "--stages.1.training.seq_len", "40"]) == 0
    assert "from step 14 on: training.seq_len: 24 -> 40" in capsys.readouterr().out


def test_the_report_marks_the_borders(folder: Path):
    found = [
        (mark["step"], mark["text"])
        for mark in marks(read_run(folder / "straight", "straight"))
        if mark["kind"] == "stage"
    ]
    assert found == [(7, "stage 2 begins"), (13, "stage 3 begins")]


@pytest.mark.slow
def test_text_that_is_tokenized_while_training_goes_on_through_the_stages(folder: Path):
    """Its sequences become longer, then shorter, between stops at and beside the borders, on one rank and two."""
    dice = np.random.default_rng(1)
    lines = [json.dumps({"text": " ".join(map(str, dice.integers(0, 999, 30)))}) + "\n" for _ in range(70)]
    (folder / "code.jsonl").write_text("".join(lines))
    stages = STAGES.replace('kind = "tokens", path = "code"', 'kind = "text", path = "code.jsonl"')
    (folder / "text.toml").write_text(stages)
    words = "--training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64"
    launch(folder, f"{words} --job.output_dir text-straight", config=folder / "text.toml")
    for steps, ranks in ((5, 0), (7, 2), (10, 0), (13, 0), (16, 2), (20, 0)):
        launch(folder, f"{words} --job.output_dir text --training.steps {steps}", ranks, config=folder / "text.toml")
    straight = curve(folder / "text-straight")
    assert curve(folder / "text") == [pytest.approx(point, rel=1e-10) for point in straight]


def test_data_that_a_later_stage_lacks_is_missed_at_the_start(folder: Path):
    words = "--job.output_dir lacking --stages.1.training.seq_len 800 --training.steps 7"
    said = launch(folder, words, config=folder / "job.toml", expect=78).said
    assert re.search(r"stage 3, from step 14 on: \S*code: too short for one window: it has 700 tokens", said), said
    missing = launch(folder, f"{words} --stages.0.data.sources.2.path none-such", config=folder / "job.toml", expect=78)
    assert 'data.sources.2.path is "none-such": no such folder of token files' in missing.said
