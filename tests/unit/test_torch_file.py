"""Files as torch.save writes them, made a tensor at a time. Fails first when torch changes what the module leans on."""

import weakref

import pytest
import torch

from checkpoint.export.torch_file import Later, write_torch_file

TENSORS = [
    torch.randn(3, 50),
    torch.randn(7).bfloat16(),
    torch.tensor(4.0),
    torch.zeros(0, 3),
    torch.randn(5, 4).double().t(),
    torch.arange(9),
]


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_loads_what_was_written(tmp_path, mmap):
    alive, most = weakref.WeakSet(), []

    def make(tensor):
        alive.add(made := tensor.clone())
        most.append(len(alive))
        return made

    later = [Later(tuple(t.shape), t.dtype, lambda t=t: make(t)) for t in TENSORS]
    content = {"state": {3: {"a": later[0], "b": later[1]}, 5: later[2:]}, "groups": [{"betas": (0.9, 0.95)}]}
    content["meta"] = torch.empty(4, 5, device="meta", dtype=torch.bfloat16)
    write_torch_file(tmp_path / "file.pt", content)
    found = torch.load(tmp_path / "file.pt", weights_only=True, mmap=mmap)
    for tensor, expected in zip([*found["state"][3].values(), *found["state"][5]], TENSORS, strict=True):
        assert tensor.dtype == expected.dtype
        assert torch.equal(tensor, expected)
    assert found["groups"] == content["groups"]
    assert found["meta"].is_meta
    assert (found["meta"].shape, found["meta"].dtype) == ((4, 5), torch.bfloat16)
    assert most == [1] * len(TENSORS)


def test_a_tensor_other_than_announced(tmp_path):
    with pytest.raises(ValueError, match=r"float64 of \[3\] has no room"):
        write_torch_file(tmp_path / "file.pt", [Later((3,), torch.float32, lambda: torch.zeros(3).double())])
