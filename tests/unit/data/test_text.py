"""Text sources: every document once and in order, however it is laid out; what cannot be read is named."""

import bz2
import codecs
import csv
import gzip
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from trainer.data.text import documents as module
from trainer.data.text.bad_files import BINARY, HIDDEN, LINKED, BadFiles
from trainer.data.text.documents import Keys, documents, pieces, read
from trainer.data.text.inputs import files_of
from trainer.data.text.listing import examine, list_files

ROOT = Path(__file__).resolve().parents[3]


def read_all(path, text_key="text", limit=0):
    bad = BadFiles(limit)
    return list(documents(str(path), text_key, bad)), bad.messages


def write_jsonl(path, texts, end="\n"):
    path.write_bytes("".join(json.dumps({"text": text}, ensure_ascii=False) + end for text in texts).encode())


def test_a_text_file_is_one_document_with_its_line_ends(tmp_path):
    (tmp_path / "x.txt").write_bytes("Größe\r\n\tzwei\n\n".encode())
    assert read_all(tmp_path / "x.txt") == (["Größe\r\n\tzwei\n\n"], [])


def test_a_folder_gives_its_files_in_the_order_of_their_paths(tmp_path):
    for name in ("b.py", "a/z.txt", "a/b/c.c", "a.txt", "Z.md", ".git/config", "a/.hidden", "__pycache__/b.pyc"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    write_jsonl(tmp_path / "c.jsonl", ["one", "two"])
    found, _ = read_all(tmp_path)
    assert found == ["Z.md", "a.txt", "a/b/c.c", "a/z.txt", "b.py", "one", "two"]


@settings(max_examples=80, deadline=None)
@given(
    texts=st.lists(st.text(max_size=30), max_size=12),
    piece_bytes=st.integers(1, 120),
    end=st.sampled_from(["\n", "\r\n", "\n\n"]),
    last_line_is_open=st.booleans(),
)
def test_jsonl_lines_are_read_once_wherever_it_is_cut(tmp_path_factory, texts, piece_bytes, end, last_line_is_open):
    path = tmp_path_factory.mktemp("jsonl") / "x.jsonl"
    write_jsonl(path, texts, end)
    if last_line_is_open:
        path.write_bytes(path.read_bytes().rstrip())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PIECE_BYTES", piece_bytes)
        parts = pieces(str(path))
        assert sum(part.n_bytes for part in parts) == path.stat().st_size
        assert [text for part in parts for text, _ in read(part, Keys(), BadFiles())] == texts


@pytest.mark.parametrize("longer", [-1, 0, 1])
def test_a_line_that_is_too_long_takes_no_other_line_with_it(tmp_path, monkeypatch, longer):
    """Nor does one that is too long by its line end alone."""
    monkeypatch.setattr(module, "MAX_LINE_BYTES", 40)
    long = "x" * (40 + longer - len(json.dumps({"text": ""})))
    write_jsonl(tmp_path / "x.jsonl", ["before", long, "behind"])
    found, bad = read_all(tmp_path / "x.jsonl", limit=1)
    assert found == (["before", long, "behind"] if longer < 0 else ["before", "behind"])
    assert bad == [f"{tmp_path}/x.jsonl:2: the line is longer than 40 bytes"] * (longer >= 0)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut off', "no JSON at column 10 .Unterminated string"),
        (b'{"words": "x"}', r"no text under the key 'text'.*words"),
        (b'{"text": 5}', "'text' is int, not a text"),
        (b'{"text": null}', "'text' is null, not a text"),
        (b'["text"]', "expected an object.*list"),
        (b'{"text": "\xff"}', "utf-8"),
        (b'{"text": "\\ud800"}', "surrogates"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [10, 1000])
def test_a_bad_json_line_is_named_and_the_others_are_kept(tmp_path, monkeypatch, line, words, piece_bytes):
    monkeypatch.setattr(module, "PIECE_BYTES", piece_bytes)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "four"}\n')
    with pytest.raises(UserError, match=rf"x\.jsonl:3: .*{words}"):
        read_all(path)
    found, messages = read_all(path, limit=1)
    assert found == ["one", "four"]
    assert len(messages) == 1


def test_a_row_that_is_not_utf_8_takes_no_other_row_with_it(tmp_path):
    """A decoder fails for a block of rows at once, of which those before the row are good, too."""
    for n_before in (0, 3, 9000):
        rows = [b"text,b", *(b"%d,x" % i for i in range(n_before)), b"caf\xe9,x", b"behind,caf\xe9"]
        (tmp_path / "x.csv").write_bytes(b"\r\n".join(rows))
        bad = [f"{tmp_path}/x.csv:{n_before + 2}: not UTF-8"]
        assert read_all(tmp_path / "x.csv", limit=1) == ([*map(str, range(n_before)), "behind"], bad)


