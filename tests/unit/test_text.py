"""Text sources: every document once and in order, however it is laid out; what cannot be read is named."""

import json
import os
import sys

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.errors import UserError
from trainer.data import text as module
from trainer.data.text import BadFiles, documents, pieces, read


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
        patch.setattr(module, "JSONL_PIECE_BYTES", piece_bytes)
        parts = pieces(str(path))
        assert sum(part.n_bytes for part in parts) == path.stat().st_size
        assert [text for part in parts for text in read(part, "text", BadFiles())] == texts


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (b'{"text": "cut off', "no JSON at column 10 .Unterminated string"),
        (b'{"words": "x"}', r"no text under the key 'text'.*words"),
        (b'{"text": 5}', "no text under the key 'text'"),
        (b'["text"]', "expected an object.*list"),
        (b'{"text": "\xff"}', "utf-8"),
        (b'{"text": "\\ud800"}', "surrogates"),
    ],
)
@pytest.mark.parametrize("piece_bytes", [10, 1000])
def test_a_bad_json_line_is_named_and_the_others_are_kept(tmp_path, monkeypatch, line, words, piece_bytes):
    monkeypatch.setattr(module, "JSONL_PIECE_BYTES", piece_bytes)
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"text": "one"}\n\n' + line + b'\n{"text": "four"}\n')
    with pytest.raises(UserError, match=rf"x\.jsonl:3: .*{words}"):
        read_all(path)
    found, messages = read_all(path, limit=1)
    assert found == ["one", "four"]
    assert len(messages) == 1


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


def test_bad_parquet_rows_and_files_are_named(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"text": ["a", None, "c"]}), tmp_path / "x.parquet")
    with pytest.raises(UserError, match=r"x\.parquet, row group 0, row 1: not text but None"):
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


def test_the_standard_library_is_over_10_mb_of_text():
    found = pieces("python_stdlib")
    paths = [part.path for part in found]
    assert sum(part.n_bytes for part in found) > 10_000_000
    assert paths == sorted(paths)
    assert any(path.endswith("/argparse.py") for path in paths)
    assert not [path for path in paths if "site-packages" in path or "/test/" in path]
    assert sum(len(text.encode()) for part in found for text in read(part, "text", BadFiles())) == sum(
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
