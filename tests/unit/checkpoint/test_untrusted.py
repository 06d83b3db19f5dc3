"""A stranger's files: each is refused by one message, soon, in little memory, and no terminal obeys what is in it.

`tests/torture/fuzz.py` tries them by the thousand; here is each defect that was found, by its name.
"""

import io
import json
import os
import signal
import zipfile
from contextlib import contextmanager

import pytest
import torch

from checkpoint.export.hf_export import TokenizerFiles, export_hf
from checkpoint.export.hf_import import import_hf
from checkpoint.index import read_metadata
from checkpoint.manifest import INDEX_NAME, MANIFEST_NAME, TRAINER_NAME, read_manifest, sealed
from checkpoint.tensor_stream import read_tensor, require_stored
from configs.errors import ConfigError, KeelError, UserError
from configs.load import load
from configs.untrusted import MAX_MESSAGE_CHARACTERS, parse_json, printable, read_file
from scripts import checkpoint as checkpoint_script
from scripts.export_hf import _tokenizer
from tests.held import held
from tests.unit.checkpoint.test_checkpoint_exploits import reseal
from tests.unit.hf_support import TINY, make_model, save
from trainer.data.text import documents as text
from trainer.data.text.documents import BadFiles, documents
from trainer.data.text.prepared_folder import Settings, is_finished
from trainer.data.tokenizer import load_tokenizer
from trainer.guards.saved_state import check_saved_state
from trainer.lifecycle import read_status
from trainer.report.console import Console
from trainer.report.metrics import cut_back

MIB = 1 << 20
ESCAPE = "\x1b[2J\x1b]0;owned\x07\u202e"


@contextmanager
def soon(seconds=100):
    """Fails what would wait forever; generous, since machines are busy."""

    def fail(*_):
        raise AssertionError(f"still at it after {seconds} s")

    before = signal.signal(signal.SIGALRM, fail)
    signal.alarm(seconds)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def checkpoint(tmp_path):
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return save(tmp_path / "run" / "checkpoints" / "step-00000001", make_model(TINY["untied"]))


@pytest.fixture
def hf_folder(tmp_path, checkpoint):
    export_hf(checkpoint, tmp_path / "hf", TokenizerFiles())
    return tmp_path / "hf"


def rewrite_manifest(checkpoint, change):
    content = json.loads((checkpoint / MANIFEST_NAME).read_text())
    del content["seal"]
    change(content)
    (checkpoint / MANIFEST_NAME).write_text(sealed(json.dumps(content, indent=1)))


# --------------------------------------------------------------------------- whatever has a name but no end


def fifo(path):
    os.mkfifo(path)


def device(path):
    path.symlink_to("/dev/zero")


def sparse(path):
    path.touch()
    os.truncate(path, 40 << 30)


READ = r"regular file|are more than|no job file|not a folder of prepared text|is a link to"
READERS = {
    MANIFEST_NAME: lambda path: read_manifest(path.parent),
    "config.json": lambda path: import_hf(path.parent, path.parent / "out", None),
    "job.toml": lambda path: load(str(path)),
    "prepare.json": lambda path: is_finished(path.parent, Settings([], "text", "0", 1, 0.0)),
    "own.model": load_tokenizer,
    "tokenizer.json": load_tokenizer,
    "a.txt": lambda path: list(documents(str(path))),
}


@pytest.mark.parametrize("put", [fifo, device, sparse])
@pytest.mark.parametrize("name", READERS)
def test_what_is_no_file_is_neither_waited_for_nor_read(tmp_path, name, put):
    put(tmp_path / name)

    def read():
        with pytest.raises(KeelError, match=READ):
            READERS[name](tmp_path / name)

    with soon():
        assert held(read) < 64 * MIB


@pytest.mark.parametrize("put", [fifo, device, sparse])
def test_a_status_that_is_no_file_is_none(tmp_path, put):
    put(tmp_path / "status.json")
    with soon():
        assert read_status(tmp_path) == {}


def test_a_pipe_in_the_place_of_a_manifest_is_named_in_the_list(checkpoint, capsys):
    (checkpoint / MANIFEST_NAME).unlink()
    os.mkfifo(checkpoint / MANIFEST_NAME)
    with soon():
        assert checkpoint_script.main(["list", str(checkpoint.parent)]) == 0
        with pytest.raises(UserError, match="not a regular file"):
            export_hf(checkpoint, checkpoint.parent / "out", TokenizerFiles())  # which pins it first
    assert "MANIFEST.json can't be read: not a regular file" in " ".join(capsys.readouterr().out.split())


