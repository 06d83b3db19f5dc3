"""Preparing: the same bytes whatever the number of processes, kills and launches; nothing half-made is left behind."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from itertools import chain
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.errors import UserError
from scripts.prepare_data import main as prepare_data
from scripts.train_tokenizer import main as train_tokenizer
from tests.preparing import prepare
from trainer.data.text import prepare as module
from trainer.data.text.documents import Piece
from trainer.data.text.prepare import divide
from trainer.data.text.shard import is_validation
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import encode_document, load_tokenizer, train_sentencepiece

ROOT = Path(__file__).resolve().parents[3]
VOCAB = 300
N_FILES = 40


def text_of(i):
    return f"def function_{i}(x):\n    return x + {i}\n" * (20 + i)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """40 source files, one of them empty, and a tokenizer."""
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "text").mkdir()
    for i in range(N_FILES):
        (folder / "text" / f"{i:02d}.py").write_text(text_of(i) if i != 5 else "")
    train_sentencepiece(iter([text_of(0)]), folder / "t.model", VOCAB)
    return folder


@pytest.fixture(autouse=True)
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "MIN_SHARD_BYTES", 4000)


def run(corpus, output, inputs=("text",), **options):
    paths = [str(corpus / name) for name in inputs]
    return prepare(paths, output, corpus / "t.model", **{"validation_fraction": 0.2, **options})


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    """The content that every way of preparing must give."""
    output = tmp_path_factory.mktemp("undisturbed") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "MIN_SHARD_BYTES", 4000)
        run(corpus, output)
    return content(output)


def test_the_folders_hold_every_document_once_in_order(corpus, tmp_path):
    record = run(corpus, tmp_path / "out")
    tokenizer = load_tokenizer(corpus / "t.model")
    texts = [text_of(i) for i in range(N_FILES) if i != 5]
    held_out = [is_validation(text.encode(), 0.2) for text in texts]
    assert 0 < sum(held_out) < len(texts)
    for name, wanted in (("train", False), ("validation", True)):
        chosen = [text for text, held in zip(texts, held_out, strict=True) if held == wanted]
        encoded = [encode_document(tokenizer, text) for text in chosen]
        folder = TokenFolder(tmp_path / "out" / name, VOCAB, tokenizer.hash)
        assert folder.read(0, folder.n_tokens).tolist() == list(chain.from_iterable(encoded))
        lengths = [len(ids) for ids in encoded]
        assert folder.document_starts(0, folder.n_tokens).tolist() == [0, *np.cumsum(lengths)[:-1]]
        assert record[name] == {
            "documents": len(chosen),
            "tokens": sum(lengths),
            "text_bytes": sum(len(text.encode()) for text in chosen),
        }
    assert record["empty_documents"] == 1
    assert json.loads((tmp_path / "out" / "prepare.json").read_text()) == record


def test_any_number_of_processes_gives_the_same_bytes(corpus, tmp_path, undisturbed):
    run(corpus, tmp_path / "out", processes=3)
    assert content(tmp_path / "out") == undisturbed
    assert len(undisturbed) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


KILLED_AFTER_THREE_SHARDS = """
import os, signal, sys
from pathlib import Path
from tests.preparing import prepare
from trainer.data.text import prepare as module

def progress(done, total, message):
    if len(list(Path(output).with_name(".out.partial").glob("reports/*.json"))) >= 3:
        os.kill(os.getpid(), signal.SIGKILL)

if __name__ == "__main__":
    module.MIN_SHARD_BYTES = 4000
    text, output, model, processes = sys.argv[1:]
    choices = {"processes": int(processes), "validation_fraction": 0.2, "progress": progress}
    prepare([text], Path(output), Path(model), **choices)
