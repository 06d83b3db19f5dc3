"""The way back from an optimizer export: a run goes on from it with the same bits, and from what plain torch makes."""

import json

import pytest
import torch

from checkpoint.compare import compare
from checkpoint.manifest import read_manifest, step_folder
from checkpoint.safe_read import read_metadata
from checkpoint.tensor_stream import read_tensor
from configs.schema import Config
from scripts import export_optimizer
from scripts.import_optimizer import main
from tests.distributed.test_optimizer_export import EXPERTS, LAST, MUON, SAVED, export, loaded, train
from tests.distributed.test_owner_training import plain_backward, plain_model, set_plain_lr
from tests.torture.resume import curve
from trainer.data.loader import build_loader

TIED_AND_FROZEN = (
    '--model.tie_embeddings true --optimizer.groups [{pattern="layers.0.*",freeze=true},{pattern="norm*",lr_scale=0.5}]'
)
CASES = {
    # name: (ranks and mesh that save, ranks and mesh that go on, how it is exported)
    "FSDP 2 x TP 2": (4, "--mesh.tp 2", "all"),
    "experts, dense": (2, EXPERTS, "dense"),
    "by pattern": (2, EXPERTS, "*.experts.up_proj=stay"),
    "owner 2, Muon": (2, f"--mesh.dp_replicate 2 --mesh.dp_shard 1 {MUON}", "all"),
    "tied, frozen": (2, TIED_AND_FROZEN, "*.mlp.*=stay"),
    "bfloat16 moments, FSDP 2": (2, "--optimizer.moments_dtype bfloat16", "all"),
}


@pytest.mark.parametrize("name", CASES)
def test_export_import_resume(ranks, tmp_path, capsys, name):
    n, words, gather = CASES[name]
    run, again = tmp_path / "run", tmp_path / "again"
    checkpoint = train(ranks, n, run, words)
    export(checkpoint, tmp_path / "out", gather)
    imported = step_folder(again / "checkpoints", SAVED)
    assert main([str(checkpoint), str(tmp_path / "out"), str(imported)]) == 0
    said = capsys.readouterr()
    assert "the job's own settings" not in said.out + said.err
    assert not list(compare(checkpoint, imported))
    for folder in (run, again):
        train(ranks, n, folder, words, LAST)
    assert curve(again) == curve(run)[SAVED:]
    assert not list(compare(step_folder(again / "checkpoints", LAST), step_folder(run / "checkpoints", LAST)))
    [change, *_] = read_manifest(imported).run_changes
    assert (change.step, change.changes) == (SAVED, [f"optimizer state: imported from {tmp_path / 'out'}"])


def trained_outside(checkpoint, with_names, folder):
    """A plain model and torch's own AdamW, made without an export: two steps on other data; then the loss of Keel's
    next batch, and the weights after that step. Leaves weights.pt and state.pt of before it."""
    config = Config.model_validate_json(json.dumps(read_manifest(checkpoint).config))
    metadata, model = read_metadata(checkpoint), plain_model(config, seed=99)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(read_tensor(checkpoint, metadata, f"model.{name}"))
    named = list(model.named_parameters())
    settings = config.optimizer
    if with_names:  # in another order than the job's
        matrices, vectors = ([(n, p) for n, p in named[::-1] if (p.ndim > 1) == are] for are in (True, False))
    else:
        matrices, vectors = ([p for _, p in named if (p.ndim > 1) == are] for are in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    groups = groups[::-1] if with_names else groups
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(settings.betas[0], 0.9))  # and other betas than the job's
    for sample in (800, 808):
        loader = build_loader(config, 0, 1, start_sample=sample)
        plain_backward(model, config, next(iter(loader)))
        loader.close()
        optimizer.step()
    torch.save(model.state_dict(), folder / "weights.pt")
    torch.save(optimizer.state_dict(), folder / "state.pt")
    loader = build_loader(config, 0, 1, start_sample=SAVED * config.training.global_batch_size)
    loss = plain_backward(model, config, next(iter(loader)))
    loader.close()
    for group in optimizer.param_groups:
        group["betas"] = tuple(settings.betas)
    set_plain_lr(optimizer, config, SAVED)
    optimizer.step()
    return loss, {name: p.detach() for name, p in named}


