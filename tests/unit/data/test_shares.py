"""Shares of a preparation: the bytes of one process, whatever is killed, done twice, missing or changed."""

import gzip
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from scripts.prepare_data import main as prepare_data
from tests.preparing import call_of, prepare
from trainer.data.text import documents, finish, hub, shares
from trainer.data.text import prepare as module
from trainer.data.text import shard as shard_module
from trainer.data.text.plan import make_plan
from trainer.data.text.shares import make_share
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import train_sentencepiece

ROOT = Path(__file__).resolve().parents[3]
VOCAB = 300


def text_of(i):
    return f"def function_{i}(x):\n    return x + {i}\n" * (5 + i)


@contextmanager
def small_parts(piece_bytes=300):
    """Pieces, token files and ranges of hashes so small that a few texts have several, and at most five token files."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(documents, "PIECE_BYTES", piece_bytes)
        patch.setattr(module, "MIN_SHARD_BYTES", 1000)
        patch.setattr(module, "MAX_SHARDS", 5)
        patch.setattr(finish, "RANGE_DOCUMENTS", 4)
        yield


@pytest.fixture(autouse=True)
def small():
    with small_parts():
        yield


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokenizer") / "t.model"
    train_sentencepiece(iter([text_of(9)]), path, VOCAB)
    return path


def write_corpus(folder):
    """Source files and records, with copies of texts in both, and an empty text."""
    (folder / "text").mkdir()
    for i in range(12):
        (folder / "text" / f"{i:02d}.py").write_text(text_of(i) if i != 5 else "")
    lines = [json.dumps({"text": text_of(i % 15)}) for i in range(30)]
    (folder / "records.jsonl").write_text("\n".join(lines))
    return [str(folder / "text"), str(folder / "records.jsonl")]


def one(inputs, output, tokenizer, **options):
    return prepare(inputs, output, tokenizer, **{"validation_fraction": 0.2, **options})


def call(inputs, output, tokenizer, **options):
    return call_of(inputs, output, tokenizer, **{"validation_fraction": 0.2, **options})


def many(n, *arguments, order=None, **options):
    """Do all shares, in any order, and the end."""
    for share in order or range(n):
        make_share(call(*arguments, **options), share, n)
    return finish.finish(call(*arguments, **options))


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------- equal bytes


TEXTS = st.one_of(
    st.sampled_from(["", "a", "a\n", "copied text " * 5, "<u>hi<a>answer<e>more", "<a>", "\N{SNOWMAN}" * 40]),
    st.text(alphabet="ab \n<u>", max_size=40),
    st.integers(400, 6000).map(lambda size: "huge " * (size // 5)),
)
FILES = st.tuples(st.sampled_from(["x.txt", "x.jsonl", "x.jsonl.gz", "x.json"]), st.lists(TEXTS, max_size=12))
OPTIONS = st.fixed_dictionaries(
    {
        "validation_fraction": st.sampled_from([0.0, 0.3]),
        "drop_duplicates": st.booleans(),
        "pack": st.sampled_from([None, 16]),
        "mask_until": st.sampled_from([None, "<a>"]),
        "separator": st.just("~"),
    }
)


def write_file(path, texts):
    if path.suffix == ".txt":
        path.write_text("~".join(texts))
    elif path.suffix == ".json":
        path.write_text(json.dumps([{"text": text} for text in texts]))
    else:
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(lines, mtime=0) if path.suffix == ".gz" else lines)


def outcome(work, output):
    """The bytes that are written, or the error."""
    try:
        work()
    except UserError as error:
        return str(error)
    return content(output)


@pytest.mark.slow
@settings(max_examples=20)
@given(
    st.lists(FILES, min_size=1, max_size=5),
    OPTIONS,
    st.data(),
)
def test_any_number_of_shares_in_any_order_gives_the_bytes_of_one_process(
    tmp_path_factory, tokenizer, files, options, data
):
    folder = tmp_path_factory.mktemp("property")
    (folder / "in").mkdir()
    inputs = []
    for number, (name, texts) in enumerate(files):
        inputs.append(str(folder / "in" / f"{number}{name}"))
        write_file(Path(inputs[-1]), texts)
    n = data.draw(st.integers(1, sum(len(texts) for _, texts in files) + 3), "shares")
    order = data.draw(st.permutations(range(n)), "order")
    again = data.draw(st.lists(st.integers(0, n - 1), max_size=2), "done again")
    with small_parts():
        expected = outcome(lambda: prepare(inputs, folder / "out", tokenizer, **options), folder / "out")
        if isinstance(expected, dict):
            shutil.move(folder / "out", folder / "one")
        arguments = (inputs, folder / "out", tokenizer)
        found = outcome(lambda: many(n, *arguments, order=order + again, **options), folder / "out")
    assert found == expected
    left = {path.name for path in folder.iterdir()} - {"in", "out", "one"}
    assert left == set()
    shutil.rmtree(folder)


@pytest.mark.parametrize(("n", "processes"), [pytest.param(2, 2, marks=pytest.mark.slow), (3, 1), (40, 1)])
def test_duplicates_and_windows_across_shares(tmp_path, tokenizer, n, processes):
    inputs = write_corpus(tmp_path)
    options = {"drop_duplicates": True, "pack": 64}
    one(inputs, tmp_path / "one", tokenizer, **options)
    many(n, inputs, tmp_path / "out", tokenizer, processes=processes, **options)
    assert content(tmp_path / "out") == content(tmp_path / "one")
    record = json.loads((tmp_path / "out" / "prepare.json").read_text())
    assert record["duplicates"] == 26  # of 42 texts, one is empty, and 15 differ
    assert record["empty_documents"] == 1


@pytest.mark.slow
def test_shares_that_run_at_the_same_time_make_one_plan(tmp_path, tokenizer):
    inputs = write_corpus(tmp_path)
    code = (
        "import sys; from pathlib import Path; from scripts.prepare_data import main;"
        "from trainer.data.text import prepare as p; p.MIN_SHARD_BYTES = 1000; p.MAX_SHARDS = 5; main(sys.argv[1:])"
    )
    words = [*inputs, "--output", str(tmp_path / "out"), "--tokenizer", str(tokenizer), "--processes", "1"]
    started = [
        subprocess.Popen([sys.executable, "-c", code, *words, "--shard", f"{share}/3"], cwd=ROOT) for share in range(3)
    ]
    assert [process.wait(120) for process in started] == [0, 0, 0]
    done = subprocess.run([sys.executable, "-c", code, *words, "--finish"], cwd=ROOT, check=False)
    assert done.returncode == 0
    with small_parts(8 << 20):
        one(inputs, tmp_path / "one", tokenizer, validation_fraction=0.0)
    assert content(tmp_path / "out") == content(tmp_path / "one")


@pytest.mark.parametrize("n", [2, 8])
def test_of_two_calls_of_one_share_the_later_does_it_and_the_earlier_says_so(tmp_path, tokenizer, monkeypatch, n):
    """The later begins in the middle of a document of the earlier one; 8: a token file's pieces are divided."""
    inputs = write_corpus(tmp_path)
    output = tmp_path / "out"
    one(inputs, tmp_path / "one", tokenizer)
    documents_of = shares.documents_of
    later = []

    def documents_and_another_call(shard, bad):
        for number, document in enumerate(documents_of(shard, bad)):
            if number == 1 and not later:
                later.append(None)
                later.append(make_share(call(inputs, output, tokenizer), 0, n))
            yield document

    monkeypatch.setattr(shares, "documents_of", documents_and_another_call)
    monkeypatch.setattr(shard_module, "documents_of", documents_and_another_call)
    with pytest.raises(UserError, match=f"another call of shard 0/{n} has begun after this one, and does its work"):
        make_share(call(inputs, output, tokenizer), 0, n)
    assert later[1] == (len(list((tmp_path / ".out.shards").rglob("0*.json"))), 0)
    for share in range(1, n):
        make_share(call(inputs, output, tokenizer), share, n)
    finish.finish(call(inputs, output, tokenizer))
    assert content(output) == content(tmp_path / "one")


