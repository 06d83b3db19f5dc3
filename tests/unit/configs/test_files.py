"""Files of Keel's own under crashes, full disks, removed folders, links, pipes and devices."""

import errno
import json
import math
import os
from pathlib import Path

import pytest

from configs import files
from configs.errors import UserError, files_that_fail
from configs.files import (
    AppendedFile,
    exists,
    is_file,
    is_folder,
    is_link,
    open_plain,
    replacing,
    require_plain,
    write_atomically,
    write_even_if_full,
    write_json,
)
from tests.torture.full_disk import fill, free, small_disk
from trainer.guards.outages import Outages


@pytest.fixture
def disk():
    """A real one of 64 KB."""
    try:
        with small_disk(1 << 16, 100) as folder:
            yield folder
    except PermissionError as error:
        pytest.skip(f"this process may not mount a disk: {error}")


def test_an_interrupted_write_leaves_the_old_file_whole(tmp_path):
    path = tmp_path / "status.json"
    path.write_text("old")

    def texts():
        yield "half of the n"
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_atomically(path, texts())
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["status.json"]


def test_a_write_that_the_disk_refuses_names_the_file(tmp_path, monkeypatch):
    def full(_descriptor):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    (tmp_path / "folder").mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}/folder: Is a directory"), files_that_fail():
        write_atomically(tmp_path / "folder", ["page"])
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=f"{tmp_path}/page.html: No space left"), files_that_fail():
        write_atomically(tmp_path / "page.html", ["page"])


def test_of_a_copy_to_a_full_disk_the_copy_is_named():
    with pytest.raises(UserError, match=r"^copy: No space left"), files_that_fail():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "original", None, "copy")


def test_a_replaced_file_takes_the_place_of_links_and_leaves_their_targets(tmp_path):
    precious = tmp_path / "precious"
    precious.write_text("precious")
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").symlink_to(precious)
    (folder / ".config.toml.tmp").symlink_to(precious)
    (folder / "status.json").hardlink_to(precious)
    for name in ("config.toml", "status.json"):
        write_atomically(folder / name, ["new"])
        assert (folder / name).read_text() == "new"
        assert not (folder / name).is_symlink()
    assert precious.read_text() == "precious"


def make_pipe(path):
    os.mkfifo(path)


def make_device(path):
    try:
        os.mknod(path, 0o20644, os.makedev(1, 3))  # /dev/null
    except PermissionError as error:
        pytest.skip(f"this process may not make devices: {error}")


def make_link(path):
    path.symlink_to(path.with_name("precious"))


def make_dangling_link(path):
    path.symlink_to(path.with_name("not there yet"))


@pytest.mark.parametrize("make", [make_pipe, make_device, make_link, make_dangling_link, Path.mkdir])
def test_what_is_no_plain_file_is_neither_opened_nor_waited_for(tmp_path, make):
    (tmp_path / "precious").write_text("precious")
    path = tmp_path / "run.log"
    make(path)
    file = AppendedFile(path)
    file.write(b"line\n")
    for attempt in (lambda: require_plain(path), lambda: open_plain(path, os.O_RDWR | os.O_CREAT), file.flush):
        with pytest.raises(OSError, match=r"(symbolic link|not a plain file).* remove it.*run\.log"):
            attempt()
    assert (tmp_path / "precious").read_text() == "precious"
    assert not (tmp_path / "not there yet").exists()


def test_a_link_that_appears_at_the_last_moment_is_not_followed_either(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "require_plain", lambda path: None)
    make_link(tmp_path / "run.log")
    with pytest.raises(OSError, match="Too many levels of symbolic links"):
        open_plain(tmp_path / "run.log", os.O_WRONLY | os.O_CREAT)