"""


@pytest.mark.parametrize("processes", [1, 2])
def test_a_kill_costs_only_the_unfinished_shards(corpus, tmp_path, undisturbed, monkeypatch, processes):
    (tmp_path / "killed.py").write_text(KILLED_AFTER_THREE_SHARDS)
    output = tmp_path / "out"
    arguments = [tmp_path / "killed.py", corpus / "text", output, corpus / "t.model", str(processes)]
    killed = subprocess.run([sys.executable, *arguments], env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not output.exists()
    working = tmp_path / ".out.partial"
    finished = sorted(path.stem for path in (working / "reports").glob("*.json"))
    assert len(finished) >= 3
    (working / "output/.prepare.json.1.tmp").write_bytes(b"left by a kill just before the end")
    (working / "output/train/00030.tokens").write_bytes(b"left by a kill just before its report")
    (working / "output/train/00099.tokens").write_bytes(b"left by another division")

    written = []
    write_shard = module.write_shard

    def write_and_note(shard):
        written.append(shard.name)
        return write_shard(shard)

    monkeypatch.setattr(module, "write_shard", write_and_note)
    run(corpus, output)
    assert content(output) == undisturbed
    assert not set(written) & set(finished)
    assert not working.exists()


def stop_after(n):
    """A progress callback that raises at the n-th call, as a signal's handler would."""
    calls = iter(range(n - 1))

    def progress(done, total, message):
        if next(calls, None) is None:
            raise KeyboardInterrupt

    return progress


@pytest.mark.parametrize(("parts", "said"), [(0, "nothing was written"), (2, "the same command resumes from there")])
def test_a_stop_says_whether_the_same_command_resumes(corpus, tmp_path, monkeypatch, capsys, parts, said):
    calls = iter(range(parts))
    write_shard = module.write_shard

    def write_until_stopped(shard):
        if next(calls, None) is None:
            raise KeyboardInterrupt
        return write_shard(shard)

    monkeypatch.setattr(module, "write_shard", write_until_stopped)
    command = [str(corpus / "text"), "--output", str(tmp_path / "out"), "--tokenizer", str(corpus / "t.model")]
    assert prepare_data([*command, "--processes", "1"]) == 130
    assert f"stopped; {said}" in capsys.readouterr().err
    assert (tmp_path / ".out.partial").exists() == bool(parts)


def test_files_that_changed_since_the_stop_are_read_again(corpus, tmp_path):
    (tmp_path / "text").mkdir()
    for i in range(N_FILES):
        (tmp_path / "text" / f"{i:02d}.py").write_text(text_of(i))
    (tmp_path / "t.model").write_bytes((corpus / "t.model").read_bytes())
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, tmp_path / "out", progress=stop_after(8))
    (tmp_path / "text" / "00.py").write_text(text_of(0).replace("x", "y"))
    run(tmp_path, tmp_path / "out")
    run(tmp_path, tmp_path / "anew")
    assert content(tmp_path / "out") == content(tmp_path / "anew")


def test_launches_at_the_same_time_do_not_break_each_other(corpus, tmp_path, undisturbed):
    code = (
        "import sys; from pathlib import Path; from trainer.data.text import prepare as p; p.MIN_SHARD_BYTES = 4000;"
        "from tests.preparing import prepare;"
        "prepare([sys.argv[1]], Path(sys.argv[2]), Path(sys.argv[3]), validation_fraction=0.2)"
    )
    command = [sys.executable, "-c", code, corpus / "text", tmp_path / "out", corpus / "t.model"]
    launches = [subprocess.Popen(command, cwd=ROOT) for _ in range(3)]
    assert [launch.wait(60) for launch in launches] == [0, 0, 0]
    assert content(tmp_path / "out") == undisturbed
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_second_call_does_nothing(corpus, tmp_path, monkeypatch):
    record = run(corpus, tmp_path / "out")
    monkeypatch.setattr(module, "pieces", None)  # it does not read the inputs
    assert run(corpus, tmp_path / "out") == record


@pytest.mark.parametrize("name", ["text", "text/out", "text/deep/er"])
def test_an_output_among_its_inputs_is_refused(corpus, name):
    with pytest.raises(UserError, match=rf"the output .*{name} is in the input folder .*text, .*choose an output out"):
        run(corpus, corpus / name)
    assert not list(corpus.glob("text/**/*out*"))


