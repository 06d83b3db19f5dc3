"""What a launch says of the text that it reads."""

import io
from types import SimpleNamespace
from typing import Any, cast

import pytest

from configs.errors import UserError
from configs.schema import Source
from trainer.data.text.bad_files import BINARY
from trainer.lifecycle import StopRequest
from trainer.preparation import _look_at_text
from trainer.report.console import Console


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