def test_a_byte_order_mark_before_an_empty_line_is_no_record(tmp_path):
    for content, found in (('\r\n{"text": "a"}', ["a"]), ("", [])):
        (tmp_path / "x.jsonl").write_bytes(codecs.BOM_UTF8 + content.encode())
        assert read_all(tmp_path / "x.jsonl") == (found, [])


def test_the_text_key(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a", "body": "b"}')
    assert read_all(tmp_path / "x.jsonl", text_key="body")[0] == ["b"]


def test_parquet_rows_come_in_order_one_piece_a_row_group(tmp_path):
    texts = [f"row {i} é" for i in range(2500)]
    path = tmp_path / "x.parquet"
    pyarrow.parquet.write_table(pyarrow.table({"id": range(2500), "text": texts}), path, row_group_size=1200)
    assert [(part.start, part.stop) for part in pieces(str(path))] == [(0, 1), (1, 2), (2, 3)]
    assert read_all(path)[0] == texts
    with pytest.raises(UserError, match=r"x\.parquet: no column 'body'; there are \['id', 'text'\]"):
        read_all(path, text_key="body")


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_LENGTH_BYTE_ARRAY", "DELTA_BYTE_ARRAY"])
def test_parquet_files_of_other_writers_store_texts_without_a_dictionary(tmp_path, encoding):
    texts = [f"row {i} é" for i in range(2500)]
    table = pyarrow.table({"id": range(2500), "text": texts})
    path = tmp_path / "x.parquet"
    encodings = {"id": "PLAIN", "text": encoding}
    pyarrow.parquet.write_table(table, path, 1200, use_dictionary=False, column_encoding=encodings)
    assert read_all(path) == (texts, [])


def test_a_column_of_parquet_that_is_no_text_is_said_to_be_what_it_is(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": [{"text": "a"}]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet, row group 0, row 0: 'text' is dict, not a text"):
        read_all(tmp_path / "x.parquet")


def test_a_parquet_file_without_row_groups_has_no_documents(tmp_path):
    pyarrow.parquet.ParquetWriter(tmp_path / "x.parquet", pyarrow.schema({"text": pyarrow.string()})).close()
    assert read_all(tmp_path) == ([], [])
    examine(list_files([str(tmp_path)], BadFiles()), Keys(), BadFiles())


def test_bad_parquet_rows_and_files_are_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "c"]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet, row group 0, row 1: 'text' is null, not a text"):
        read_all(tmp_path / "x.parquet")
    (tmp_path / "y.parquet").write_bytes(b"no parquet")
    found, messages = read_all(tmp_path, limit=2)
    assert found == ["a", "c"]
    assert "y.parquet" in messages[1]


def test_files_that_are_no_text_are_named_and_counted_against_the_budget(tmp_path):
    (tmp_path / "a.py").write_bytes(b"good")
    (tmp_path / "b.py").write_bytes("latin ü".encode("latin-1"))
    (tmp_path / "c.py").symlink_to(tmp_path / "nowhere")
    (tmp_path / "d.py").write_bytes(b"good too")
    found, messages = read_all(tmp_path, limit=2)
    assert found == ["good", "good too"]
    assert messages == [f"{tmp_path}/b.py: not UTF-8 at byte 6", f"{tmp_path}/c.py: No such file or directory"]
    with pytest.raises(UserError, match=r"2 unreadable .* 1 allowed(.|\n)*b\.py(.|\n)*c\.py"):
        read_all(tmp_path, limit=1)
    with pytest.raises(UserError, match=r"b\.py"):
        list(documents(str(tmp_path)))


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    (tmp_path / "closed").mkdir()
    scandir = os.scandir

    def closed(path):
        if str(path).endswith("closed"):
            raise PermissionError(13, "Permission denied", path)
        return scandir(path)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(UserError, match=r"closed: cannot read this folder"):
        pieces(str(tmp_path))


def test_a_missing_input_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere: no such file or folder.*python_stdlib"):
        pieces(str(tmp_path / "nowhere"))


@pytest.mark.slow
def test_the_standard_library_is_over_10_mb_of_text():
    found = pieces("python_stdlib")
    paths = [part.path for part in found]
    assert sum(part.n_bytes for part in found) > 10_000_000
    assert paths == sorted(paths)
    assert any(path.endswith("/argparse.py") for path in paths)
    assert not [path for path in paths if "site-packages" in path or "/test/" in path]
    assert sum(len(text.encode()) for part in found for text, _ in read(part, Keys(), BadFiles())) == sum(
        part.n_bytes for part in found
    )


