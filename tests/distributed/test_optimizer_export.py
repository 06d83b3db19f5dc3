"""Exports of the optimizer's state: what plain torch makes of them, what they hold in memory, what they refuse."""

import json
import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from checkpoint.manifest import read_manifest, step_folder
from checkpoint.safe_read import read_metadata
from checkpoint.tensor_stream import read_tensor
from configs.schema import Config
from scripts.export_optimizer import main
from tests.conftest import ROOT
from tests.distributed.test_owner_training import manager_of, plain_backward, plain_model, set_plain_lr
from tests.torture.resume import curve, go_on
from trainer.data.loader import build_loader

FLOAT64 = "--training.dtype float64 --training.compute_dtype float64 --training.reduce_dtype float64"
RUN = f"{FLOAT64} --metrics.tensorboard false --training.micro_batch_size 4 --training.max_norm 0.5"
EXPERTS = "--model.n_experts 4 --model.experts_per_token 2 --model.ffn_dim 16"
MUON = "--optimizer.name muon --fsdp.partition owner"
CLASSES = {"adamw": torch.optim.AdamW, "muon": torch.optim.Muon}
SAVED, LAST = 3, 6


def train(ranks, n, folder, words, last=SAVED):
    """A run up to step `last`; returns the newest checkpoint."""
    ranks(n, go_on, str(folder), last, tuple(f"{RUN} {words}".split()))
    return step_folder(folder / "checkpoints", last)


def export(checkpoint, output, gather="all", *words):
    assert main([str(checkpoint), str(output), "--gather", gather, *words]) == 0
    return json.loads((output / "index.json").read_text())


def loaded(output, name="adamw"):
    return torch.load(output / f"{name}.pt", weights_only=True)


def plain_torch_goes_on(checkpoint, output):
    """Losses of the steps after the checkpoint, by nothing but torch and the export."""
    config = Config.model_validate_json(json.dumps(read_manifest(checkpoint).config))
    metadata, model = read_metadata(checkpoint), plain_model(config, seed=99)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read_tensor(checkpoint, metadata, f"model.{name}"))
    optimizers = []
    for path in sorted(output.glob("*.pt")):
        state = torch.load(path, weights_only=True, mmap=True)
        groups = [[model.get_parameter(name) for name in group["param_names"]] for group in state["param_groups"]]
        optimizer = CLASSES[path.stem]([{"params": group} for group in groups])
        optimizer.load_state_dict(state)
        optimizers.append(optimizer)
    loader = build_loader(config, 0, 1, start_sample=SAVED * config.training.global_batch_size)
    losses = []
    for step, micro_batches in zip(range(SAVED, LAST), loader, strict=False):
        losses.append(plain_backward(model, config, micro_batches))
        for optimizer in optimizers:
            set_plain_lr(optimizer, config, step)
            optimizer.step()
    loader.close()
    return losses


CASES = {
    "FSDP 2 x TP 2": (4, "--mesh.tp 2"),
    "PP 2": (2, "--mesh.pp 2"),
    "owner 2, AdamW": (2, "--mesh.dp_replicate 2 --mesh.dp_shard 1 --fsdp.partition owner"),
    "owner 2, Muon": (2, f"--mesh.dp_replicate 2 --mesh.dp_shard 1 {MUON}"),
}


@pytest.mark.parametrize("name", CASES)
def test_plain_torch_goes_on(ranks, tmp_path, name):
    n, words = CASES[name]
    checkpoint = train(ranks, n, tmp_path / "run", words)
    export(checkpoint, tmp_path / "out")
    train(ranks, n, tmp_path / "run", words, LAST)
    expected = [loss for _, loss, _ in curve(tmp_path / "run")][SAVED:]
    assert plain_torch_goes_on(checkpoint, tmp_path / "out") == pytest.approx(expected, rel=1e-12)


def test_the_next_learning_rate_and_the_moments_type(ranks, tmp_path):
    words = "--checkpoint.optimizer_dtype bfloat16 --checkpoint.interval 1"
    checkpoint = train(ranks, 2, tmp_path / "run", words)
    index = export(checkpoint, tmp_path / "out")
    train(ranks, 2, tmp_path / "run", words, LAST)
    state = loaded(tmp_path / "out")
    records = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert {group["lr"] for group in state["param_groups"]} == {records[SAVED]["lr"]}
    metadata = read_metadata(checkpoint)
    for name, described in index["optimizers"]["adamw"]["parameters"].items():
        entry = state["state"][described["number"]]
        assert entry["step"] == SAVED
        for key in ("exp_avg", "exp_avg_sq"):
            assert entry[key].dtype == torch.bfloat16
            assert torch.equal(entry[key], read_tensor(checkpoint, metadata, f"optimizer.{name}.{key}"))
            assert described["state"][key]["shape"] == list(entry[key].shape)


def test_experts_stay_as_they_lie(ranks, tmp_path):
    checkpoint = train(ranks, 2, tmp_path / "run", EXPERTS)
    export(checkpoint, tmp_path / "all")
    index = export(checkpoint, tmp_path / "dense", "dense")
    whole, dense = loaded(tmp_path / "all"), loaded(tmp_path / "dense")
    owners = sorted(path.name for path in (tmp_path / "dense").glob("adamw-experts-*.pt"))
    assert owners == [f"adamw-experts-0000{n}-of-00002.pt" for n in (1, 2)]
    assert dense["param_groups"] == whole["param_groups"]
    assert dense["state"].keys() == whole["state"].keys()
    parameters = index["optimizers"]["adamw"]["parameters"]
    meta = set()
    for name, described in parameters.items():
        number = described["number"]
        for key, expected in whole["state"][number].items():
            found = dense["state"][number][key]
            assert (found.shape, found.dtype) == (expected.shape, expected.dtype)
            if found.is_meta:
                meta.add(name)
                dense["state"][number][key] = found = put_together(tmp_path / "dense", number, key, described["state"])
            assert torch.equal(found, expected)
    assert meta == {name for name in parameters if ".experts." in name} != set()
    largest = max(tensor.nbytes for state in loaded(tmp_path / "all")["state"].values() for tensor in state.values())
    for owner in owners:
        [first, *_] = torch.load(tmp_path / "dense" / owner, weights_only=True)["state"].values()
        assert first["exp_avg"].shape == (2, 16, 32)  # half of the experts
    assert largest == 256 * 32 * 8


