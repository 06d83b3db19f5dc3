"""The launch file for preparations, handed in to a real Slurm whose nodes are on this machine."""

import json
import os
import sys
from pathlib import Path

import pytest

from tests.end_to_end.launch import ROOT
from tests.preparing import prepare
from tests.slurm.cluster import Cluster, Job
from trainer.data.tokenizer import train_sentencepiece

pytestmark = pytest.mark.slow


def submit(slurm: Cluster, folder: Path, options: list[str], **environment: str) -> Job:
    path = f"{Path(sys.executable).parent}:{slurm.packages}/usr/bin:{os.environ['PATH']}"
    words = [str(folder / "text"), "--tokenizer", str(folder / "t.model"), "--drop-duplicates"]
    words += ["--output", str(folder / "out"), "--validation-fraction", "0.1"]
    everything = ["--cpus-per-task=1", f"--output={folder}/%A-%a.log", *options]
    script = ROOT / "scripts/launch/slurm_prepare.sh"
    return slurm.submit(script, words, everything, {"PATH": path, **environment}, cwd=ROOT)


def logs(folder: Path) -> str:
    return "\n".join(path.read_text() for path in sorted(folder.glob("*.log")))


def content(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_array_of_shards_and_the_job_that_depends_on_it_give_the_bytes_of_one_process(slurm, tmp_path):
    texts = [f"def function_{i % 3000}(x):\n    return x + {i % 3000}\n" * 9 for i in range(9600)]
    (tmp_path / "text").mkdir()
    for i in range(4):  # of a megabyte each, so that each becomes a token file
        lines = [json.dumps({"text": text}) + "\n" for text in texts[i::4]]
        (tmp_path / "text" / f"{i}.jsonl").write_text("".join(lines))
    train_sentencepiece(iter(texts[:50]), tmp_path / "t.model", 300)
    inputs = [str(tmp_path / "text")]
    prepare(inputs, tmp_path / "one", tmp_path / "t.model", validation_fraction=0.1, drop_duplicates=True)

    some = submit(slurm, tmp_path, ["--array=0,2"], KEEL_SHARDS="3")
    early = submit(slurm, tmp_path, [f"--dependency=afterok:{some.number}"])
    assert early.end() == ("FAILED", "1:0"), logs(tmp_path)
    assert "1 of 3 shards are not finished: 1." in logs(tmp_path)
    rest = submit(slurm, tmp_path, ["--array=0-2%2"])  # 0 and 2 look at what they have made
    last = submit(slurm, tmp_path, [f"--dependency=afterok:{rest.number}"])
    assert last.end() == ("COMPLETED", "0:0"), logs(tmp_path)
    said = [line for line in logs(tmp_path).splitlines() if line.startswith("shard ")]
    assert sum("0 were written now" in line for line in said) == 2
    assert len(said) == 5
    assert content(tmp_path / "out") == content(tmp_path / "one")