def copy_of(corpus, folder):
    """The corpus in a folder of its own, to change it."""
    shutil.copytree(corpus / "text", folder / "text")
    shutil.copy(corpus / "t.model", folder)
    return folder


def add(text):
    (text / "new.py").write_text("print(1)\n")


def change(text):
    (text / "01.py").write_text(text_of(1).replace("x", "y"))


def change_unseen(text):
    """Other text of the same size."""
    times = (text / "01.py").stat()
    change(text)
    os.utime(text / "01.py", ns=(times.st_atime_ns, times.st_mtime_ns + 1))


def remove(text):
    (text / "01.py").unlink()


@pytest.mark.parametrize(
    ("act", "words"),
    [(add, "added: .*new.py"), (change, "changed: .*01.py"), (change_unseen, "changed"), (remove, "removed: .*01.py")],
)
def test_other_text_than_what_a_folder_was_made_from_is_noticed(corpus, tmp_path, act, words):
    copy = copy_of(corpus, tmp_path)
    record = run(copy, tmp_path / "out")
    n_bytes = sum(path.stat().st_size for path in (copy / "text").iterdir())
    assert (record["inputs"]["files"], record["inputs"]["bytes"]) == (N_FILES, n_bytes)
    act(copy / "text")
    with pytest.raises(UserError, match=rf"out: was made from other files:\n  {words}(.|\n)*if no run uses this one"):
        run(copy, tmp_path / "out")


def test_text_that_is_only_touched_or_gone_is_no_change(corpus, tmp_path):
    copy = copy_of(corpus, tmp_path)
    record = run(copy, tmp_path / "out")
    os.utime(copy / "text" / "01.py", (1, 1))
    said = []
    assert run(copy, tmp_path / "out", say=said.append) == record
    assert said == []
    shutil.rmtree(copy / "text")
    assert run(copy, tmp_path / "out", say=said.append) == record
    assert "is gone" in said[0]


def test_after_a_failure_the_corrected_command_starts_again(corpus, tmp_path, capsys):
    for name in "ab":
        (tmp_path / f"{name}.jsonl").write_text('{"content": "some text"}\n' * 9)
    command = [*(str(tmp_path / f"{name}.jsonl") for name in "ab"), "--output", str(tmp_path / "out")]
    command += ["--tokenizer", str(corpus / "t.model"), "--processes", "1"]
    assert prepare_data(command) == 1
    said = capsys.readouterr().err
    for name in "ab":
        assert f"{name}.jsonl:1: no text under the key 'text'; the keys are ['content']; --text-key" in said
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.jsonl", "b.jsonl"]
    assert prepare_data([*command, "--text-key", "content"]) == 0
    assert prepare_data([*command, "--text-key", "content"]) == 0
    assert "already there, from the same files and settings; nothing was written" in capsys.readouterr().out


def test_files_that_are_not_text_are_counted(corpus, tmp_path, capsys):
    copy = copy_of(corpus, tmp_path)
    (copy / "text" / "logo.png").write_bytes(b"\0\xff")
    (copy / "text" / ".git").mkdir()
    (copy / "text" / "loop").symlink_to(".")
    command = [str(copy / "text"), "--output", str(tmp_path / "out"), "--tokenizer", str(copy / "t.model")]
    assert prepare_data([*command, "--processes", "1"]) == 0
    said = capsys.readouterr().out
    assert "skipped: 1 binary files (they contain a NUL byte): " in said
    assert "skipped: 1 hidden files" in said
    assert "skipped: 1 folders that a link leads to a second time: " in said
    assert "skipped: 1 empty documents" in said
    assert f"read {N_FILES + 1} files of" in said


