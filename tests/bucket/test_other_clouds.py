"""Runs whose folder and token files are in Google Cloud Storage or in Azure, as their references say they answer."""

from pathlib import Path

import pytest

pytest.importorskip("obstore", reason="the client for buckets, keel[storage], is not installed")

from checkpoint.bucket import Bucket
from checkpoint.manifest import MANIFEST_NAME
from scripts import prepare_data
from scripts import runs as runs_script
from tests.bucket.clouds import Azure, Google, Kind, served
from tests.bucket.test_data_in_bucket import FILES, VOCAB, words
from tests.end_to_end.launch import curve, launch
from trainer.data.tokenizer import train_sentencepiece

pytestmark = pytest.mark.slow


@pytest.mark.parametrize(("scheme", "kind"), [("gs", Google), ("az", Azure)])
def test_the_same_bits_as_on_a_disk_from_host_to_host(
    scheme: str, kind: Kind, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    (tmp_path / "text").mkdir()
    for file in FILES[:8]:
        (tmp_path / "text" / file.name).write_bytes(file.read_bytes())
    train_sentencepiece((file.read_text() for file in FILES[:8]), tmp_path / "tokenizer.model", VOCAB)
    common = ["--tokenizer", "tokenizer.model", "--validation-fraction", "0.2", "--processes", "1"]
    monkeypatch.chdir(tmp_path)
    with served(kind) as (_, environment):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        url, data = f"{scheme}://keel/some/run", f"{scheme}://keel/data"
        assert prepare_data.main(["text", "--output", "data", *common]) == 0
        assert prepare_data.main(["text", "--output", data, *common]) == 0
        launch(tmp_path, words(tmp_path, str(tmp_path / "data"), **{"training.steps": "40"}), ranks=2)

        place = {"job.output_dir": url, "checkpoint.interval": "10", "checkpoint.keep_last": "2"}
        for host, steps in (("a", 15), ("b", 30), ("c", 40)):
            (tmp_path / host).mkdir()
            keys = words(tmp_path, data, **place, **{"training.steps": str(steps)})
            launch(tmp_path / host, keys, ranks=2, env=environment)
        assert curve(tmp_path / "c/runs" / scheme / "keel/some/run") == curve(tmp_path / "run")
        kept = {key.split("/")[1] for key in Bucket(url).list("checkpoints/")}
        complete = {key.split("/")[1] for key in Bucket(url).list("checkpoints/") if key.endswith(MANIFEST_NAME)}
        assert kept == complete == {"step-00000030", "step-00000040"}
        capsys.readouterr()
        assert runs_script.main([url]) == 0
        assert "40" in capsys.readouterr().out
