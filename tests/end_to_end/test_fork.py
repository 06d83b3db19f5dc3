"""keel fork: a run that begins at a checkpoint of another, with other keys or another mixture."""

import json
import math
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from checkpoint import manifest as manifests
from checkpoint.export.model_files import checkpoint_files
from checkpoint.export.output import unfinished_folder
from checkpoint.manifest import step_folder
from configs.load import load
from scripts import checkpoint as checkpoints
from scripts import data, export_hf, fork
from scripts.parity_options import LATENT, MOE
from tests.end_to_end.launch import TINY, curve, launch, launch_here, records, tensors
from trainer.data.tokenizer import train_sentencepiece

SOURCES = '--data.sources \'[{name = "a", kind = "synthetic", weight = 3.0}, {name = "b", kind = "synthetic"}]\' '
WORDS = f"{SOURCES} --training.steps 8 --checkpoint.interval 4"


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fork")
    launch(folder, WORDS)
    return folder / "run"


def go_on(tmp_path, words="", ranks=0, expect=0):
    """Train a fork by the job file in its folder."""
    return launch(
        tmp_path, f"--job.output_dir fork {words}", ranks, config=tmp_path / "fork/config.toml", expect=expect
    )


def test_a_fork_that_changes_nothing_is_the_run(tmp_path, run, capsys):
    assert fork.main([str(run), "--at", "4", "--output", str(tmp_path / "fork")]) == 0
    assert "nothing of what is learned differs" in capsys.readouterr().out
    assert [each["step"] for each in records(tmp_path / "fork")] == [1, 2, 3, 4]
    go_on(tmp_path)
    assert curve(tmp_path / "fork") == curve(run)
    ours, theirs = tensors(tmp_path / "fork", 8), tensors(run, 8)
    assert ours.keys() == theirs.keys()
    assert all(ours[name].equal(theirs[name]) for name in ours)


def test_a_relative_tokenizer_is_the_copy_of_the_run_in_another_folder(tmp_path, capsys, monkeypatch):
    (tmp_path / "here").mkdir()
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    text = tmp_path / "text.txt"
    text.write_text("two words " * 50)
    train_sentencepiece([text.read_text()], Path("tokenizer.model"), 266)
    words = ["--tokenizer.path", "tokenizer.model", "--model.vocab_size", "266", "--training.steps", "1"]
    words += ["--data.sources", f'[{{name = "text", kind = "text", path = "{text}"}}]', "--checkpoint.interval", "1"]
    assert launch_here(tmp_path / "here", *words) == 0
    monkeypatch.chdir(tmp_path / "there")
    assert fork.main([str(tmp_path / "here/run"), "--output", "fork"]) == 0
    assert (tmp_path / "there/fork/tokenizer.model").read_bytes() == (tmp_path / "here/tokenizer.model").read_bytes()
    assert 'path = "tokenizer.model"' in (tmp_path / "there/fork/config.toml").read_text()


