"""What a launch says of the text that it reads."""

import io
import signal
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.errors import UserError
from configs.schema import Prepare, Source
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
    config = cast(Any, SimpleNamespace(validation=SimpleNamespace(interval=0), data=SimpleNamespace(sources=[])))
    config.data.sources = [Source.model_validate(source)]
    _look_at_text(config, Console(out=out), StopRequest())
    assert out.getvalue() == f"{tmp_path}: skipped: 1 {BINARY}: {tmp_path}/logo.png\n"
    for name in "bc":
        (tmp_path / f"{name}.py").write_bytes(b"\xff")
    with pytest.raises(UserError, match=r"2 unreadable(.|\n)*b\.py(.|\n)*c\.py"):
        _look_at_text(config, Console(out=out), StopRequest())
