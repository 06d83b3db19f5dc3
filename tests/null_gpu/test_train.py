"""The whole life of a job on CUDA: start, steps, validation, profile, asynchronous checkpoints, resume."""

import json
from pathlib import Path

import pytest

from tests.end_to_end.launch import ROOT, finish, start

PROGRAM = Path(__file__).with_name("train.py")
WORDS = (
    "--model.dim 256 --model.n_layers 2 --model.n_heads 4 --model.n_kv_heads 2 --model.ffn_dim 512 "
    "--model.vocab_size 4096 --training.seq_len 256 --training.micro_batch_size 2 --training.global_batch_size 8 "
    """--tokenizer.path '""' --job.output_dir run --compile.enable false --metrics.interval 1 """
    """--data.sources '[{name = "r", kind = "synthetic", document_length = 100}]' --data.document_mask true """
    """--validation.sources '[{name = "v", kind = "synthetic"}]' --validation.interval 3 """
    "--checkpoint.mode async --checkpoint.interval 2 --profile.start_step 3 --profile.memory_snapshot true"
)


def steps_of(run: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.long
def test_a_job_runs_saves_and_goes_on_with_two_devices(tmp_path, null_gpus):
    run, job = tmp_path / "run", ROOT / "configs" / "llama_1b.toml"
    outcome = finish(start(tmp_path, f"{WORDS} --training.steps 5", config=job, env=null_gpus, program=PROGRAM))
    assert outcome.code == 0, outcome.out + outcome.err
    assert "NVIDIA H200" in outcome.out
    assert "step-00000004: committed" in outcome.out
    assert "validation loss" in outcome.out  # of zeros over zero tokens: the device has no values
    assert steps_of(run) == [1, 2, 3, 4, 5]
    last = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < last["memory_peak_bytes"] <= last["memory_reserved_peak_bytes"]
    assert 0 < last["memory_percent"] < 5
    assert (last["allocator_retries"], last["allocator_ooms"]) == (0, 0)
    assert "reserved (" in outcome.out
    assert {*last["plan"]} == {"step_seconds", "data_seconds", "memory_peak_bytes"}
    assert last["plan"]["memory_peak_bytes"]["measured"] == last["memory_peak_bytes"]
    assert last["plan"]["memory_peak_bytes"]["planned"] == pytest.approx(last["memory_peak_bytes"], rel=0.1)
    assert "the largest difference" in outcome.out
    assert {file.name for file in (run / "profile").iterdir()} == {
        "step-00000003-rank-0.json.gz",
        "step-00000003-rank-0.memory.pickle",
    }

    more = f"{WORDS} --training.steps 8 --compile.enable true"
    outcome = finish(start(tmp_path, more, ranks=2, config=job, env=null_gpus, program=PROGRAM))
    assert outcome.code == 0, outcome.out + outcome.err
    assert "resuming from step 5" in outcome.out
    assert steps_of(run) == [1, 2, 3, 4, 5, 6, 7, 8]
    assert json.loads((run / "status.json").read_text())["state"] == "done"
