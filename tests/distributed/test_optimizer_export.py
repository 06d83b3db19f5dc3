"""Exports of the optimizer's state: what plain torch makes of them, and what they refuse."""

import json

import pytest
import torch

from checkpoint.index import read_metadata
from checkpoint.manifest import read_manifest, step_folder
from checkpoint.tensor_stream import read_tensor
from configs.schema import Config
from scripts.export_hf import main
from tests.distributed.test_owner_training import plain_backward, plain_model, set_plain_lr
from tests.marked import marked
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
    assert main([str(checkpoint), str(output), "--optimizer", "--gather", gather, *words]) == 0
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


@pytest.mark.parametrize(
    "name", marked(CASES, slow=["FSDP 2 x TP 2", "PP 2", "owner 2, Muon"], long=["owner 2, AdamW"])
)
def test_plain_torch_goes_on(ranks, tmp_path, name):
    n, words = CASES[name]
    checkpoint = train(ranks, n, tmp_path / "run", words)
    export(checkpoint, tmp_path / "out")
    train(ranks, n, tmp_path / "run", words, LAST)
    expected = [loss for _, loss, _ in curve(tmp_path / "run")][SAVED:]
    assert plain_torch_goes_on(checkpoint, tmp_path / "out") == pytest.approx(expected, rel=1e-12)


@pytest.mark.slow
def test_the_next_learning_rate_and_the_moments_type(ranks, tmp_path):
    words = "--optimizer.moments_dtype bfloat16 --checkpoint.interval 1"
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


BY_OWNER = "--fsdp.partition owner --mesh.dp_replicate 4 --mesh.ep 2"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("n", "mesh"), [(2, ""), pytest.param(4, BY_OWNER, marks=pytest.mark.slow)], ids=["FSDP 2", "owner 4 x EP 2"]
)
def test_experts_stay_as_they_lie(ranks, tmp_path, n, mesh):
    batch = "--training.micro_batch_size 2" if n == 4 else ""
    checkpoint = train(ranks, n, tmp_path / "run", f"{EXPERTS} {mesh} {batch}")
    export(checkpoint, tmp_path / "all")
    index = export(checkpoint, tmp_path / "dense", "dense")
    whole, dense = loaded(tmp_path / "all"), loaded(tmp_path / "dense")
    owners = sorted(path.name for path in (tmp_path / "dense").glob("adamw-experts-*.pt"))
    assert owners == [f"adamw-experts-0000{rank + 1}-of-0000{n}.pt" for rank in range(n)]
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


def gathered_bytes(output):
    entries = loaded(output)["state"].values()
    return sum(tensor.nbytes for entry in entries for tensor in entry.values() if not tensor.is_meta)


@pytest.mark.slow
def test_what_the_memory_has_no_room_for(ranks, tmp_path, capsys, monkeypatch):
    checkpoint = train(ranks, 2, tmp_path / "run", EXPERTS, last=1)
    export(checkpoint, tmp_path / "all")
    export(checkpoint, tmp_path / "dense", "dense")
    whole = gathered_bytes(tmp_path / "all")
    free = gathered_bytes(tmp_path / "dense")
    words = [str(checkpoint), str(tmp_path / "out"), "--optimizer"]
    monkeypatch.setattr("scripts.export.optimizer.free_memory", lambda: free)
    assert main([*words, "--gather", "all"]) == 1
    told = " ".join(capsys.readouterr().err.split())
    assert f"adamw takes {whole:,} bytes of memory, and {free:,} are free; to gather less" in told
    assert not (tmp_path / "out").exists()
    assert main(words) == 0  # dense


@pytest.mark.slow
def test_what_stays_by_pattern(ranks, tmp_path, capsys):
    checkpoint = train(ranks, 2, tmp_path / "run", "", last=1)
    index = export(checkpoint, tmp_path / "out", "*.mlp.up_proj.*=stay", "--gather", "embed*=stay")
    parameters = index["optimizers"]["adamw"]["parameters"]
    apart = {name for name, each in parameters.items() if len(each["state"]["exp_avg"]["parts"]) == 2}
    assert apart == {name for name in parameters if name.startswith("embed") or "up_proj" in name}
    words = [str(checkpoint), str(tmp_path / "other"), "--optimizer"]
    for gather, reason in (
        (["*.up_porj.*=stay"], "matches no parameter; the nearest names are"),
        (["all", "*=stay"], "--gather all: choose all, dense, or one or more of"),
        (["*=leave"], "--gather *=leave: choose all, dense"),
    ):
        assert main([*words, *(word for each in gather for word in ("--gather", each))]) == 1
        assert reason in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize("words", ["--gather all", "--optimizer --dtype bfloat16"])
def test_options_of_the_other_export(capsys, words):
    with pytest.raises(SystemExit):
        main(["checkpoint", "out", *words.split()])
    assert "--optimizer" in capsys.readouterr().err


def test_what_cannot_be_exported(ranks, tmp_path, capsys):
    checkpoint = train(ranks, 1, tmp_path / "run", "", last=1)
    words = [str(checkpoint), str(tmp_path / "out"), "--optimizer"]
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
    wider = train(ranks, 1, tmp_path / "wider", "--model.mup_base_dim 16", last=1)
    assert main([str(wider), str(tmp_path / "other"), "--optimizer"]) == 1
    assert "can't be exported with muP (model.mup_base_dim)" in capsys.readouterr().err
