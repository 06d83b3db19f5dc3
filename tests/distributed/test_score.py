"""The loss of each validation sequence, from one checkpoint, on any mesh, against plain PyTorch."""

from contextlib import closing
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from checkpoint.manifest import step_folder
from configs.load import load
from models import build_model
from scripts.comparison.score import score
from tests.end_to_end.launch import records, tensors
from tests.hf_families import NEEDS_TRANSFORMERS, write_config
from tests.hf_families import words as hf_words
from tests.marked import marked
from trainer.data.loader import build_loader
from trainer.guards.watchdog import Watchdog
from trainer.lifecycle import StopRequest
from trainer.opening import Runtime
from trainer.report.console import Console
from trainer.report.metrics import TimeLedger
from trainer.trainer import Trainer

RUN = (
    "--validation.sources",
    '[{name = "held out", kind = "synthetic", document_length = 9}]',
    *("--validation.sequences", "13", "--validation.interval", "3", "--data.document_mask", "true"),
    *("--metrics.tensorboard", "false", "--training.steps", "3"),
)
MESHES = {
    "one process, several rows": (1, ("--training.micro_batch_size", "4")),
    "FSDP 2": (2, ("--training.micro_batch_size", "2")),
    "TP 2": (2, ("--mesh.tp", "2", "--compile.enable", "true")),
    "PP 2": (2, ("--mesh.pp", "2", "--training.micro_batch_size", "2")),
    "CP 2, ring": (2, ("--mesh.cp", "2", "--context.method", "ring")),
    "owner 2": (2, ("--fsdp.partition", "owner", "--mesh.dp_shard", "1", "--mesh.dp_replicate", "2")),
}


def train(folder, words=()):
    job = load("parity.toml", ("--job.output_dir", folder, *RUN, *words), 1)
    Path(folder).mkdir(parents=True)
    with Console(0) as console, closing(Watchdog(Path(folder), 600, print)) as watchdog:
        runtime = Runtime(job, torch.device("cpu"), console, StopRequest(), TimeLedger(), watchdog)
        assert Trainer(runtime).train() == "done"


def scored(folder, words):
    config = load("parity.toml", ("--job.output_dir", folder, *RUN, *words), dist.get_world_size()).config
    checkpoint = step_folder(Path(folder) / "checkpoints", 3)
    with Console(dist.get_rank()) as console:
        return score(config, checkpoint, torch.device("cpu"), console)


@pytest.fixture(scope="module")
def run(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("run") / "run"
    ranks(1, train, str(folder))
    return folder


@pytest.fixture(scope="module")
def plain(run):
    """Of each sequence the mean loss and the number of targets, in plain PyTorch."""
    config = load("parity.toml", RUN, 1).config
    model = build_model(config.model).double()
    model.rotary.init_buffers()  # in float32 again, as it is in a run
    weights = {name.removeprefix("model."): t for name, t in tensors(run, 3).items() if name.startswith("model.")}
    model.load_state_dict(weights)
    found = []
    with closing(build_loader(config, 0, 1, 0, validation=True)) as loader:
        for [batch] in loader:
            for row in range(len(batch.samples)):
                ids, losses = batch.document_ids[row], []
                for document in ids.unique():
                    own = ids == document
                    logits = model(batch.tokens[row][own][None])[0]
                    losses.append(F.cross_entropy(logits, batch.targets[row][own], reduction="none"))
                valid = batch.targets[row] != -100
                found.append(((torch.cat(losses).sum() / valid.sum()).item(), int(valid.sum())))
    return found


@pytest.mark.parametrize("mesh", marked(MESHES, slow=["FSDP 2", "TP 2", "CP 2, ring", "owner 2"]))
def test_every_mesh_scores_alike(ranks, run, plain, mesh):
    n, words = MESHES[mesh]
    for found in ranks(n, scored, str(run), words):
        assert found.losses == pytest.approx([loss for loss, _ in plain], rel=1e-12)
        assert found.targets == [targets for _, targets in plain]
        assert len(set(found.targets)) > 1
        assert found.loss == pytest.approx(records(run)[-1]["validation_loss"], rel=1e-12)
        assert (found.step, found.tokens) == (3, 3 * 8 * 32)


@NEEDS_TRANSFORMERS
@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.slow)])
@pytest.mark.parametrize(("family", "fields"), [("phi", {}), ("gemma2", {"final_logit_softcapping": 2.0})])
def test_a_familys_head_may_have_a_bias_or_softcapping(ranks, tmp_path, family, fields, tp):
    model = hf_words(write_config(tmp_path / family, family, **fields))
    ranks(1, train, str(tmp_path / "run"), model)
    for found in ranks(tp, scored, str(tmp_path / "run"), (*model, "--mesh.tp", str(tp))):
        assert found.loss == pytest.approx(records(tmp_path / "run")[-1]["validation_loss"], rel=1e-6)