# ------------------------------------------------------------------------------------------- lost workers


KILLED_IN_A_DOCUMENT = """
import os, signal, sys
from pathlib import Path
from trainer.data.text import documents, prepare, shard, shares
from trainer.data.text.plan import make_plan

def encode_and_die(own, text, is_held_out, encode=shard.encode, calls=iter(range(1000))):
    if next(calls) == int(sys.argv[5]):
        os.kill(os.getpid(), signal.SIGKILL)
    return encode(own, text, is_held_out)

documents.PIECE_BYTES = 300
prepare.MIN_SHARD_BYTES = 1000
prepare.MAX_SHARDS = 5
shard.encode = shares.encode = encode_and_die
text, records, output, model = sys.argv[1:5]
options = {"validation_fraction": 0.2, "drop_duplicates": sys.argv[6] == "True"}
settings = prepare.settings_of([text, records], Path(output), Path(model), **options)
shares.make_share(prepare.Call(settings, Path(output), Path(model)), 0, 2)
"""


@pytest.mark.slow
@pytest.mark.parametrize("drop_duplicates", [False, True])
def test_a_worker_killed_in_mid_shard_costs_the_unfinished_part(tmp_path, tokenizer, monkeypatch, drop_duplicates):
    inputs = write_corpus(tmp_path)
    options = {"drop_duplicates": drop_duplicates}
    one(inputs, tmp_path / "one", tokenizer, **options)
    (tmp_path / "killed.py").write_text(KILLED_IN_A_DOCUMENT)
    words = [*inputs, str(tmp_path / "out"), str(tokenizer), "20", str(drop_duplicates)]
    command = [sys.executable, str(tmp_path / "killed.py"), *words]
    killed = subprocess.run(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=False)
    assert killed.returncode == -signal.SIGKILL
    working = tmp_path / ".out.shards"
    assert list(working.glob("unfinished.00000.*/*/.*.tmp"))  # half a file
    finished = {path.stem for path in [*working.glob("reports/*.json"), *working.glob("raw/*.json")]}
    assert finished
    make_share(call(inputs, tmp_path / "out", tokenizer, **options), 1, 2)
    with pytest.raises(UserError, match=r"1 of 2 shards are not finished: 0\. Run each of them as --shard I/2"):
        finish.finish(call(inputs, tmp_path / "out", tokenizer, **options))

    made = []
    make = shares._make
    monkeypatch.setattr(shares, "_make", lambda shard: (made.append(shard.name), make(shard)))
    make_share(call(inputs, tmp_path / "out", tokenizer, **options), 0, 2)
    assert made
    assert not set(made) & finished
    assert not list(working.glob("unfinished.*"))
    finish.finish(call(inputs, tmp_path / "out", tokenizer, **options))
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_an_end_that_was_killed_is_done_again(tmp_path, tokenizer, monkeypatch):
    inputs = write_corpus(tmp_path)
    one(inputs, tmp_path / "one", tokenizer, drop_duplicates=True)
    arguments = (inputs, tmp_path / "out", tokenizer)
    for share in range(3):
        make_share(call(*arguments, drop_duplicates=True), share, 3)
    keep = finish.keep
    kept = []

    def keep_and_stop(shard, report):
        if len(kept) == 2:
            raise KeyboardInterrupt
        keep(shard, report)
        kept.append(shard.name)

    monkeypatch.setattr(finish, "keep", keep_and_stop)
    with pytest.raises(KeyboardInterrupt):
        finish.finish(call(*arguments, drop_duplicates=True))
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(finish, "keep", lambda shard, report: (keep(shard, report), kept.append(shard.name)))
    finish.finish(call(*arguments, drop_duplicates=True))
    assert len(kept) == len(set(kept)) == 5
    assert content(tmp_path / "out") == content(tmp_path / "one")