def test_appending_to_a_folder_that_was_copied_by_hard_links_leaves_the_copy_alone(tmp_path):
    path, snapshot = tmp_path / "run.log", tmp_path / "snapshot"
    path.write_bytes(b"one\n")
    snapshot.hardlink_to(path)
    file = AppendedFile(path)
    file.write(b"two\n")
    file.flush()
    assert (path.read_bytes(), snapshot.read_bytes()) == (b"one\ntwo\n", b"one\n")


def test_records_wait_for_room_whole_and_in_order(disk):
    """At every number of bytes left in the last page; the record that does not fit is not there in part."""
    path, said = disk / "metrics.jsonl", []
    outages, file = Outages(said.append, said.append), AppendedFile(path)
    lines = [f"{number:03}{'.' * 500}\n".encode() for number in range(40)]
    for line in lines[:3]:
        file.write(line)
        outages.flush(file)
    fill(disk)
    for line in lines[3:20]:
        file.write(line)
        outages.flush(file)
        assert path.read_bytes() in (b"".join(lines[:n]) for n in range(4, 9))  # a page has room for eight
    assert file.missing == 12
    free(disk)
    for line in lines[20:]:
        file.write(line)
        outages.flush(file)
    assert path.read_bytes() == b"".join(lines)
    begun, ended = said
    assert f"{path} can't be written: No space left on device; training continues" in begun
    assert "0 bytes are free there" in begun
    assert ended == f"{path} can be written again"


def test_a_record_is_written_once_although_closing_the_file_fails(tmp_path, monkeypatch):
    file, close, refusals = AppendedFile(tmp_path / "metrics.jsonl"), os.close, [None] * 2

    def closing(descriptor):
        is_metrics = Path(os.readlink(f"/proc/self/fd/{descriptor}")) == file.path
        close(descriptor)
        if is_metrics and refusals:
            refusals.pop()
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "close", closing)
    outages = Outages([].append, [].append)
    for line in (b"one\n", b"two\n", b"three\n"):
        file.write(line)
        outages.flush(file)
    outages.flush(file)
    assert not refusals
    assert file.path.read_bytes() == b"one\ntwo\nthree\n"


def test_the_last_version_of_a_file_is_tried_again_and_not_for_ever(tmp_path, monkeypatch):
    said, pauses, refusals = [], [], [None] * 3
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    outages, path = Outages(said.append, said.append), tmp_path / "status.json"

    def write():
        if refusals:
            refusals.pop()
            raise OSError(errno.ESTALE, "Stale file handle")
        path.write_text("done")

    outages.insist(path, write)
    assert (path.read_text(), said, len(pauses)) == ("done", [], 3)
    refusals.extend([None] * 100)
    outages.insist(path, write)
    assert sum(pauses) < 10
    assert said == [f"{path} could not be written: Stale file handle; it is out of date"]


def test_what_a_disk_refuses_for_a_moment_is_done_again_and_other_errors_are_raised_at_once(monkeypatch):
    pauses = []
    monkeypatch.setattr(files.time, "sleep", pauses.append)
    errors = [errno.EIO, errno.ESTALE, errno.EACCES]

    def refused():
        number = errors.pop(0)
        raise OSError(number, os.strerror(number))

    with pytest.raises(PermissionError):
        files.insist(refused)
    assert (errors, len(pauses)) == ([], 2)


def test_more_than_is_kept_is_counted_and_said(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "KEPT_BYTES", 10)
    file, said = AppendedFile(tmp_path / "gone" / "file"), []
    outages = Outages(said.append, said.append)
    for line in (b"1234\n", b"5678\n", b"dropped\n", b"too\n"):
        file.write(line)
        outages.flush(file)
    outages.give_up(file)
    assert said[-1] == f"{file.path}: the last 4 records could not be written"
    file.path.parent.mkdir()
    outages.flush(file)
    assert file.path.read_bytes() == b"1234\n5678\n"
    assert said[-2].startswith(f"2 records of {file.path} are lost")
    assert file.path not in outages