@pytest.mark.parametrize("processes", [1, 2])
def test_duplicates_are_dropped_on_request(corpus, tmp_path, processes):
    copy = copy_of(corpus, tmp_path)
    for i in (3, 30):
        (copy / "text" / f"copy of {i}.py").write_text(text_of(i))
    kept = run(copy, tmp_path / "kept")
    record = run(copy, tmp_path / "out", drop_duplicates=True, processes=processes)
    without = run(corpus, tmp_path / "without")
    assert record["duplicates"] == 2
    assert "duplicates" not in kept
    for split in ("train", "validation"):
        assert record[split] == without[split]
        one, other = (TokenFolder(tmp_path / name / split, VOCAB) for name in ("out", "without"))
        assert one.read(0, one.n_tokens).tolist() == other.read(0, other.n_tokens).tolist()
    assert kept["train"]["documents"] + kept["validation"]["documents"] == N_FILES + 1


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=5))
def test_copies_are_found_by_their_first_occurrence(shards):
    seen, expected = set(), []
    for shard in shards:
        expected.append(tuple(i for i, n in enumerate(shard) if n in seen or n in shard[:i]))
        seen |= set(shard)
    assert module.find_duplicates([b"".join(n.to_bytes(16, "big") for n in shard) for shard in shards]) == expected


def test_a_document_of_which_the_tokenizer_leaves_nothing_counts_as_empty(corpus, tmp_path, monkeypatch):
    texts = tmp_path / "x.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("some text", "   ", "more")))

    def stripped(_tokenizer, text):
        return list(text.strip().encode())  # neither BOS nor EOS

    monkeypatch.setattr("trainer.data.text.shard.encode_document", stripped)
    record = prepare([str(texts)], tmp_path / "out", corpus / "t.model")
    assert (record["train"]["documents"], record["empty_documents"]) == (2, 1)
    for share in ("0/3", "1/3", "2/3"):
        words = [str(texts), "--output", str(tmp_path / "shares"), "--tokenizer", str(corpus / "t.model")]
        assert prepare_data([*words, "--processes", "1", "--shard", share]) == 0
    assert prepare_data([*words, "--processes", "1", "--finish"]) == 0
    assert content(tmp_path / "shares" / "train") == content(tmp_path / "out" / "train")


def test_copies_of_which_the_tokenizer_leaves_nothing_count_as_empty_in_shares_as_without(
    corpus, tmp_path, monkeypatch
):
    texts = tmp_path / "x.jsonl"
    texts.write_text("".join(json.dumps({"text": text}) + "\n" for text in ("some", "  ", "  ", "some", "more")))
    monkeypatch.setattr("trainer.data.text.shard.encode_document", lambda _, text: list(text.strip().encode()))
    words = [str(texts), "--tokenizer", str(corpus / "t.model"), "--drop-duplicates", "--processes", "1", "--output"]
    assert prepare_data([*words, str(tmp_path / "out")]) == 0
    for step in (["--shard", "0/1"], ["--finish"]):
        assert prepare_data([*words, str(tmp_path / "shares"), *step]) == 0
    records = [json.loads((tmp_path / name / "prepare.json").read_text()) for name in ("out", "shares")]
    assert [(each["empty_documents"], each["duplicates"]) for each in records] == [(2, 1), (2, 1)]


def test_a_separator_gives_documents(corpus, tmp_path):
    (tmp_path / "x.txt").write_text("one\n<|end|>two\n<|end|>three")
    options = {"inputs": (tmp_path / "x.txt",), "validation_fraction": 0.0}
    assert run(corpus, tmp_path / "whole", **options)["train"]["documents"] == 1
    assert run(corpus, tmp_path / "cut", separator="<|end|>", **options)["train"]["documents"] == 3


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"validation_fraction": 0.1}, "validation_fraction: 0.2 then, 0.1 now"),
        ({"text_key": "body"}, "text_key: 'text' then, 'body' now"),
        ({"inputs": ("text/01.py",)}, "inputs: .*01.py"),
    ],
)
@pytest.mark.parametrize("is_finished", [True, False])
def test_other_settings_are_refused_instead_of_mixed(corpus, tmp_path, change, words, is_finished):
    if is_finished:
        run(corpus, tmp_path / "out")
    else:
        with pytest.raises(KeyboardInterrupt):
            run(corpus, tmp_path / "out", progress=stop_after(5))
    with pytest.raises(UserError, match=rf"out.*other settings(.|\n)*{words}"):
        run(corpus, tmp_path / "out", **change)