def test_a_hub_dataset_gives_its_rows_in_order(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [f"a{i}" for i in range(5)])
    write_jsonl(tmp_path / "b.jsonl", [f"b{i}" for i in range(5)])
    assert len(pieces(f"hub:{tmp_path}")) == 2
    assert read_all(f"hub:{tmp_path}")[0] == [f"{file}{i}" for file in "ab" for i in range(5)]
    with pytest.raises(UserError, match=r"hub:.*row 0: no text under the key 'body'"):
        read_all(f"hub:{tmp_path}", text_key="body")


def test_a_hub_dataset_that_fails_while_it_is_read_is_named(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n{"text": bad}\n')
    with pytest.raises(UserError, match=r"hub:.*cannot read the dataset"):
        read_all(f"hub:{tmp_path}")


def test_a_pipe_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert read_all(tmp_path, limit=1) == ([], [f"{tmp_path}/pipe: not a regular file"])


def test_a_hub_dataset_that_cannot_be_opened_is_named(tmp_path):
    with pytest.raises(UserError, match=r"hub:.*nothing: cannot open"):
        pieces(f"hub:{tmp_path}/nothing/nothing")


@pytest.mark.parametrize(("package", "name"), [("datasets", "hub:x/y"), ("pyarrow.parquet", "x.parquet")])
def test_a_missing_package_comes_with_the_install_command(tmp_path, monkeypatch, package, name):
    (tmp_path / "x.parquet").write_bytes(b"")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=rf"pip install {package.partition('.')[0]}"):
        read_all(name)


# --------------------------------------------------------------------------- formats and what is skipped


RECORDS = ["one", 'zwei\nlines, "quoted"', "NA", "123", ""]


def as_json_lines(texts):
    return "".join(json.dumps({"id": i, "text": text}) + "\n" for i, text in enumerate(texts)).encode()


def as_csv(texts, delimiter=","):
    file = io.StringIO(newline="")
    rows = csv.writer(file, delimiter=delimiter)
    rows.writerows([["id", "text"], *enumerate(texts)])
    return file.getvalue().encode()


def as_json_list(texts):
    return json.dumps([{"text": text, "id": str(i) if i % 2 else i} for i, text in enumerate(texts)], indent=1).encode()


def zstd(content):
    return pyarrow.Codec("zstd").compress(content, asbytes=True)


CONTENT = {
    "x.jsonl": as_json_lines(RECORDS),
    "x.JSONL": as_json_lines(RECORDS),
    "x.ndjson": as_json_lines(RECORDS),
    "x.json": as_json_lines(RECORDS),
    "list.json": as_json_list(RECORDS),
    "x.csv": as_csv(RECORDS),
    "x.tsv": as_csv(RECORDS, "\t"),
}
PACKED = {".gz": gzip.compress, ".bz2": bz2.compress, ".zst": zstd}


@pytest.mark.parametrize("mark", [b"", codecs.BOM_UTF8], ids=["", "BOM"])
@pytest.mark.parametrize("packing", ["", *PACKED])
@pytest.mark.parametrize("name", CONTENT)
def test_records_are_read_by_what_they_are(tmp_path, name, packing, mark):
    content = mark + CONTENT[name]
    (tmp_path / (name + packing)).write_bytes(PACKED[packing](content) if packing else content)
    assert read_all(tmp_path / (name + packing)) == (RECORDS, [])


