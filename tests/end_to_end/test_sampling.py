"""keel sample on a real run, as one types it, and as a command after its saves."""

import io
import itertools
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from checkpoint.export.hf_export import export_hf
from checkpoint.manifest import steps_in
from configs.load import load
from scripts import sample as script
from scripts.export.hf_tokenizer import tokenizer_files
from scripts.page.html import page
from scripts.page.recorded import read_run
from tests.end_to_end.launch import ENVIRONMENT, ROOT, TEXT
from trainer.data.tokenizer import load_tokenizer
from trainer.lifecycle import StopRequest
from trainer.run import run

AFTER_SAVE = """[{name = "samples", command = "keel sample {checkpoint} 'import os' '' --max-tokens 9", every = 10}]"""


def train() -> int:
    """Run the text job as one process, in this one and the current folder; returns its exit code."""
    given = ["--training.seq_len", "32", "--checkpoint.interval", "10", "--checkpoint.after_save", AFTER_SAVE]
    try:
        return run(load(str(TEXT), given, 1), StopRequest())
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with a run of 20 steps, sampled after 10 and 20, and its export."""
    folder = tmp_path_factory.mktemp("sampled")
    (folder / "text").mkdir()
    for module in sorted(Path(os.__file__).parent.glob("[a-c]*.py")):
        shutil.copy(module, folder / "text")
    before = Path.cwd()
    os.chdir(folder)
    try:
        assert train() == 0
        tokenizer = tokenizer_files("data/tokenizer.model")
        for name, dtype in (("export", "float32"), ("half", "bfloat16")):
            export_hf(Path("run/checkpoints/step-00000020"), Path(name), tokenizer, dtype)
    finally:
        os.chdir(before)
    return folder


@pytest.fixture(autouse=True)
def there(folder, monkeypatch):
    monkeypatch.chdir(folder)


@pytest.mark.slow
def test_a_run_samples_after_its_saves(folder):
    assert steps_in(Path("run/after_save/samples")) == [10, 20]
    printed = [path.read_text() for path in sorted(Path("run/after_save/samples").glob("*.log"))]
    assert all("\nimport os" in text for text in printed)
    assert printed[0] != printed[1]
    shown = page([read_run(Path("run"), "run")])
    assert "<figcaption>samples, step 20</figcaption>" in shown
    assert shown.count("tokens/s\n</pre>") == 2


# ------------------------------------------------------------------ the command


def sample(capsys, words, code=0):
    """Run the command in this process; returns its standard output and error."""
    assert script.main(shlex.split(words)) == code
    return capsys.readouterr()


def test_run_checkpoint_and_export_give_the_same_text(capsys):
    words = '"import os" --max-tokens 12 --seed 3'
    out, err = sample(capsys, f"run {words}")
    assert out.startswith("import os")
    assert out.endswith("\n")
    assert "run/checkpoints/step-00000020: 43.2 K parameters, float32, on cpu\n" in err
    assert "12 tokens in " in err
    assert " tokens/s\n" in err
    for source in ("run/checkpoints", "run/checkpoints/step-00000020", "export"):
        assert sample(capsys, f"{source} {words}").out == out
    assert sample(capsys, f"run {words} --step 20").out == out
    assert sample(capsys, f"export {words} --tokenizer data/tokenizer.model").out == out
    assert sample(capsys, 'run "import os" --max-tokens 12 --seed 4').out != out
    assert "parameters, bfloat16, on cpu" in sample(capsys, f"run {words} --dtype bfloat16").err
    assert "parameters, bfloat16, on cpu" in sample(capsys, f"half {words}").err


def test_a_text_does_not_depend_on_the_others(capsys, monkeypatch):
    words = "--max-tokens 9 --top-k 50 --top-p 0.95 --seed 1"
    texts = sample(capsys, f'run "import os" "def f(" "" {words}').out.removesuffix("\n").split(script.SEPARATOR)
    assert [text[:6] for text in texts[:2]] == ["import", "def f("]
    assert sample(capsys, f'run "import os" {words}').out == texts[0] + "\n"
    assert sample(capsys, f'run x "def f(" {words} --batch-size 1').out.split(script.SEPARATOR)[1] == texts[1] + "\n"
    Path("prompts").write_text("def f(\n\n")
    assert sample(capsys, f'run "import os" --file prompts {words} --batch-size 2').out == "\n---\n".join(texts) + "\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"import os\ndef f(\n\n")))
    assert sample(capsys, f"run --file - {words}").out == "\n---\n".join(texts) + "\n"


def test_without_a_prompt_a_text_starts_as_a_document(capsys):
    words = "--max-tokens 5 --temperature 0"
    assert sample(capsys, f"run {words}").out == sample(capsys, f'run "" {words}').out


def test_a_text_ends_at_the_models_length(capsys):
    err = sample(capsys, 'run "import os" --temperature 0').err
    tokens = len(load_tokenizer("data/tokenizer.model").encode("import os"))
    assert "the text ended at the model's seq_len, 32 tokens\n" in err
    assert f"{31 - tokens} tokens in" in err


def test_of_a_prompt_that_is_too_long_the_end_is_read(capsys):
    err = sample(capsys, f"run '{'x' * 40}' --max-tokens 20").err
    assert "warning: prompt 1 has 41 tokens, and the model's seq_len is 32; it reads the last 16, so" in err


MISTAKES = {
    "nothing": "nothing: no such folder; name a run (runs/debug), a checkpoint or a Hugging Face folder",
    "text": "text is not a checkpoint (no MANIFEST.json in it), nor a run, nor a Hugging Face folder",
    "empty": "empty has no checkpoint yet; train the run until it saves one, every checkpoint.interval steps and at",
    "run --step 7": "run has no checkpoint of step 7; it has 10, 20",
    "run/checkpoints/step-00000020 --step 20": "is one checkpoint, so --step 20 has no meaning; leave it out, or name "
    "the run",
    "run a NOT_UTF_8": "prompt 2 is not valid UTF-8",
    "run a --suffix b": "leave out --suffix, since a model fills in only what it was trained with",
    "run --file nothing": "nothing can't be read: No such file or directory",
    "run --file blank": "blank is empty; give a prompt on each line",
    "run --file latin": "latin is not valid UTF-8 (at byte 3); convert it",
    "run --device cuda": "--device is cuda, but torch sees no CUDA device here; use auto or cpu",
    "run --tokenizer other.model": "model.vocab_size is 384, but the tokenizer other.model has 400 tokens",
    "changed": "is not the tokenizer that changed was trained with (its hash differs); name that one with --tokenizer",
    "untold": "the job of untold has no tokenizer.path, so its tokens stand for no text",
    "moved": "/nowhere.model, where its job has it; name it with --tokenizer FILE",
    "bare": "bare has no tokenizer, which sampling needs; name one with --tokenizer FILE",
}


@pytest.fixture(scope="module")
def mistakes(folder):
    """What the mistakes above name."""
    from dataclasses import replace

    from checkpoint import manifest as manifests
    from checkpoint.storage import FolderStorage, commit
    from trainer.data.tokenizer import train_sentencepiece

    (folder / "empty").mkdir()
    (folder / "empty" / "config.toml").touch()
    (folder / "blank").touch()
    (folder / "latin").write_bytes(b"abc\xe9\n")
    text = (folder / "text" / "ast.py").read_text()
    train_sentencepiece(iter([text]), folder / "other.model", 400)
    own = folder / "run/checkpoints/step-00000020"
    manifest = manifests.read_manifest(own)
    for name, tokenizer, changes in (
        ("changed", {"path": "data/tokenizer.model"}, {"tokenizer_hash": "0"}),
        ("untold", {"path": None}, {"tokenizer_hash": None}),
        ("moved", {"path": "nowhere.model"}, {}),
    ):
        storage = FolderStorage()
        unfinished = storage.begin(folder / name)
        files = {file: entry for file, entry in manifest.files.items() if file != manifests.TRAINER_NAME}
        for file in files:
            shutil.copy(own / file, unfinished)
        draft = replace(manifest, config=manifest.config | {"tokenizer": tokenizer}, **changes)
        commit(storage, unfinished, folder / name, draft, files, "{}")
    shutil.copytree(folder / "export", folder / "bare", ignore=shutil.ignore_patterns("tokenizer*"))


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_message(capsys, mistakes, words):
    assert script.main(shlex.split(words.replace("NOT_UTF_8", "\udcff"))) in (1, 78)
    out, err = capsys.readouterr()
    assert out == ""
    *before, said = err.splitlines()
    assert said.startswith("error: ")
    assert MISTAKES[words] in said
    assert len(before) <= 1  # the model's


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--top-p 0", "argument --top-p: 0 is not above 0 and at most 1"),
        ("--top-k 0", "argument --top-k: 0 is not a whole number of at least 1"),
        ("--temperature -1", "argument --temperature: -1 is not a number of at least 0"),
        ("--temperature nan", "argument --temperature: nan is not a number of at least 0"),
        ("--seed x", "argument --seed: x is not a whole number of at least 0"),
    ],
)
def test_an_impossible_number_is_a_message(capsys, words, said):
    with pytest.raises(SystemExit) as end:
        script.main(["run", *shlex.split(words)])
    assert end.value.code == 2
    assert said in capsys.readouterr().err


def test_a_damaged_checkpoint_is_a_message(capsys, folder):
    shutil.copytree("run/checkpoints/step-00000020", "damaged")
    (data,) = Path("damaged").glob("*.distcp")
    data.write_bytes(bytes(data.stat().st_size))
    err = sample(capsys, "damaged", code=1).err
    assert "error: checkpoint damaged is damaged: " in err
    assert "Traceback" not in err


class Seen(io.StringIO):
    """Standard output that remembers what a reader has seen after each flush."""

    def __init__(self):
        super().__init__()
        self.states = [""]

    def flush(self):
        self.states.append(self.getvalue())


def test_a_text_grows_token_by_token_and_the_next_one_waits(monkeypatch):
    monkeypatch.setattr(sys, "stdout", seen := Seen())
    assert script.main(["run", "import os", "def f(", "--max-tokens", "10", "--seed", "3"]) == 0
    states = [state for state, before in zip(seen.states[1:], seen.states, strict=False) if state != before]
    assert all(later.startswith(state) for state, later in itertools.pairwise(states))
    growing = [state for state in states if script.SEPARATOR not in state]
    assert len(growing) >= 8
    assert growing[0] == "import os" or len(growing[0]) < 20
    assert "def f(" in states[-1].split(script.SEPARATOR)[1]


@pytest.mark.slow
def test_text_is_streamed_and_a_closed_pipe_ends_it_quietly(folder):
    """A real process, whose output is read while it writes."""
    command = [sys.executable, str(ROOT / "scripts/keel.py"), "sample", "run", "import os", *[""] * 40]
    with subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(9) == b"import os"
        process.stdout.close()
        err = process.stderr.read().decode()
        assert process.wait(300) == 0
    assert "Traceback" not in err
    assert "error" not in err
    assert "tokens/s" not in err


def test_on_a_terminal_control_characters_are_shown_and_not_obeyed(capsys, monkeypatch):
    monkeypatch.setattr(type(sys.stdout), "isatty", lambda _: True, raising=False)
    assert "a\\x1b[2Jb" in sample(capsys, "run $'a\x1b[2Jb' --max-tokens 1").out
