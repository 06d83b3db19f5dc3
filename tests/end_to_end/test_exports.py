"""`checkpoint.export_every`: a run leaves Hugging Face folders of its line, equal to those that the script makes."""

import shutil

from scripts import export_hf
from tests.end_to_end.launch import launch


def test_a_run_exports_its_checkpoints(tmp_path):
    words = "--checkpoint.interval 5 --checkpoint.export_every 10 --training.steps 30"
    launch(tmp_path, f"{words} --mesh.tp 2 --checkpoint.mode async", ranks=2)
    exports, checkpoints = tmp_path / "run/exports", tmp_path / "run/checkpoints"
    steps = ["step-00000010", "step-00000020", "step-00000030"]
    assert sorted(path.name for path in exports.iterdir()) == steps
    for step in steps:
        assert export_hf.main([str(checkpoints / step), str(tmp_path / step)]) == 0
        for file in (tmp_path / step).iterdir():
            assert (exports / step / file.name).read_bytes() == file.read_bytes()
    shutil.rmtree(exports / steps[1])
    launch(tmp_path, f"{words} --checkpoint.load 20 --checkpoint.mode sync")
    assert sorted(path.name for path in exports.iterdir()) == ["abandoned-001", *steps]
    assert [path.name for path in (exports / "abandoned-001").iterdir()] == steps[2:]
    made_again = (exports / steps[1] / "model.safetensors").read_bytes()
    assert made_again == (tmp_path / steps[1] / "model.safetensors").read_bytes()