@pytest.mark.slow
def test_a_fork_needs_nothing_of_its_run_and_is_resumed_as_it_was_made(tmp_path, run, capsys, monkeypatch):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    monkeypatch.chdir(tmp_path)
    words = ["copy", "--at-tokens", "600", "--output", "fork", "--without", "b", "--optimizer.lr", "0.005"]
    assert fork.main(words) == 0
    said = capsys.readouterr().out
    assert "fork begins at step 4 of copy (512 tokens)" in said
    assert "optimizer.lr: 0.01 -> 0.005" in said
    assert "the samples differ from number 32 on, the first of step 5" in said
    assert "a after 24, b after 8 sequences" in said
    shutil.rmtree(copy)
    refused = go_on(tmp_path, "--optimizer.lr 0.01", expect=78)
    assert "optimizer.lr: 0.005 -> 0.01" in refused.said
    for steps in (6, 8):  # a resume on more ranks in between
        go_on(tmp_path, f"--training.steps {steps}", ranks=0 if steps == 6 else 2)
    assert curve(tmp_path / "fork")[3] == curve(run)[3]
    assert curve(tmp_path / "fork")[4] != curve(run)[4]
    manifest = json.loads((tmp_path / "fork/checkpoints/step-00000008/MANIFEST.json").read_text())
    assert [change["step"] for change in manifest["run_changes"]] == [4]
    assert data.main(["ledger", "fork"]) == 0
    assert "56" in capsys.readouterr().out  # 24 sequences of a before the fork, and 32 after it
    assert data.main(["step", "fork", "5"]) == 0
    assert "sample 32: a" in capsys.readouterr().out
    assert data.main(["step", "fork", "4"]) == 1
    assert "ask for an earlier step in that run's folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--at", "5"], "has no checkpoint of step 5; it has 4, 8"),
        (["--at-tokens", "100"], "has no checkpoint of at most 100 tokens; it has 512 (step 4), 1,024 (step 8)"),
        (["--without", "c"], "has no such source of data; it has a, b"),
        (["--without", "a", "--without", "b"], "no source of data is left"),
        (["--model.ffn_dim", "32"], "is of another model; 6 tensors differ"),
        (["--model.tie_embeddings", "true"], "model.lm_head.weight: [256, 32] in the checkpoint, no such tensor here"),
        (["--optimizer.name", "lion"], "--optimizer.name: the checkpoint has the state of adamw"),
        (["--training.dtype", "bfloat16"], "--training.dtype: the checkpoint has weights and state in float32"),
        (
            ["--optimizer.groups", '[{pattern="embed*", freeze=true}]'],
            "other ones are frozen now (embed_tokens.weight); to start another run from its weights, set",
        ),
        (["--optimizer.lrr", "1"], "unknown key optimizer.lrr; did you mean optimizer.lr?"),
        (["--training.global_batch_size", "7"], "global_batch_size"),
        (["--job.name=other"], "--job.name: --output FOLDER names the new run, and its folder"),
        (["--checkpoint.load", "4"], "--checkpoint.load: a fork sets it itself; leave it out"),
    ],
)
def test_what_can_not_be_is_refused_and_leaves_nothing(tmp_path, run, capsys, words, said):
    assert fork.main([str(run), *words, "--output", str(tmp_path / "fork")]) in (1, 78)
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_fork_keeps_what_is_frozen(tmp_path, capsys, monkeypatch):
    """The learning rate of a group may change, but what is frozen has no state."""
    monkeypatch.chdir(tmp_path)
    frozen = '{pattern = "embed*", freeze = true}'
    words = ["--optimizer.groups", f"[{frozen}]", "--training.steps", "1", "--checkpoint.interval", "1"]
    assert launch_here(tmp_path, *words) == 0
    slower = f'[{frozen}, {{pattern = "*norm*", lr_scale = 0.5}}]'
    assert fork.main(["run", "--output", "slower", "--optimizer.groups", slower]) == 0
    assert fork.main(["run", "--output", "fork", "--optimizer.groups", "[]"]) == 78
    assert "other ones are frozen now (embed_tokens.weight)" in capsys.readouterr().err


def test_a_fork_of_muon_keeps_its_tensors(tmp_path, capsys, monkeypatch):
    """A matrix counts its updates only where they are rounded stochastically; AdamW counts them anyway."""
    monkeypatch.chdir(tmp_path)
    launch(tmp_path, "--training.dtype bfloat16 --optimizer.name muon --training.steps 1")
    assert fork.main(["run", "--optimizer.rounding", "stochastic", "--output", "fork"]) == 78
    assert '--optimizer.rounding: the checkpoint has muon\'s state with "nearest"' in capsys.readouterr().err
    assert fork.main(["run", "--optimizer.neuron_beta", "0.95", "--output", "fork"]) == 78
    assert "--optimizer.neuron_beta: the checkpoint has muon's state without averages of" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_fork_whose_job_would_count_other_tokens_is_refused_and_a_stage_goes_on(tmp_path, capsys, monkeypatch):
    """Steps before the fork had the tokens that they had: a schedule in tokens does not jump back."""
    monkeypatch.chdir(tmp_path)
    by_tokens = "--lr_schedule.warmup_steps 0 --lr_schedule.total_steps none --lr_schedule.total_tokens 1200"
    launch(tmp_path, f"{by_tokens} --training.steps 4")
    sizes = ["--training.global_batch_size", "4"]
    assert fork.main(["run", "--output", "fork", *sizes]) == 78
    assert (
        "lr_schedule.total_tokens counts tokens, and with training.seq_len and training.global_batch_size as they are "
        "now, 4 steps have 256 tokens; these had 512."
    ) in capsys.readouterr().err
    resumed = launch(tmp_path, f"{by_tokens} {shlex.join(sizes)} --job.allow_run_change true", expect=78)
    assert "4 steps have 256 tokens; these had 512" in resumed.said
    stage = "[{at_step = 4, training.global_batch_size = 4}]"
    assert fork.main(["run", "--output", "fork", "--stages", stage]) == 0
    go_on(tmp_path, "--training.steps 6")
    rates = [record["lr"] for record in records(tmp_path / "fork")]
    done = [0, 128, 256, 384, 512, 576]
    assert rates == pytest.approx([1e-2 * (0.1 + 0.9 * (1 + math.cos(math.pi * each / 1200)) / 2) for each in done])


