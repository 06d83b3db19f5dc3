"""The mean of checkpoints, and the average that one holds."""

import pytest
import torch

from checkpoint.export.average import average
from checkpoint.index import read_metadata
from checkpoint.manifest import read_manifest
from checkpoint.tensor_stream import read_tensor
from configs.errors import UserError
from scripts import checkpoint as script
from tests.unit.hf_support import TINY, make_model, write_checkpoint

NOTHING = lambda done, total: None  # noqa: E731


def written(folder, model, *further):
    tensors = {f"model.{name}": parameter.detach() for name, parameter in model.named_parameters()}
    return write_checkpoint(folder, [*tensors.items(), *further], model.config)


def weights(folder):
    metadata = read_metadata(folder)
    return {name: read_tensor(folder, metadata, name) for name in metadata.state_dict_metadata}


def test_the_mean_of_three(tmp_path):
    models = [make_model(TINY["untied"]) for _ in range(3)]
    for number, model in enumerate(models):
        torch.manual_seed(number)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter)
    folders = [written(tmp_path / f"step-0000000{n}", model) for n, model in enumerate(models)]
    average(folders, tmp_path / "mean", NOTHING)
    found = weights(tmp_path / "mean")
    assert found.keys() == {f"model.{name}" for name, _ in models[0].named_parameters()}
    for name, first in models[0].named_parameters():
        exact = sum(dict(model.named_parameters())[name].detach().double() for model in models) / 3
        assert torch.equal(found[f"model.{name}"], exact.to(first.dtype))
    assert read_manifest(tmp_path / "mean").config["model"] == read_manifest(folders[0]).config["model"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_average_of_one_and_what_is_not_averaged(tmp_path, dtype):
    """The average is kept in a type of its own, and written in the weight's."""
    model = make_model(TINY["untied"])
    name, parameter = next(model.named_parameters())
    kept = torch.randn_like(parameter, dtype=dtype)
    folder = written(tmp_path / "step-00000001", model, (f"average.{name}", kept), ("average_updates", torch.tensor(3)))
    average([folder], tmp_path / "average", NOTHING)
    found = weights(tmp_path / "average")
    assert found[f"model.{name}"].dtype == torch.float32
    assert torch.equal(found.pop(f"model.{name}"), kept.float())
    rest = {f"model.{other}": p for other, p in model.named_parameters() if other != name}
    assert found.keys() == rest.keys()
    assert all(torch.equal(found[other], rest[other]) for other in rest)


def test_the_mean_of_copies_and_an_average_that_has_not_begun(tmp_path):
    """Copies that were not made yet, whose step is 0, are left out; weights that have none are taken as they are."""
    model = make_model(TINY["untied"])
    name, parameter = next(model.named_parameters())
    copies = [torch.randn_like(parameter) for _ in range(3)]
    kept = [(f"average.{index}.{name}", copy) for index, copy in enumerate(copies)]
    for steps, expected in (([20, 0, 10], (copies[0] + copies[2]) / 2), ([0, 9, 0], copies[1]), ([0, 0, 0], None)):
        folder = tmp_path / f"step-{sum(steps):08d}"
        written(folder, model, *kept, ("average_updates", torch.tensor(steps)))
        output = tmp_path / f"average-{sum(steps)}"
        if expected is None:
            with pytest.raises(UserError, match=r"the average has not begun yet; it does so after average\.start_step"):
                average([folder], output, NOTHING)
        else:
            average([folder], output, NOTHING)
            found = weights(output)
            assert torch.equal(found.pop(f"model.{name}"), expected)
            rest = {f"model.{other}": p for other, p in model.named_parameters() if other != name}
            assert found.keys() == rest.keys()
            assert all(torch.equal(found[other], rest[other]) for other in rest)


def test_what_is_refused(tmp_path, capsys):
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    one = written(tmp_path / "run/checkpoints/step-00000001", make_model(TINY["untied"]))
    with pytest.raises(UserError, match="no average of the weights; name several checkpoints"):
        average([one], tmp_path / "out", NOTHING)
    other = written(tmp_path / "step-00000002", make_model(TINY["tied"]))
    with pytest.raises(UserError, match="is of another model"):
        average([one, other], tmp_path / "out", NOTHING)
    assert script.main(["average", str(tmp_path / "run"), str(tmp_path / "out"), "--last", "2"]) == 1
    assert f"--last 2: {tmp_path}/run/checkpoints has only 1" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