def test_another_tokenizer_is_refused(corpus, tmp_path):
    run(corpus, tmp_path / "out")
    train_sentencepiece(iter([text_of(1)]), tmp_path / "other.model", VOCAB)
    with pytest.raises(UserError, match="tokenizer_hash"):
        prepare([str(corpus / "text")], tmp_path / "out", tmp_path / "other.model", validation_fraction=0.2)


def test_a_folder_of_something_else_is_left_alone(corpus, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "thesis.txt").write_text("precious")
    with pytest.raises(UserError, match=r"out: exists but is not a folder of prepared text"):
        run(corpus, tmp_path / "out")
    assert content(tmp_path) == {"out/thesis.txt": b"precious"}


def test_the_budget_of_bad_files(corpus, tmp_path):
    bad = tmp_path / "bad"
    bad.mkdir()
    for i in range(3):
        (bad / f"{i}.py").write_bytes(b"\xff" * 3000)
    options = {"inputs": ("text", bad), "processes": 2}
    with pytest.raises(UserError, match=r"3 unreadable .* 2 allowed .*max_bad_files") as caught:
        run(corpus, tmp_path / "out", **options, max_bad_files=2)
    assert all(f"{bad}/{i}.py: not UTF-8" in str(caught.value) for i in range(3))
    assert not (tmp_path / "out").exists()
    record = run(corpus, tmp_path / "out", **options, max_bad_files=3)
    assert record["bad_files"] == [f"{bad}/{i}.py: not UTF-8 at byte 0" for i in range(3)]
    with pytest.raises(UserError, match="1 allowed"):
        run(corpus, tmp_path / "out", **options, max_bad_files=1)


def test_a_file_that_may_not_be_read_is_one_of_them(corpus, tmp_path, monkeypatch):
    copy = copy_of(corpus, tmp_path)
    for module_or_class in (os, Path):
        _refuse_to_open(copy / "text" / "01.py", module_or_class, monkeypatch)
    refused = [f"{copy}/text/01.py: Permission denied"]
    for _ in range(2):  # the second compares
        assert run(copy, tmp_path / "out", max_bad_files=1)["bad_files"] == refused


def _refuse_to_open(path, module_or_class, monkeypatch):
    """Fail to open a file, as if its permissions did not allow it, which does not stop root."""
    real = module_or_class.open

    def call(opened, *arguments, **options):
        if opened == path:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return real(opened, *arguments, **options)

    monkeypatch.setattr(module_or_class, "open", call)


def test_a_pattern_that_matches_the_output_is_no_change(corpus, tmp_path, monkeypatch):
    copy = copy_of(corpus, tmp_path)
    record = run(copy, copy / "text" / "out", inputs=("text/*",))
    assert run(copy, copy / "text" / "out", inputs=("text/*",)) == record
    monkeypatch.chdir(copy)
    arguments = ["text/*"], Path("text/more"), copy / "t.model"
    shutil.rmtree(copy / "text" / "out")
    assert prepare(*arguments) == prepare(*arguments)
    (copy / "text" / "more.py").write_text("new")
    with pytest.raises(UserError, match=r"added: text/more\.py\n"):
        prepare(*arguments)


@pytest.mark.parametrize(
    ("inputs", "words"),
    [(("empty",), "no text"), (("text/05.py",), "no text"), (("text/01.py",), "leaves none"), (("gone",), "no such")],
)
@pytest.mark.parametrize("drop_duplicates", [False, True])
def test_inputs_that_give_no_tokens_leave_nothing_behind(corpus, tmp_path, inputs, words, drop_duplicates):
    (corpus / "empty").mkdir(exist_ok=True)
    with pytest.raises(UserError, match=words):
        run(corpus, tmp_path / "out", inputs=inputs, drop_duplicates=drop_duplicates)
    assert list(tmp_path.iterdir()) == []