# ------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("before", ["rename", "rmtree"])
def test_an_end_that_was_killed_while_it_removed_its_work_removes_it_the_next_time(
    tmp_path, tokenizer, monkeypatch, before
):
    words = [*write_corpus(tmp_path), "--output", str(tmp_path / "out"), "--tokenizer", str(tokenizer)]
    assert prepare_data([*words, "--shard", "0/1"]) == 0

    def killed(*_):
        raise SystemExit

    where = (finish, "discard") if before == "rename" else (module.shutil, "rmtree")
    with monkeypatch.context() as patch:
        patch.setattr(*where, killed)
        with pytest.raises(SystemExit):
            prepare_data([*words, "--finish"])
    others = {tmp_path / ".out.shards.1.partial", tmp_path / "1"}  # the first: of the output "out.shards.1"
    for other in others:
        other.mkdir()
    expected = {*tmp_path.iterdir()} - {*tmp_path.glob(".out.shards*")} | others
    assert {*tmp_path.iterdir()} != expected
    assert prepare_data([*words, "--finish"]) == 0
    assert {*tmp_path.iterdir()} == expected


def test_an_end_before_all_shares_names_those_that_are_missing_and_changes_nothing(tmp_path, tokenizer):
    inputs = write_corpus(tmp_path)
    arguments = (inputs, tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match=r"\.out\.shards: no shards are there; make them with --shard 0/N"):
        finish.finish(call(*arguments))
    assert not (tmp_path / ".out.shards").exists()
    for share in (0, 2, 6):
        make_share(call(*arguments), share, 8)
    before = content(tmp_path / ".out.shards")
    with pytest.raises(
        UserError, match=r"5 of 8 shards are not finished: 1,3-5,7\. Run .*--shard I/8 .* --finish again"
    ):
        finish.finish(call(*arguments))
    assert content(tmp_path / ".out.shards") == before | {"lock": b""}
    for share in (1, 3, 4, 5, 7):
        make_share(call(*arguments), share, 8)
    finish.finish(call(*arguments))
    one(inputs, tmp_path / "one", tokenizer)
    assert content(tmp_path / "out") == content(tmp_path / "one")
    assert make_share(call(*arguments), 3, 8) is None
    assert finish.finish(call(*arguments)) == json.loads((tmp_path / "one" / "prepare.json").read_text())
    assert not (tmp_path / ".out.shards").exists()