@pytest.mark.parametrize("packing", ["", *PACKED])
def test_a_text_loses_its_byte_order_mark_and_nothing_else(tmp_path, packing):
    content = codecs.BOM_UTF8 + "ü\ufeff\r\n".encode()
    (tmp_path / f"x.txt{packing}").write_bytes(PACKED[packing](content) if packing else content)
    assert read_all(tmp_path / f"x.txt{packing}") == (["ü\ufeff\r\n"], [])


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"text": "only"}', ["only"]),
        ('{\n "name": "a package"\n}\n', ['{\n "name": "a package"\n}\n']),
        ("// a comment\n[1, 2]\n", ["// a comment\n[1, 2]\n"]),
        ("[1, 2]", ["[1, 2]"]),
        ("[]", []),  # a list of no objects
    ],
)
def test_a_json_file_of_something_else_than_records_is_a_text(tmp_path, content, found):
    (tmp_path / "x.json").write_text(content)
    assert read_all(tmp_path / "x.json") == (found, [])


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("x.json", b'[{"text": "a"}, {"body": "b"}]', r"x\.json, record 1: no text under the key 'text'.*--text-key"),
        ("x.json", b'[{"text": "a"}, {"text"', r"x\.json: Expecting"),
        ("x.csv", b"id,body\n1,a\n", r"x\.csv: no column 'text'; there are \['id', 'body'\]; --text-key"),
        ("x.csv", b"id,text\n1,a,b\n", r"x\.csv:2: more fields"),
        ("x.csv", b"id,text\n1\n", r"x\.csv:2: 'text' is null"),
        ("x.csv", b'id,text\n1,"a\n', r"x\.csv:2: unexpected end of data; this row and all behind it are not read"),
        ("x.csv", b'text\na\n"b" c\nd\n', r"x\.csv:3: ',' expected after '\"'; this row and all behind it"),
        ("x.csv", b"text\n" + b"a\n" * 9000 + b"\xff\n", r"x\.csv:9002: not UTF-8"),
        ("x.jsonl.gz", gzip.compress(b'{"text": "a"}\n{"text"\n'), r"x\.jsonl\.gz:2: no JSON"),
        ("x.jsonl.gz", gzip.compress(as_json_lines(map(str, range(9999))))[:-99], r"x\.jsonl\.gz: Truncated"),
        ("x.txt.zst", b"nothing", r"x\.txt\.zst: "),
        ("x.jsonl.gz", b"", r"x\.jsonl\.gz: has no bytes"),
        ("x.txt.zst", b"", r"x\.txt\.zst: has no bytes"),
        ("x.py.bz2", b"", r"x\.py\.bz2: has no bytes"),
        ("x.txt.gz", gzip.compress(bytes([65]) * (70 << 20)), r"x\.txt\.gz: unpacks to more than 67,108,864 bytes"),
        ("x.arrow", b"nothing", r"x\.arrow: datasets can't read it"),
    ],
    # gzip writes the second into its header: named by its bytes, a case would differ between pytest's workers.
    ids=lambda value: value if isinstance(value, str) else "content",
)
def test_damaged_records_are_named(tmp_path, name, content, words):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=words):
        read_all(tmp_path / name)