def test_a_pipe_in_the_place_of_weights(tmp_path, hf_folder):
    (hf_folder / "model.safetensors").unlink()
    os.mkfifo(hf_folder / "model.safetensors")
    with soon(), pytest.raises(UserError, match="not a regular file"):
        import_hf(hf_folder, tmp_path / "out", None)


def test_a_file_is_read_in_the_size_that_it_has(tmp_path):
    (tmp_path / "small").write_text("x")
    assert held(lambda: read_file(tmp_path / "small", 1 << 40)) < 16 * MIB
    with pytest.raises(OSError, match="1 bytes are more than the 0 allowed"):
        read_file(tmp_path / "small", 0)


# --------------------------------------------------------------------------- the index of a checkpoint


@pytest.mark.parametrize(
    "content", ["[" * 1_000_000, '{"tensors":' * 100_000, '{"tensors": 5}', "9" * 1_000_000, "{}", ""]
)
def test_an_index_that_is_none(checkpoint, content):
    (checkpoint / INDEX_NAME).write_text(content)

    def read():
        with pytest.raises(UserError, match=r"index\.json can't be read"):
            read_metadata(checkpoint)

    with soon():
        assert held(read) < 64 * MIB


def test_compressed_tensors_are_refused_before_they_are_made_large(checkpoint):
    """torch reads them: 300 kB became 300 MB before their length was compared."""
    honest, forged = io.BytesIO(), io.BytesIO()
    torch.save(torch.zeros(10), honest)
    require_stored(honest)
    with zipfile.ZipFile(honest) as entries, zipfile.ZipFile(forged, "w", zipfile.ZIP_DEFLATED) as file:
        for entry in entries.infolist():
            file.writestr(entry.filename, bytes(300 * MIB) if "/data/" in entry.filename else entries.read(entry))
    metadata = read_metadata(checkpoint)
    name = next(iter(metadata.state_dict_metadata))
    for place in metadata.storage_data.values():
        place.offset, place.length = 0, len(forged.getvalue())
    (checkpoint / "__0_0.distcp").write_bytes(forged.getvalue())

    def read():
        with pytest.raises(UserError, match="compressed"):
            read_tensor(checkpoint, metadata, name)

    assert held(read) < 64 * MIB


# --------------------------------------------------------------------------- numbers that nobody can reach


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        (10**8, "num_hidden_layers: Input should be less than or equal to 4096"),
        (4000, r"config\.json describes 4000 layers, and there are only 21 tensors"),
    ],
)
def test_a_config_of_many_layers(tmp_path, hf_folder, layers, message):
    config = json.loads((hf_folder / "config.json").read_text())
    (hf_folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    with (
        soon(),
        pytest.raises(UserError, match=message),
    ):
        import_hf(hf_folder, tmp_path / "out", None)


@pytest.mark.parametrize(("key", "number"), [("n_layers", 4000), ("n_experts", 10**7)])
def test_a_manifest_of_many_layers(tmp_path, checkpoint, key, number):
    rewrite_manifest(checkpoint, lambda content: content["config"]["model"].update({key: number}))
    with soon(), pytest.raises(UserError, match="there are only 42 tensors"):
        export_hf(checkpoint, tmp_path / "out", TokenizerFiles())


@pytest.mark.parametrize("key", ["step", "tokens"])
@pytest.mark.parametrize("value", [10**300, -1])
def test_a_manifest_counts_within_64_bits(checkpoint, key, value):
    rewrite_manifest(checkpoint, lambda content: content.update({key: value}))
    with pytest.raises(UserError, match=key):
        read_manifest(checkpoint)


@pytest.mark.parametrize("config", [{"training": []}, {"tokenizer": 3}, {"tokenizer": {"path": 3}}, {"a": [{}, 1]}])
def test_a_manifest_with_another_kind_of_config(tmp_path, checkpoint, config, capsys):
    rewrite_manifest(checkpoint, lambda content: content["config"].update(config))
    assert checkpoint_script.main(["show", str(checkpoint), "--config"]) == 0
    export_hf(checkpoint, tmp_path / "out", _tokenizer(checkpoint, None))


@pytest.mark.parametrize(
    ("field", "value"),
    [("rope_scaling", [1]), ("max_position_embeddings", "long"), ("hidden_size", 10**400), ("hidden_act", "x" * 10**6)],
)
def test_a_config_json_with_another_kind_of_value(tmp_path, hf_folder, field, value):
    config = json.loads((hf_folder / "config.json").read_text()) | {"rope_parameters": None, field: value}
    (hf_folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError) as refused:
        import_hf(hf_folder, tmp_path / "out", None)
    assert len(str(refused.value)) < 2000


@pytest.mark.parametrize("name", ["x" * 30_000, "\0", "\ud800", "\x1b[2J", "..", "a/b"])
def test_an_index_of_files_with_names_that_no_file_can_have(tmp_path, hf_folder, name):
    (hf_folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"lm_head.weight": name}}))
    with pytest.raises(UserError, match="outside of the folder"):
        import_hf(hf_folder, tmp_path / "out", None)


