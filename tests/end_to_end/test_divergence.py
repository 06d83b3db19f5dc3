"""A launch whose ranks run different code: it ends before a step is applied, and says which rank and where."""

from pathlib import Path

import pytest

from tests.end_to_end.launch import ROOT, launch, status

pytestmark = pytest.mark.slow

PROGRAM = f"""
import os, sys
sys.path.insert(0, {str(ROOT)!r})
import trainer.step
build_model = trainer.step.build_model

def with_two_layers_swapped(config):
    model = build_model(config)
    layers = model.layers._modules
    layers.update({{name: layers.pop(name) for name in ("1", "0")}})
    return model

if os.environ["RANK"] == "1":
    trainer.step.build_model = with_two_layers_swapped
import train
code = train.main()
sys.stderr.flush()
os._exit(code)
"""


def test_swapped_collectives_end_the_run(tmp_path: Path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    words = "--comm.prefetch 0 --comm.streams per_group"
    message = launch(tmp_path, words, ranks=2, expect=1, program=program).said
    assert message.count("the ranks issue their collectives in different orders") == 1
    assert "in step 1 of this launch, rank 1 issued as number" in message
    assert "for layers.0 (among ranks 0, 1). The step was not applied." in message
    assert 'Traceback (most recent call last):\n  File "' + str(ROOT) not in message
    said = status(tmp_path / "run")
    assert (said["state"], said["step"]) == ("failed", 0)
    assert "rank 1 issued as number" in said["reason"]
    assert not list((tmp_path / "run" / "checkpoints").glob("step-*"))