def put_together(folder, number, key, entries):
    """A tensor from its owners' parts, as the index says."""
    entry = entries[key]
    whole = torch.full(entry["shape"], torch.nan, dtype=getattr(torch, entry["dtype"]))
    for part in entry["parts"]:
        box = tuple(slice(start, start + n) for start, n in zip(part["offsets"], part["shape"], strict=True))
        owner = torch.load(folder / part["file"], weights_only=True, mmap=True)
        assert owner["offsets"][number][key] == part["offsets"]
        whole[box] = owner["state"][number][key]
    return whole


def test_a_dense_export_is_not_loaded_without_its_experts(ranks, tmp_path):
    """Rather than going on with their moments at zero."""
    checkpoint = train(ranks, 1, tmp_path / "run", EXPERTS, last=1)
    export(checkpoint, tmp_path / "dense", "dense")
    state = loaded(tmp_path / "dense")
    shapes = {number: state["state"][number]["exp_avg"].shape for number in state["state"]}
    groups = [[torch.zeros(shapes[number]) for number in group["params"]] for group in state["param_groups"]]
    with pytest.raises(NotImplementedError, match="meta tensor"):
        torch.optim.AdamW([{"params": group} for group in groups]).load_state_dict(state)


def test_a_budget(ranks, tmp_path, capsys):
    checkpoint = train(ranks, 2, tmp_path / "run", EXPERTS, last=1)
    needed = 256 * 32 * 8 * 3 // 2  # the embedding's moment, and one of two parts on its way into it
    words = [str(checkpoint), str(tmp_path / "out"), "--gather", "all"]
    assert main([*words, "--max-bytes", str(needed - 1)]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert f"takes {needed:,} bytes of memory to export, and {needed - 1:,} are allowed or free (--max-bytes)" in told
    assert not (tmp_path / "out").exists()
    assert main([*words, "--max-bytes", str(needed)]) == 0


def test_what_cannot_be_exported(ranks, tmp_path, capsys):
    checkpoint = train(ranks, 1, tmp_path / "run", "", last=1)
    words = [str(checkpoint), str(tmp_path / "out"), "--gather", "all"]
    assert main([str(tmp_path), *words[1:]]) == 1
    assert "is not a checkpoint" in capsys.readouterr().err
    path = checkpoint / "__0_0.distcp"
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert main(words) == 1
    assert "__0_0.distcp has changed" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    (tmp_path / "out").mkdir()
    assert main([*words, "--verify", "size"]) == 1
    assert "exists; name another folder" in capsys.readouterr().err


# --------------------------------------------------------------------------- memory

MEMORY = """
import sys
from pathlib import Path
import torch
from checkpoint.export.optimizer_export import export_optimizer
from checkpoint.export.torch_file import Later, write_torch_file
from tests.held import held

checkpoint, out, gather = sys.argv[1:]
write_torch_file(Path(out + ".warm"), [Later((1,), torch.float32, lambda: torch.zeros(1))])  # its imports
names = [f"layers.{n}.experts.w" for n in range(6)]
parameters = [(name, torch.nn.Parameter(torch.empty(64, 256, 256, device="meta"))) for name in names]
optimizer = torch.optim.AdamW([{"params": parameters}])
optimizer.state.update({p: {"exp_avg": torch.empty_like(p)} for _, p in parameters})
state = optimizer.state_dict()
print(held(lambda: export_optimizer(Path(checkpoint), Path(out), {"adamw": state}, names, gather, 1 << 30)))
"""
LARGEST = 64 * 256 * 256 * 4


def save_large(folder, n_tensors=6):
    """State of 100 MB in tensors of 17 MB, cut over the ranks."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(64, 256, 256)
    names = [f"optimizer.layers.{n}.experts.w.exp_avg" for n in range(n_tensors)]
    state = {name: distribute_tensor(whole, mesh, [Shard(0)], src_data_rank=None) for name in names}
    manager = manager_of(folder)
    manager.resume(state)
    manager.begin_line()
    manager.save(1, state, {"tokens": 1})
    manager.close()


@pytest.mark.parametrize(("gather", "tensors"), [("all", 1.5), ("dense", 0.5)])
def test_no_more_than_one_gathered_tensor_is_held(ranks, tmp_path, gather, tensors):
    """One, and the part of a rank on its way into it; with experts left as they lie, no more than a part."""
    ranks(2, save_large, tmp_path / "checkpoints")
    checkpoint = step_folder(tmp_path / "checkpoints", 1)
    command = [sys.executable, "-c", MEMORY, checkpoint, tmp_path / "out", gather]
    # glibc gives back at once what it has mapped, as it maps all above 32 MiB; the tensors here are smaller than that.
    env = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    peak = int(done.stdout)
    print(f"--gather {gather}: {peak:,} bytes held at the peak, the largest tensor has {LARGEST:,}")
    assert (tensors - 0.3) * LARGEST < peak < (tensors + 0.3) * LARGEST
    size = sum(path.stat().st_size for path in (tmp_path / "out").glob("*.pt"))
    assert 6 * LARGEST < size < 6 * LARGEST + 100_000