@pytest.mark.parametrize(
    ("change", "n", "words"),
    [
        ({"validation_fraction": 0.1}, 4, "made with other settings:\n  validation_fraction: 0.2 then, 0.1 now"),
        ({"drop_duplicates": True}, 4, "drop_duplicates: False then, True now"),
        ({"mask_until": "x"}, 4, "mask_until: None then, 'x' now"),
        ({}, 5, "the work is divided into 4 shards, --shard I/4, not 5"),
    ],
)
def test_other_options_are_refused_by_a_share_and_at_the_end(tmp_path, tokenizer, change, n, words):
    arguments = (write_corpus(tmp_path), tmp_path / "out", tokenizer)
    for share in range(4):
        make_share(call(*arguments), share, 4)
    with pytest.raises(UserError, match=rf"{words}(.|\n)*To begin again with all shards, delete .*\.out\.shards"):
        make_share(call(*arguments, **change), 2, n)
    if change:
        with pytest.raises(UserError, match=words):
            finish.finish(call(*arguments, **change))
    finish.finish(call(*arguments))


def add(folder):
    (folder / "text" / "new.py").write_text("print(1)\n")


def remove(folder):
    (folder / "text" / "01.py").unlink()


def grow(folder):
    with (folder / "records.jsonl").open("a") as file:
        file.write('\n{"text": "one more"}\n')


@pytest.mark.parametrize(
    ("act", "words"), [(add, "added: .*new.py"), (remove, "removed: .*01.py"), (grow, "changed: .*records.jsonl")]
)
def test_other_files_than_planned_are_named_at_the_end(tmp_path, tokenizer, act, words):
    arguments = (write_corpus(tmp_path), tmp_path / "out", tokenizer)
    for share in range(3):
        make_share(call(*arguments), share, 3)
    act(tmp_path)
    with pytest.raises(UserError, match=rf"no longer those .*:\n  {words}\nRestore them. To begin again .* delete"):
        finish.finish(call(*arguments))
    assert not (tmp_path / "out").exists()


def test_a_share_notices_a_file_of_another_size_before_it_works(tmp_path, tokenizer):
    arguments = (write_corpus(tmp_path), tmp_path / "out", tokenizer)
    make_share(call(*arguments), 0, 2)
    grow(tmp_path)
    with pytest.raises(UserError, match=r"changed: .*records\.jsonl"):
        make_share(call(*arguments), 1, 2)