# --------------------------------------------------------------------------- nesting


def test_a_config_json_that_never_ends(tmp_path, hf_folder):
    (hf_folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(UserError, match="nested deeper than 64 levels"):
        import_hf(hf_folder, tmp_path / "out", None)


def test_a_line_that_never_ends_is_one_bad_line(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"text": "one"}\n' + "[" * 200_000 + '\n{"text": "two"}\n')
    bad = BadFiles(1)
    assert list(documents(str(tmp_path / "a.jsonl"), "text", bad)) == ["one", "two"]
    assert bad.messages == [f"{tmp_path}/a.jsonl:2: nested deeper than 64 levels"]


@pytest.mark.parametrize(
    "line",
    [
        "a = " + "[" * 20_000 + "]" * 20_000,
        ".".join(["a"] * 20_000) + " = 1",
        "seed = " + "9" * 5_000,
        "seed = 9223372036854775808",
        "\n".join(f"[table{n}]\nx = 1" for n in range(60_000)),
    ],
    ids=["arrays", "keys", "digits", "64 bits", "size"],
)
def test_a_job_file_that_goes_too_far(tmp_path, line):
    (tmp_path / "job.toml").write_text(line)
    with soon(), pytest.raises(ConfigError, match=r"job.toml: cannot be read: "):
        load(str(tmp_path / "job.toml"))


def test_a_job_file_of_thousands_of_tables_takes_seconds(tmp_path):
    """Twice as many took four times as long: lines and origins were counted from the start for each."""
    sources = "".join(f'[[data.sources]]\nname = "s{n}"\nkind = "synthetic"\n' for n in range(4_000))
    (tmp_path / "job.toml").write_text(sources + "[model]\n")
    with soon(), pytest.raises(ConfigError, match="dim"):
        load(str(tmp_path / "job.toml"))


@pytest.mark.slow
def test_thousands_of_mistakes_are_not_all_explained(tmp_path):
    (tmp_path / "job.toml").write_text("".join(f"[table{n}]\nx = 1\n" for n in range(8_000)))
    with soon(), pytest.raises(ConfigError, match=r"unknown table \[table0\]"):
        load(str(tmp_path / "job.toml"))


def test_a_text_in_the_place_of_a_number_may_be_anything(tmp_path):
    """Whether it is a number in quotes is found out by reading it as TOML."""
    for anything in ("[" * 3_000, "9" * 5_000):
        (tmp_path / "job.toml").write_text(f'[model]\ndim = "{anything}"\n')
        with pytest.raises(
            ConfigError, match=r"model.dim must be an integer > 0, got|too many digits, or is nested too deep"
        ):
            load(str(tmp_path / "job.toml"), ["--model.n_heads", anything])


def test_bases_without_end(tmp_path):
    for n in range(1_200):
        (tmp_path / f"{n}.toml").write_text(f'base = "{n + 1}.toml"')
    with pytest.raises(ConfigError, match="more than 32 job files"):
        load(str(tmp_path / "0.toml"))


def test_parse_json_takes_what_documents_have():
    assert parse_json('{"id": 18446744073709551615, "x": [[[]]]}') == {"id": 2**64 - 1, "x": [[[]]]}
    assert parse_json("[" * 64 + "]" * 64) is not None
    with pytest.raises(ValueError, match="nested"):
        parse_json("[" * 65 + "]" * 65)


# --------------------------------------------------------------------------- what is shown


def test_no_line_of_a_file_that_is_no_job_file_is_shown(tmp_path):
    (tmp_path / "secret").write_text("root:x:0:0:hush\n")
    (tmp_path / "job.toml").write_text('base = "secret"\n')
    with pytest.raises(ConfigError, match="secret:1: not valid TOML") as refused:
        load(str(tmp_path / "job.toml"))
    assert "hush" not in str(refused.value)


def test_escapes_are_cleaned_in_show_list_and_diff(tmp_path, checkpoint, capsys):
    other = save(tmp_path / "run" / "checkpoints" / "step-00000002", make_model(TINY["untied"]))
    index = json.loads((checkpoint / INDEX_NAME).read_text())
    index["tensors"][ESCAPE] = index["tensors"].pop(next(iter(index["tensors"])))
    (checkpoint / INDEX_NAME).write_text(json.dumps(index))
    reseal(checkpoint)
    change = {"run_id": ESCAPE, "torch_version": ESCAPE}
    rewrite_manifest(checkpoint, lambda content: content.update(change) or content["config"].update(job=ESCAPE))
    for words in (
        ["show", checkpoint, "--tensors", "--config"],
        ["list", checkpoint.parent],
        ["diff", checkpoint, other],
    ):
        checkpoint_script.main(list(map(str, words)))
    shown = capsys.readouterr().out
    assert shown.count("\\x1b[2J\\x1b]0;owned\\x07\\u202e") >= 5
    assert printable(shown) == shown


def test_errors_and_lines_are_cleaned_and_bounded():
    assert str(UserError(f"{ESCAPE}\rx\ud800\ty\n")) == "\\x1b[2J\\x1b]0;owned\\x07\\u202e\\rx\\ud800\ty\n"
    assert MAX_MESSAGE_CHARACTERS < len(str(ConfigError("x" * 10**6))) < MAX_MESSAGE_CHARACTERS + 100
    out = io.StringIO()
    with Console(out=out, err=out) as console:
        console.line(ESCAPE)
        console.warning(ESCAPE)
        console.table(ESCAPE, [(ESCAPE, f"a{ESCAPE}\nb")])
        with console.progress(ESCAPE):
            pass
    assert "\x1b" not in out.getvalue()
    assert out.getvalue().count("owned") == 7


# --------------------------------------------------------------------------- text


def test_a_document_in_jsonl_has_a_bound(tmp_path, monkeypatch):
    monkeypatch.setattr(text, "MAX_LINE_BYTES", 1 << 20)
    monkeypatch.setattr(text, "PIECE_BYTES", 1 << 19)
    lines = [json.dumps({"text": letter * n}) for letter, n in (("a", 9), ("b", 3 << 20), ("c", 600_000), ("d", 9))]
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    bad = BadFiles(1)
    assert [t[:2] for t in documents(str(tmp_path / "a.jsonl"), "text", bad)] == ["aa", "cc", "dd"]
    assert bad.messages == [f"{tmp_path}/a.jsonl:2: the line is longer than 1,048,576 bytes"]


def test_a_parquet_dictionary_is_not_unfolded(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    column = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * 1_000), ["x" * MIB])
    parquet.write_table(pyarrow.table({"text": column}), tmp_path / "a.parquet")
    next(documents(str(tmp_path / "a.parquet")))  # pyarrow's own memory

    def read():
        assert sum(len(document) for document in documents(str(tmp_path / "a.parquet"))) == 1_000 * MIB

    assert held(read) < 64 * MIB