def test_a_removed_file_and_folder_are_noticed(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    file = AppendedFile(folder / "metrics.jsonl")
    file.write(b"1\n")
    file.flush()
    file.path.unlink()
    folder.rmdir()
    file.write(b"2\n")
    with pytest.raises(FileNotFoundError):
        file.flush()
    folder.mkdir()
    file.flush()
    assert file.path.read_bytes() == b"2\n"


def test_a_small_file_is_true_on_a_full_disk(disk):
    path = disk / "status.json"
    write_even_if_full(path, "a status of some length")
    fill(disk)
    for text in ("short", "a longer status than before " * 20, "x"):
        write_even_if_full(path, text)
        assert path.read_text() == text
        assert sorted(found.name for found in disk.iterdir()) == ["filler", "status.json"]
    with pytest.raises(OSError, match="No space") as refused:
        write_even_if_full(path, "more than its page" * 1000)
    assert refused.value.errno == errno.ENOSPC
    with pytest.raises(OSError, match="No space"):
        write_even_if_full(disk / "none yet", "x")
    assert path.read_text() == "x"


def test_two_writers_of_a_file_do_not_meet(tmp_path):
    path = tmp_path / "status.json"
    with replacing(path, "h1-7") as halted:
        halted.write(b"the halted one's")
        write_even_if_full(path, "the other's", writer="h2-7")
        assert path.read_text() == "the other's"
    assert path.read_text() == "the halted one's"
    assert list(tmp_path.iterdir()) == [path]


def test_a_small_file_with_a_second_name_is_not_overwritten_in_place(disk):
    path = disk / "status.json"
    path.write_text("old")
    (disk / "snapshot").hardlink_to(path)
    fill(disk)
    with pytest.raises(OSError, match="No space"):
        write_even_if_full(path, "new")
    assert (disk / "snapshot").read_text() == "old"


@pytest.mark.parametrize("path", [".", "/"])
def test_a_folder_in_a_files_place_is_an_error_about_it(path):
    with pytest.raises(UserError, match=f"^{path}: Is a directory$".replace(".:", r"\.:")), files_that_fail():
        write_atomically(Path(path), ["text"])


QUESTIONS = (exists, is_file, is_folder, is_link)


def test_what_is_at_a_path(tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    for name, target in {"to a file": "file", "to a folder": "folder", "astray": "nothing", "loop": "loop"}.items():
        (tmp_path / name).symlink_to(target)
    answers = {
        "file": (True, True, False, False),
        "folder": (True, False, True, False),
        "to a file": (True, True, False, True),
        "to a folder": (True, False, True, True),
        "astray": (False, False, False, True),
        "loop": (False, False, False, True),
        "nothing": (False, False, False, False),
        "file/below": (False, False, False, False),
        "null \0 character": (False, False, False, False),
    }
    for name, expected in answers.items():
        assert tuple(ask(tmp_path / name) for ask in QUESTIONS) == expected, name
        assert tuple(ask(f"{tmp_path}/{name}") for ask in QUESTIONS) == expected, name


@pytest.mark.parametrize("ask", QUESTIONS, ids=lambda ask: ask.__name__)
def test_a_path_that_cannot_be_looked_at_is_an_error(ask, tmp_path):
    """On any Python: 3.14's pathlib says that nothing is there."""
    with pytest.raises(OSError, match="File name too long"):
        ask(tmp_path / ("x" * 300))


def test_json_has_null_for_what_is_not_finite(tmp_path):
    """Python would write NaN and Infinity, which no other reader of JSON takes."""
    value = {"losses": {16: (2.5, math.nan)}, "rows": [{"gap": math.inf}], "steps": 3, "is_right": True}
    write_json(tmp_path / "file.json", value)
    expected = {"losses": {"16": [2.5, None]}, "rows": [{"gap": None}], "steps": 3, "is_right": True}
    assert json.loads((tmp_path / "file.json").read_text(), parse_constant=pytest.fail) == expected