@pytest.mark.parametrize("drop_duplicates", [False, True])
@pytest.mark.parametrize("n", [2, 30])
def test_content_that_changed_between_the_shares_is_found_and_only_its_shares_are_done_again(
    tmp_path, tokenizer, n, drop_duplicates
):
    inputs = write_corpus(tmp_path)
    arguments = (inputs, tmp_path / "out", tokenizer)
    options = {"drop_duplicates": drop_duplicates}
    stamp = os.stat(inputs[1])
    make_share(call(*arguments, **options), 0, n)
    path = Path(inputs[1])
    path.write_text(path.read_text().replace("return x", "return y"))
    os.utime(path, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))  # a time does not tell it
    for share in range(1, n):
        make_share(call(*arguments, **options), share, n)
    if n == 2:  # share 0 has examined the records, or made a part of them
        with pytest.raises(
            UserError, match=r"records.jsonl: changed while the shards were made. Run shards 0-?,?1 of 2"
        ):
            finish.finish(call(*arguments, **options))
        for share in range(n):
            make_share(call(*arguments, **options), share, n)
    finish.finish(call(*arguments, **options))
    one(inputs, tmp_path / "one", tokenizer, **options)
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_a_file_that_is_only_touched_is_not_read_again(tmp_path, tokenizer):
    inputs = write_corpus(tmp_path)
    arguments = (inputs, tmp_path / "out", tokenizer)
    assert make_share(call(*arguments), 0, 2) == (3, 0)
    for path in (tmp_path / "text").iterdir():
        os.utime(path, (1, 1))
    assert make_share(call(*arguments), 0, 2) == (0, 3)


def test_unreadable_files_are_named_by_the_share_that_examines_them(tmp_path, tokenizer):
    inputs = write_corpus(tmp_path)
    (tmp_path / "text" / "00.py").write_bytes(b"\xff" * 50)
    arguments = (inputs, tmp_path / "out", tokenizer)
    with pytest.raises(UserError, match=r"00.py: not UTF-8 at byte 0(.|\n)*--max-bad-files"):
        make_share(call(*arguments), 0, 2)
    make_share(call(*arguments), 1, 2)
    make_share(call(*arguments, max_bad_files=1), 0, 2)
    with pytest.raises(UserError, match=r"00\.py"):
        finish.finish(call(*arguments))
    finish.finish(call(*arguments, max_bad_files=1))
    one(inputs, tmp_path / "one", tokenizer, max_bad_files=1)
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_a_dataset_of_the_hub_is_read_by_all_shares_at_the_commit_of_the_plan(tmp_path, tokenizer, monkeypatch):
    commits = ["a" * 40]

    def load_dataset(name, config, split, streaming, revision):
        rows = [[{"text": f"{revision[0]} {i} {shard} " * 9} for i in range(8)] for shard in range(3)]
        return SimpleNamespace(num_shards=3, shard=lambda num_shards, index: rows[index])

    api = SimpleNamespace(dataset_info=lambda name, revision: SimpleNamespace(sha=commits[-1]))
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=lambda: api))
    monkeypatch.setattr(documents, "HUB_PIECE_BYTES", 500)
    inputs = [*write_corpus(tmp_path), "hub:us/text"]
    hub._commit.cache_clear()
    one(inputs, tmp_path / "one", tokenizer)
    make_share(call(inputs, tmp_path / "out", tokenizer), 0, 2)
    commits.append("b" * 40)
    hub._commit.cache_clear()
    make_share(call(inputs, tmp_path / "out", tokenizer), 1, 2)
    finish.finish(call(inputs, tmp_path / "out", tokenizer))
    hub._commit.cache_clear()
    assert content(tmp_path / "out") == content(tmp_path / "one")
    assert json.loads((tmp_path / "out" / "prepare.json").read_text())["read_from"][2] == f"hub:us/text@{'a' * 40}"


# ------------------------------------------------------------------------------------------- the division


