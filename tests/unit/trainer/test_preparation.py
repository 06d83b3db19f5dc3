"""What a launch says of the text that it reads."""

import io
import signal
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace
from typing import Any, cast

import pytest
from sentencepiece import SentencePieceTrainer

from configs.errors import UserError
from configs.schema import Prepare, Source
from scripts.prepare_data import main as prepare_data
from trainer.data.text.bad_files import BINARY
from trainer.data.tokenizer import train_sentencepiece
from trainer.lifecycle import StopRequest
from trainer.preparation import PreparationStopped, _look_at_text, _write_token_files
from trainer.report.console import Console


def test_an_empty_output_is_prepared_like_one_that_is_not_there(tmp_path):
    """With words on what was done, and an end at a signal."""
    (tmp_path / "text.txt").write_text("some text\n" * 99)
    train_sentencepiece(iter(["some text\n" * 99]), tmp_path / "t.model", 268)
    output = tmp_path / "out"
    output.mkdir()
    wanted = Prepare.model_validate({"input": [str(tmp_path / "text.txt")], "output": str(output)})
    parts = {"job": SimpleNamespace(folder=tmp_path / "run"), "training": SimpleNamespace(seq_len=8)}
    config = cast(Any, SimpleNamespace(**parts, checkpoint=SimpleNamespace(load="latest", go_back=False)))
    out = io.StringIO()
    stop = StopRequest()
    stop.signal_number = signal.SIGTERM
    with pytest.raises(PreparationStopped):
        _write_token_files(config, wanted, str(tmp_path / "t.model"), Console(out=out), stop)
    _write_token_files(config, wanted, str(tmp_path / "t.model"), Console(out=out), StopRequest())
    assert f"{output}/train: 1 documents" in out.getvalue()


def test_sources_of_text_say_what_is_not_read(tmp_path):
    (tmp_path / "logo.png").write_bytes(b"\0\xff")
    (tmp_path / "a.py").write_text("text")
    out = io.StringIO()
    source = {"name": "x", "kind": "text", "path": str(tmp_path)}
    parts = {"validation": SimpleNamespace(interval=0), "tokenizer": SimpleNamespace(path=None)}
    config = cast(Any, SimpleNamespace(**parts, data=SimpleNamespace(sources=[Source.model_validate(source)])))
    _look_at_text(config, Console(out=out), StopRequest())
    assert out.getvalue() == f"{tmp_path}: skipped: 1 {BINARY}: {tmp_path}/logo.png\n"
    for name in "bc":
        (tmp_path / f"{name}.py").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"2 unreadable(.|\n)*b\.py(.|\n)*c\.py"):
        _look_at_text(config, Console(out=out), StopRequest())


def test_a_tokenizer_that_drops_a_part_of_texts_is_a_warning_where_it_is_used(tmp_path):
    (tmp_path / "a.txt").write_text("some text\n" * 99)
    name = str(tmp_path / "own")
    texts = {"sentence_iterator": iter(["some text a b c"] * 9), "vocab_size": 11, "minloglevel": 2}
    SentencePieceTrainer.train(**texts, model_prefix=name, bos_id=-1, eos_id=-1)
    source = {"name": "x", "kind": "text", "path": str(tmp_path / "a.txt")}
    parts = {"validation": SimpleNamespace(interval=0), "tokenizer": SimpleNamespace(path=f"{name}.model")}
    parts |= {"data": SimpleNamespace(sources=[Source.model_validate(source)])}
    parts |= {"job": SimpleNamespace(folder=tmp_path / "run"), "training": SimpleNamespace(seq_len=8)}
    config = cast(Any, SimpleNamespace(**parts, checkpoint=SimpleNamespace(load="latest", go_back=False)))
    out = io.StringIO()
    _look_at_text(config, Console(out=out, err=out), StopRequest())
    wanted = Prepare.model_validate({"input": [source["path"]], "output": str(tmp_path / "out")})
    _write_token_files(config, wanted, f"{name}.model", Console(out=out, err=out), StopRequest())
    output = ["--output", str(tmp_path / "again"), "--tokenizer", f"{name}.model", "--processes", "1"]
    with redirect_stdout(out), redirect_stderr(out):
        assert prepare_data([source["path"], *output]) == 0
    said = out.getvalue()
    assert said.count("neither BOS nor EOS") == said.count(r"'a\n\n\tb  c' becomes 'a b c'") == 3