def test_an_output_that_cannot_be_written_is_named(corpus, tmp_path):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UserError, match=r"Not a directory|File exists"):
        run(corpus, tmp_path / "file" / "out")


def test_a_full_disk_is_an_error_of_the_output_and_leaves_no_half_of_it(corpus, tmp_path, monkeypatch):
    def full(descriptor):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r".json: No space left on device, while preparing .*/out$"):
        run(corpus, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.rglob("*.tokens*"))


def die(shard):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_killed_process_is_reported(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "write_shard", die)
    with pytest.raises(UserError, match=r"was killed .*Run the same command again"):
        run(corpus, tmp_path / "out", processes=2)
    assert not (tmp_path / "out").exists()


def test_without_a_fraction_there_is_no_validation_folder(corpus, tmp_path):
    run(corpus, tmp_path / "out", validation_fraction=0.0)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["inputs.jsonl", "prepare.json", "train"]


def test_progress_goes_up_to_all_bytes(corpus, tmp_path):
    seen = []
    run(corpus, tmp_path / "out", progress=lambda *args: seen.append(args))
    done = [call[0] for call in seen]
    assert done == sorted(done)
    assert seen[-1][0] == seen[-1][1] == sum(path.stat().st_size for path in (corpus / "text").iterdir())
    assert len(seen) > 10


def test_a_large_corpus_gives_a_bounded_number_of_even_files():
    parts = [Piece("jsonl", "x", i, i + 1, 8 << 20) for i in range(5000)] + [Piece("file", "y", 0, 1, 3)]
    portions = divide(parts)
    assert list(chain.from_iterable(portions)) == parts
    assert len(portions) <= 256
    sizes = [sum(part.n_bytes for part in portion) for portion in portions[:-1]]
    assert max(sizes) <= 1.1 * min(sizes)


def test_validation_takes_its_share():
    share = sum(is_validation(str(i).encode(), 0.1) for i in range(20_000)) / 20_000
    assert abs(share - 0.1) < 0.01
    assert not any(is_validation(str(i).encode(), 0.0) for i in range(1000))


def test_the_two_commands(corpus, tmp_path, capsys):
    tokenizer, output = str(tmp_path / "t.model"), tmp_path / "out"
    assert train_tokenizer([str(corpus / "text"), "--output", tokenizer, "--vocab-size", str(VOCAB)]) == 0
    command = [str(corpus / "text"), "--output", str(output), "--tokenizer", tokenizer, "--processes", "1"]
    assert prepare_data([*command, "--validation-fraction", "0.2"]) == 0
    said = capsys.readouterr()
    n_tokens = TokenFolder(output / "train", VOCAB).n_tokens
    assert f"{n_tokens:,} tokens" in said.out
    assert prepare_data(command) == 1
    assert "validation_fraction: 0.2 then, 0.0 now" in (said := capsys.readouterr()).err
    assert "Traceback" not in said.err


def test_too_few_pieces_are_refused_without_an_option_that_does_not_exist(corpus, tmp_path, capsys):
    words = [str(corpus / "text"), "--output", str(tmp_path / "t.model"), "--vocab-size", "100"]
    assert train_tokenizer(words) == 1
    said = capsys.readouterr().err
    assert "at least 259" in said
    assert "character_coverage" not in said


@pytest.mark.parametrize("script", ["prepare_data.py", "train_tokenizer.py"])
def test_the_scripts_run_from_any_folder(tmp_path, script):
    done = subprocess.run([sys.executable, ROOT / "scripts" / script, "--help"], cwd=tmp_path, capture_output=True)
    assert done.returncode == 0
    assert b"python_stdlib" in done.stdout


def test_the_workers_do_not_import_torch():
    code = "import sys, trainer.data.text.prepare; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