def test_folders_of_save_to_disk_and_their_files(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    texts = [f"row {i} é" for i in range(2500)]
    saved = datasets.Dataset.from_dict({"id": list(range(2500)), "text": texts})
    datasets.DatasetDict({"train": saved, "test": saved.select(range(3))}).save_to_disk(tmp_path / "both")
    datasets.DatasetDict({"train": saved}).save_to_disk(tmp_path / "all" / "one")
    monkeypatch.setattr(module, "PIECE_BYTES", 10_000)
    assert len(pieces(str(tmp_path / "both" / "train"))) > 2
    for path in ("both/train", "both/train/data-00000-of-00001.arrow", "all/one", "all"):
        assert read_all(tmp_path / path) == (texts, []), path
    assert read_all(tmp_path / "both/test")[0] == texts[:3]
    with pytest.raises(UserError, match=r"both: a dataset with several splits \(test, train\).*both/test"):
        read_all(tmp_path / "both")
    with pytest.raises(UserError, match="no column 'body'"):
        read_all(tmp_path / "both" / "test", text_key="body")


@pytest.mark.slow  # imports datasets in a new process
def test_files_are_read_without_a_home(tmp_path):
    """Nor is anything kept there: only of the hub `datasets` keeps copies."""
    with pyarrow.ipc.new_stream(tmp_path / "x.arrow", pyarrow.schema({"text": pyarrow.string()})) as file:
        file.write(pyarrow.table({"text": RECORDS}))
    code = "import sys; from trainer.data.text.documents import documents; print(len([*documents(sys.argv[1])]))"
    homeless = {**os.environ, "HOME": "/proc/none", "HF_HOME": "/proc/none"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=homeless, capture_output=True, check=False)
    assert (done.stdout, done.stderr) == (b"5\n", b"")


def test_a_feather_file_is_read(tmp_path):
    with pyarrow.ipc.new_file(tmp_path / "x.arrow", pyarrow.schema({"text": pyarrow.string()})) as file:
        file.write(pyarrow.table({"text": RECORDS}))
    assert read_all(tmp_path / "x.arrow") == (RECORDS, [])


def test_glob_patterns(tmp_path):
    for name in ("a.txt", "b.txt", "c.md", "sub/d.txt", "[x].txt"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
    assert read_all(tmp_path / "*.txt")[0] == ["[x].txt", "a.txt", "b.txt"]
    assert read_all(tmp_path / "**/*.txt")[0] == ["[x].txt", "a.txt", "b.txt", "sub/d.txt"]
    assert read_all(tmp_path / "[x].txt")[0] == ["[x].txt"]  # a file of that name comes before a pattern
    with pytest.raises(UserError, match="no file matches this pattern"):
        read_all(tmp_path / "*.rst")


def test_an_input_without_a_name_is_not_the_current_folder():
    with pytest.raises(UserError, match="an input is empty text"):
        list_files([""], BadFiles())


def test_a_pattern_gives_each_file_once(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    for name in ("a/x.txt", "a/b/y.txt"):
        (tmp_path / name).write_text(name)
    assert sorted(read_all(tmp_path / "**")[0]) == ["a/b/y.txt", "a/x.txt"]
    (tmp_path / "a" / "b" / "up").symlink_to("..")
    assert sorted(read_all(tmp_path / "**" / "*.txt")[0]) == ["a/b/y.txt", "a/x.txt"]


def test_a_saved_dataset_is_read_once(tmp_path):
    """Neither by a link beside it nor by a pattern that matches its files, too."""
    (tmp_path / "in" / "a").mkdir(parents=True)
    (tmp_path / "in" / "b").symlink_to("a")
    for name in ("state.json", "dataset_info.json", "data-00000-of-00001.arrow"):
        (tmp_path / "in" / "a" / name).write_text("{}")
    bad = BadFiles()
    assert files_of(str(tmp_path / "in"), bad) == [tmp_path / "in" / "a"]
    assert bad.skipped == {LINKED: [f"{tmp_path}/in/b"]}
    for pattern in ("**", "*/**", "*"):
        assert files_of(str(tmp_path / "in" / pattern), BadFiles()) == [tmp_path / "in" / "a"], pattern
    arrow = tmp_path / "in" / "a" / "data-00000-of-00001.arrow"
    assert files_of(str(tmp_path / "in" / "*" / "*.arrow"), BadFiles()) == [arrow]


def test_what_lists_the_splits_of_a_saved_dataset_is_no_data(tmp_path):
    split = tmp_path / "in" / "one" / "train"
    split.mkdir(parents=True)
    for path in (split / "state.json", split / "dataset_info.json", split.parent / "dataset_dict.json"):
        path.write_text("{}")
    for pattern in ("in/**", "**", "in/one/**", "in/one/*"):
        assert files_of(str(tmp_path / pattern), BadFiles()) == [split], pattern
    with pytest.raises(UserError, match="no file matches this pattern"):
        files_of(str(tmp_path / "in" / "one" / "*.json"), BadFiles())


def test_links_are_followed_once(tmp_path):
    (tmp_path / "outside/deep").mkdir(parents=True)
    (tmp_path / "outside/deep/x.txt").write_text("linked")
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.txt").write_text("own")
    (tmp_path / "in/link").symlink_to("../outside")
    (tmp_path / "in/loop").symlink_to(".")
    (tmp_path / "outside/deep/up").symlink_to("../../in")
    bad = BadFiles()
    assert list(documents(str(tmp_path / "in"), bad=bad)) == ["own", "linked"]
    assert bad.skipped == {LINKED: [f"{tmp_path}/in/loop", f"{tmp_path}/in/link/deep/up"]}


def test_binary_and_hidden_files_are_counted(tmp_path):
    (tmp_path / ".git").mkdir()
    (tmp_path / "logo.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR\xff")
    (tmp_path / "a.py").write_text("text")
    bad = BadFiles()
    assert list(documents(str(tmp_path), bad=bad)) == ["text"]
    assert (bad.messages, bad.skipped) == ([], {HIDDEN: [f"{tmp_path}/.git"], BINARY: [f"{tmp_path}/logo.png"]})


def test_a_separator_cuts_txt_files(tmp_path):
    (tmp_path / "a.txt").write_text("one<|end|>two\n<|end|>")
    (tmp_path / "b.md").write_text("three<|end|>")
    (tmp_path / "c.txt.gz").write_bytes(gzip.compress(b"four<|end|>five"))
    found = list(documents(str(tmp_path), separator="<|end|>"))
    assert found == ["one", "two\n", "", "three<|end|>", "four", "five"]


def test_bad_lines_are_collected_up_to_a_limit():
    bad = BadFiles(limit=2, patience=3)
    for i in range(5):
        bad.add(f"line {i}")
    with pytest.raises(UserError, match=r"5 unreadable file\(s\) or line\(s\), 2 allowed(.|\n)*line 0(.|\n)*line 4"):
        bad.check()
    with pytest.raises(UserError, match="6 unreadable"):
        bad.add("line 5")