@pytest.mark.parametrize(
    ("script", "words", "is_saved_again"),
    [
        (fork, ["run", "--output", "out"], False),
        (fork, ["run", "--output", "out"], True),
        (export_hf, ["run", "out"], False),
        (export_hf, ["run", "out", "--optimizer"], True),
        (checkpoints, ["average", "run", "out", "--last", "2"], True),
        (checkpoints, ["diff", "run", "run/checkpoints/step-00000004"], False),
        (checkpoints, ["show", "run"], False),
    ],
)
def test_a_run_that_goes_back_meanwhile_is_said_to_have_done_so(
    tmp_path, run, capsys, monkeypatch, script, words, is_saved_again
):
    """A spike moves the checkpoint once its manifest is read; perhaps there soon is another one of its step."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(run, "run")
    newest = step_folder(tmp_path / "run/checkpoints", 8)
    check_files = manifests._check_files

    def leaving(folder, manifest):
        check_files(folder, manifest)
        if manifest.step == 8 and not (tmp_path / "left").exists():
            newest.rename(tmp_path / "left")
            if is_saved_again:
                shutil.copytree(tmp_path / "left", newest)

    monkeypatch.setattr(manifests, "_check_files", leaving)
    assert script.main(words) == 1
    assert "step-00000008 is no longer there: its run has gone back" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_fork_with_biases_of_routers_is_read_before_it_has_trained(tmp_path, monkeypatch):
    """Its first checkpoint has the run's tensors, without biases: they are 0."""
    monkeypatch.chdir(tmp_path)
    words = {**MOE, **LATENT, "model.n_heads": 8, "model.n_experts": 8, "model.router.scoring": "sigmoid"}
    flags = [each for key, value in words.items() for each in (f"--{key}", str(value))]
    assert launch_here(tmp_path, *flags, "--training.steps", "1", "--checkpoint.interval", "1") == 0
    assert fork.main(["run", "--output", "fork", "--model.router.load_balance", "bias"]) == 0
    files = checkpoint_files(step_folder(tmp_path / "fork/checkpoints", 1))
    name = "model.layers.1.mlp.router.bias"
    assert name in files.tensors
    assert files.read(name).equal(torch.zeros(8))
    assert export_hf.main(["fork", "out"]) == 0
    exported = load_file(tmp_path / "out/model.safetensors")
    assert exported["model.layers.1.mlp.gate.e_score_correction_bias"].equal(torch.zeros(8))


@pytest.mark.parametrize(
    "words", [("--optimizer", "--lr_schedule.name", "cosine"), ("--lr_schedule.name", "my_schedule:parabola")]
)
def test_a_key_without_effect_on_an_export_is_refused(tmp_path, capsys, words):
    assert export_hf.main([str(tmp_path), str(tmp_path / "out"), *words]) == 78
    assert "--lr_schedule.name: without effect on an export" in capsys.readouterr().err


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """A run of 8 steps, of two stages and a ramp that is still to come; sources in stages have no weights."""
    folder = tmp_path_factory.mktemp("staged")
    job = folder / "job.toml"
    job.write_text(
        f'base = "{TINY}"\n'
        '[[data.sources]]\nname = "a"\nkind = "synthetic"\n[[data.sources]]\nname = "b"\nkind = "synthetic"\n'
        "[[stages]]\nat_step = 4\noptimizer.lr = 5e-3\n"
        'data.sources = [{ name = "b", kind = "synthetic" }, { name = "c", kind = "synthetic" }]\n'
        "[[stages]]\nat_step = 10\nlr_schedule.total_steps = 9\n"
        'data.sources = [{ name = "c", kind = "synthetic" }, { name = "b", kind = "synthetic" }]\n'
    )
    launch(folder, "--training.steps 8 --checkpoint.interval 2", config=job)
    return folder / "run"