# --------------------------------------------------------------------------- the run folder

WHOLE = {"state": "failed", "step": 3, "reason": "", "time": 1.5}


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", "3", json.dumps(WHOLE | {"time": "x"}), json.dumps(WHOLE | {"step": None})]
)
def test_a_status_of_another_form_is_none(tmp_path, content):
    (tmp_path / "status.json").write_text(json.dumps(WHOLE))
    assert read_status(tmp_path) == WHOLE
    (tmp_path / "status.json").write_text(content)
    assert read_status(tmp_path) == {}


@pytest.mark.parametrize(
    "line", ["[" * 100_000, '{"step": Infinity}', '{"step": "2"}', '{"step": NaN}', "x" * (3 << 20)]
)
def test_a_metrics_line_of_another_form_is_unreadable(tmp_path, line):
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1}}\n{line}\n{{"step": 2}}\n{{"step": 3}}\n')
    assert cut_back(path, 2) >= 1
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


SAVED = {
    "run": {"step": 1},
    "data": {"next_sample": 8, "sources": {"a": {"fingerprint": "x", "cursors": {"0": [1, 2, 3]}}}},
}


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (("run",), None),
        (("run", "step"), "x"),
        (("run", "skipped"), 1),
        (("data",), []),
        (("data", "next_sample"), -1),
        (("data", "sources"), None),
        (("data", "sources", "a"), {}),
        (("data", "sources", "a", "cursors"), {"0": [1, 2]}),
        (("data", "sources", "a", "sizes"), [2**70]),
    ],
)
def test_a_saved_state_of_another_form(place, value):
    saved = json.loads(json.dumps(SAVED))
    check_saved_state(saved)
    at = saved
    for key in place[:-1]:
        at = at[key]
    at[place[-1]] = value
    with pytest.raises(UserError, match=TRAINER_NAME):
        check_saved_state(saved)


@pytest.mark.parametrize(
    "content", ["[" * 100_000, "[]", "{}", '{"settings": []}', '{"settings": {"inputs": "\\ud800"}}']
)
def test_a_preparation_of_another_form(tmp_path, content):
    (tmp_path / "prepare.json").write_text(content)
    with pytest.raises(UserError, match=r"prepare.json|other settings"):
        is_finished(tmp_path, Settings([], "text", "0", 1, 0.0))