@pytest.mark.parametrize("with_names", [True, False])
def test_what_torch_has_trained_goes_on_as_in_torch(ranks, tmp_path, capsys, with_names):
    checkpoint = train(ranks, 2, tmp_path / "run", "")
    loss, weights = trained_outside(checkpoint, with_names, tmp_path)
    again = tmp_path / "again"
    imported = step_folder(again / "checkpoints", SAVED)
    words = [str(checkpoint), str(tmp_path / "state.pt"), str(imported)]
    assert main([*words, "--weights", str(tmp_path / "weights.pt")]) == 0
    said = " ".join(capsys.readouterr().err.split())
    assert "the job's own settings apply: betas of " in said
    assert "[0.9, 0.95], in" in said.replace("(", "[").replace(")", "]")
    newest = train(ranks, 2, again, "", SAVED + 1)
    [(_, found, _)] = curve(again)
    assert found == pytest.approx(loss, rel=1e-12)
    metadata = read_metadata(newest)
    for name, expected in weights.items():
        torch.testing.assert_close(read_tensor(newest, metadata, f"model.{name}"), expected, rtol=1e-10, atol=1e-12)


def without_names(group):
    return {key: value for key, value in group.items() if key != "param_names"}


def test_what_cannot_be_imported(ranks, tmp_path, capsys):
    checkpoint = train(ranks, 2, tmp_path / "run", EXPERTS, last=1)
    out = tmp_path / "out"
    export(checkpoint, out, "*.experts.*=stay")

    def refused(source, *reasons, words=()):
        assert main([str(checkpoint), str(source), str(tmp_path / "new"), *words]) == 1
        said = " ".join(capsys.readouterr().err.split())
        assert all(reason in said for reason in reasons), said
        assert not (tmp_path / "new").exists()

    [part, _] = sorted(out.glob("adamw-parts-*"))
    content = part.read_bytes()
    part.unlink()
    refused(out, "experts", "a part of it is missing")
    part.write_bytes(b"no file of torch")
    refused(out, part.name, "can't be read")
    part.write_bytes(content)
    refused(tmp_path, "has no adamw.pt; the job's optimizers need adamw.pt")

    state = loaded(out)
    changes = {
        "shape": lambda: state["state"][0].update(exp_avg=torch.zeros(3)),
        "type": lambda: state["state"][0].update(exp_avg=torch.zeros(256, 32, dtype=torch.float32)),
        "number": lambda: state["state"][0].update(exp_avg=torch.full((256, 32), torch.inf, dtype=torch.float64)),
        "missing": lambda: state["state"].pop(0),
        "names": lambda: state.update(param_groups=[without_names(group) for group in state["param_groups"][::-1]]),
        "form": lambda: state.pop("param_groups"),
    }
    told = {
        "shape": ("embed_tokens.weight.exp_avg: [3], expected: [256, 32]",),
        "type": ("float32, but the job's is float64",),
        "number": ("embed_tokens.weight.exp_avg", "finite"),
        "missing": ("embed_tokens.weight.exp_avg: missing",),
        "names": ("has no parameter names", "torch.optim.AdamW(model.named_parameters())"),
        "form": ("is not an optimizer's state_dict",),
    }
    for what, change in changes.items():
        state = loaded(out)
        change()
        torch.save(state, tmp_path / "adamw.pt")
        for path in out.glob("adamw-parts-*"):
            (tmp_path / path.name).write_bytes(path.read_bytes())
        refused(tmp_path, *told[what])

    torch.save({"norm.weight": torch.zeros(32)}, tmp_path / "weights.pt")
    refused(out, "is not of the job's model", words=("--weights", str(tmp_path / "weights.pt")))


def test_what_stays_by_pattern(ranks, tmp_path, capsys):
    checkpoint = train(ranks, 2, tmp_path / "run", "", last=1)
    index = export(checkpoint, tmp_path / "out", "*.mlp.up_proj.*=stay", "--gather", "embed*=stay")
    parameters = index["optimizers"]["adamw"]["parameters"]
    apart = {name for name, each in parameters.items() if len(each["state"]["exp_avg"]["parts"]) == 2}
    assert apart == {name for name in parameters if name.startswith("embed") or "up_proj" in name}
    words = [str(checkpoint), str(tmp_path / "other")]
    for gather, reason in (
        (["*.up_porj.*=stay"], "matches no parameter; the nearest names are"),
        (["all", "*=stay"], "--gather all: choose all, dense, or one or more of"),
        (["*=leave"], "--gather *=leave: choose all, dense"),
    ):
        assert export_optimizer.main([*words, *(word for each in gather for word in ("--gather", each))]) == 1
        assert reason in " ".join(capsys.readouterr().err.split())