@pytest.mark.parametrize("n", [1, 3, 5, 6, 13, 65_536])
def test_each_piece_belongs_to_one_share(tmp_path, tokenizer, n):
    make_plan(own := call(write_corpus(tmp_path), tmp_path / "out", tokenizer), n)
    plan = shares.read_plan(own)
    every = [shard for i in range(len(plan.portions)) for shard in plan.shards(own, i)]
    assert [piece for shard in every for piece in shard.pieces] == [piece for own in plan.portions for piece in own]
    owners = {shard.name: plan.share_of(shard) for shard in every}
    for share in [*sorted(set(owners.values()))[-6:], 0, n - 1]:
        mine = {name for name, owner in owners.items() if owner == share}
        assert {shard.name for shard in plan.of_share(own, share)} == mine


@given(st.lists(st.lists(st.integers(0, 6), max_size=8), min_size=1, max_size=5))
def test_copies_are_found_range_by_range(tmp_path_factory, parts):
    """Against the search of one process."""
    folder = tmp_path_factory.mktemp("hashes")
    digests = [
        b"".join(np.uint64([2**64 - 1 if n == 6 else n * 2**61, n % 2]).tobytes() for n in part) for part in parts
    ]
    expected = module.find_duplicates(digests)
    raws = []
    for number, (part, own) in enumerate(zip(parts, digests, strict=True)):
        (folder / f"{number}.hashes").write_bytes(shares._sorted_hashes(own).tobytes())
        (folder / f"{number}.json").write_text(json.dumps({"documents": len(part)}))
        raws.append(SimpleNamespace(folder=folder, name=str(number), report_path=folder / f"{number}.json"))
    with small_parts():
        finish._mark_copies(SimpleNamespace(processes=1, progress=lambda *_: None), raws)
    for number, (part, copies) in enumerate(zip(parts, expected, strict=True)):
        if part:
            assert np.flatnonzero(np.fromfile(folder / f"{number}.copies", np.uint8)).tolist() == list(copies)


# ------------------------------------------------------------------------------------------- the command


def test_the_command_line(tmp_path, tokenizer, capsys):
    inputs = write_corpus(tmp_path)
    words = [*inputs, "--tokenizer", str(tokenizer), "--processes", "1", "--drop-duplicates"]
    words += ["--validation-fraction", "0.2", "--output", str(tmp_path / "out")]
    assert prepare_data([*words, "--finish"]) == 1
    assert "no shards are there" in capsys.readouterr().err
    for share in range(2):
        assert prepare_data([*words, "--shard", f"{share}/2"]) == 0
        said = capsys.readouterr().out
        assert f"shard {share}/2: finished; of its parts, " in said
        assert f"Shard {share}/2 ..." in said
    assert prepare_data([*words, "--finish"]) == 0
    n_tokens = TokenFolder(tmp_path / "out" / "train", VOCAB).n_tokens
    assert f"{n_tokens:,} tokens" in capsys.readouterr().out
    for last in (["--shard", "1/2"], ["--finish"]):
        assert prepare_data([*words, *last]) == 0
        assert "already there" in capsys.readouterr().out
    one(inputs, tmp_path / "one", tokenizer, drop_duplicates=True)
    assert content(tmp_path / "out") == content(tmp_path / "one")


def test_without_ray_one_line_says_how_to_get_it(tmp_path, tokenizer, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    words = [*write_corpus(tmp_path), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
    assert prepare_data([*words, "--ray", "auto"]) == 1
    assert "--ray: shards as tasks of Ray need the package ray; install it: pip install ray" in capsys.readouterr().err


def test_an_address_of_ray_from_the_environment_is_tried_first(tmp_path, tokenizer, capsys, monkeypatch):
    """Ray itself would try for many minutes."""
    monkeypatch.setitem(sys.modules, "ray", types.ModuleType("ray"))
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    words = [*write_corpus(tmp_path), "--tokenizer", str(tokenizer), "--output", str(tmp_path / "out")]
    assert prepare_data([*words, "--ray", "auto"]) == 1
    assert "error: RAY_ADDRESS 127.0.0.1:1: not HOST:PORT of a cluster of Ray that runs (" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["2/2", "0/0", "-1/2", "1", "1/65537", "a/b", "1/2/3"])
def test_a_shard_that_cannot_be_is_refused(text, capsys):
    with pytest.raises(SystemExit):
        prepare_data(["x", "--output", "y", "--tokenizer", "z", f"--shard={text}"])
    assert f"{text} is not I/N with I from 0 to N-1, and N up to 65,536" in capsys.readouterr().err