def sources_of_stages(folder):
    """The names of the sources of each stage of a fork."""
    return [[source.name for source in each.config.data.sources] for each in load(str(folder / "config.toml")).stages]


@pytest.mark.parametrize(
    ("step", "without", "expected"),
    [
        (2, "a", [["b"], ["b", "c"], ["c", "b"]]),
        (2, "b", [["a"], ["c"], ["c"]]),
        (6, "b", [["a", "b"], ["c"], ["c"]]),
        (8, "c", [["a", "b"], ["b"], ["b"]]),
    ],
)
def test_a_source_that_is_left_out_does_not_come_back_in_a_stage(tmp_path, staged, step, without, expected):
    fork_of = tmp_path / "fork"
    assert fork.main([str(staged), "--at", str(step), "--without", without, "--output", str(fork_of)]) == 0
    assert sources_of_stages(fork_of) == expected


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--at 6 --without a", "--without a: "),  # its stage is over
        ("--at 6 --without b --without c", "no source of data is left; add others with --stages.0.data.sources"),
        ("--at 6 --optimizer.lr 1e-3", "--optimizer.lr: without effect from step 7 on, where a stage sets it ("),
        ("--at 6 --optimizer.lr 1e-3", "config.toml:"),
        ("--at 4 --optimizer.lr=1e-3", "set it in that stage: --stages.0.optimizer.lr"),
        ("--at 6 --data.sources.0.weight 2", "set it in that stage: --stages.0.data.sources.0.weight"),
    ],
)
def test_what_a_stage_undoes_is_refused(tmp_path, staged, capsys, words, said):
    assert fork.main([str(staged), *words.split(), "--output", str(tmp_path / "fork")]) == 78
    assert said in capsys.readouterr().err


def test_keys_of_the_present_and_of_later_stages_are_changed(tmp_path, staged, capsys):
    words = "--stages.0.optimizer.lr 1e-3 --lr_schedule.min_lr_ratio 0.5"
    assert fork.main([str(staged), "--at", "6", *words.split(), "--output", str(tmp_path / "fork")]) == 0
    said = capsys.readouterr().out
    assert "  optimizer.lr: 0.005 -> 0.001" in said
    assert "  lr_schedule.min_lr_ratio: 0.1 -> 0.5" in said
    assert fork.main([str(staged), "--at", "2", "--optimizer.lr", "1e-3", "--output", str(tmp_path / "early")]) == 0
    assert "  optimizer.lr: 0.01 -> 0.001" in capsys.readouterr().out


def test_the_command_to_train_it_can_be_pasted(tmp_path, run, capsys):
    assert fork.main([str(run), "--output", str(tmp_path / "my fork")]) == 0
    command = capsys.readouterr().out.splitlines()[-1].removeprefix("to train it: ")
    assert shlex.split(command) == ["keel", "train", str(tmp_path / "my fork/config.toml"), "--ranks", "N"]


def test_two_commands_do_not_write_one_fork(tmp_path, run, capsys):
    """The later one would remove what the earlier one has written, whose fork then has a checkpoint without tensors."""
    output = tmp_path / "fork"
    with unfinished_folder(output) as folder:
        (folder / "first").write_text("1")
        assert fork.main([str(run), "--output", str(output)]) == 1
        assert "fork is being written by another command; wait for it" in capsys.readouterr().err
        assert [path.name for path in folder.iterdir()] == ["first"]
        folder.rename(output)
    (tmp_path / "other.tmp" / "left by a killed one").mkdir(parents=True)
    assert fork.main([str(run), "--output", str(tmp_path / "other")]) == 0
    assert not (tmp_path / "other" / "left by a killed one").exists()


def test_a_folder_that_exists_is_left_alone(tmp_path, run, capsys):
    (tmp_path / "fork").mkdir()
    assert fork.main([str(run), "--output", str(tmp_path / "fork")]) == 1
    assert "exists; name another folder with --output" in capsys.readouterr().err
