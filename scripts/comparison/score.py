"""The loss of each validation sequence, from a checkpoint and on any mesh; kept in the run's folder as scores.json."""

import json
import os
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import xxhash
from torch import Tensor

from checkpoint.manager import CheckpointManager
from checkpoint.manifest import read_manifest, read_trainer_state, seal_of
from checkpoint.reader import Description, Log
from configs.errors import ConfigError
from configs.files import write_atomically
from configs.layout import mesh_sizes
from configs.schema import ActivationCheckpoint, Compile, Config, Distillation
from configs.table import with_keys
from configs.untrusted import MAX_JSON_BYTES, parse_json, read_file
from parallelisms.mesh import build_mesh
from parallelisms.ranks import on_rank_zero
from trainer.data.loader import IGNORED, build_loader
from trainer.loss import CrossEntropy
from trainer.report.console import Console
from trainer.step import Learner, build_learner

SCORES_NAME = "scores.json"


@dataclass(frozen=True)
class Scores:
    """The losses of a checkpoint on the sequences of `[validation]`."""

    step: int
    """The checkpoint's step."""
    seal: str
    """Seal of the checkpoint's manifest: a run that was trained once more has another one."""
    tokens: int
    """Tokens trained on until then."""
    digest: str
    """A hash of the sequences: of two runs with the same one, each loss is of the same tokens."""
    losses: list[float]
    """Mean cross-entropy of each sequence's valid targets, in nats; 0 if it has none."""
    targets: list[int]
    """Valid targets of each sequence."""

    @property
    def loss(self) -> float:
        """Mean over all targets, as validation has it."""
        return sum(loss * n for loss, n in zip(self.losses, self.targets, strict=True)) / sum(self.targets)


def score(config: Config, checkpoint: Path, device: torch.device, console: Console) -> Scores:
    """Score a checkpoint on the mesh of `config`, which may differ from the one that saved it; all ranks call it.

    Raises:
        KeelError: there are no validation sequences, or they or the checkpoint can't be read.
    """
    require_sequences(config)
    # Nothing is kept for a backward pass, compiling would take longer than the few forward passes, and none learns.
    forward_only = {"compile": Compile(), "activation_checkpoint": ActivationCheckpoint()}
    config = config.model_copy(update={**forward_only, "distillation": Distillation()})
    config = with_keys(config, checkpoint={"init_from": str(checkpoint), "load": "none"})
    step, seal = on_rank_zero(None, lambda: (read_manifest(checkpoint).step, seal_of(checkpoint)))
    state = on_rank_zero(None, lambda: read_trainer_state(checkpoint))
    digest = on_rank_zero(None, lambda: _digest(config))
    mesh = build_mesh(mesh_sizes(config, dist.get_world_size()), device)
    learner = build_learner(config, mesh)
    _load_weights(config, learner, console)
    sums = sequence_sums(config, learner).tolist()
    if not any(sums[1]):
        raise ConfigError(
            "no target of the validation sequences gives loss (their loss mask); raise validation.sequences"
        )
    losses = [total / n if n else 0.0 for total, n in zip(*sums, strict=True)]
    return Scores(step, seal, state.get("tokens", 0), digest, losses, [int(n) for n in sums[1]])


def are_current(scores: Scores, config: Config, checkpoint: Path) -> bool:
    """Whether `score` would compute these scores again: they are of this checkpoint, and of the sequences of `config`.

    Raises:
        KeelError: the sequences or the checkpoint can't be read.
    """
    return scores.seal == seal_of(checkpoint) and scores.digest == _digest(config)


def require_sequences(config: Config) -> None:
    """Raise ConfigError if a job has no validation sequences."""
    if not config.validation.sources:
        raise ConfigError("validation.sources is empty, so there are no sequences to score on; add a source")


def _load_weights(config: Config, learner: Learner, console: Console) -> None:
    """Load what `checkpoint.init_from` names: the weights, and nothing else of a run."""
    run = Description(config.model_dump(mode="json"), learner.mesh.sizes.axes)
    nothing = config.job.folder / "scored"  # so nothing is resumed
    manager = CheckpointManager(nothing, config.checkpoint, run, Log(warning=console.warning))
    manager.resume(learner.state())
    learner.was_loaded()


@torch.no_grad()
def sequence_sums(config: Config, learner: Learner) -> Tensor:
    """Cross-entropy and valid targets of each sequence, float64, (2, sequences); the same on all ranks."""
    mesh = learner.mesh
    n = config.validation.sequences
    sums = torch.zeros(2, n, dtype=torch.float64, device=mesh.device)
    with closing(build_loader(config, mesh.dp_rank, mesh.sizes.dp, start_sample=0, validation=True)) as loader:
        for micro_batches in loader:
            for batch in micro_batches:
                rows = _Rows()
                learner.passes.evaluate([learner.call(part, rows) for part in learner.own_part([batch])])
                if rows.sums is not None:  # on a pipeline's last stage
                    sums[:, batch.samples] += rows.sums[:, : len(batch.samples)]
    return mesh.sum_over_pp(mesh.sum_over_tokens(sums))


class _Rows:
    """Stands in for the loss: keeps each row's."""

    def __init__(self) -> None:
        self.sums: Tensor | None = None
        """Cross-entropy and valid targets, (2, rows)."""

    def __call__(self, hidden: Tensor, weight: Tensor, targets: Tensor, **of_head: Any) -> Tensor:
        """Arguments as of `CrossEntropy`; returns zero, (), in the place of a loss."""
        loss = CrossEntropy()
        losses = [loss(hidden[i : i + 1], weight, targets[i : i + 1], **of_head) for i in range(len(targets))]
        self.sums = torch.stack((torch.stack(losses).double(), (targets != IGNORED).sum(1).double()))
        return hidden.new_zeros(())


def _digest(config: Config) -> str:
    """A hash of all validation sequences, in their order; the micro-batches that they come in do not matter."""
    seen = xxhash.xxh3_128()
    with closing(build_loader(config, 0, 1, start_sample=0, validation=True)) as loader:
        for [batch] in loader:
            for row in range(len(batch.samples)):
                for tensor in (batch.tokens, batch.targets):
                    seen.update(tensor[row].numpy().tobytes())
    return seen.hexdigest()


def write_scores(folder: Path, scores: Scores) -> None:
    """Write scores.json of a run folder."""
    write_atomically(folder / SCORES_NAME, [json.dumps(asdict(scores)) + "\n"], writer=str(os.getpid()))


def read_scores(folder: Path) -> Scores | None:
    """The scores of a run folder; None if there are none."""
    try:
        return Scores(**parse_json(read_file(folder / SCORES_NAME, MAX_JSON_BYTES)))
    except (OSError, ValueError, TypeError):
        return None
