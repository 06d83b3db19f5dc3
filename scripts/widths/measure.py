"""Trains a job in this process, and looks at the size of its activations (the coordinate check of Yang et al. 2022)."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import islice
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from configs.load import LoadedConfig
from parallelisms.mesh import Mesh
from trainer.data.loader import build_loader
from trainer.lr_schedule import learning_rate_of
from trainer.step import Learner, build_learner

KINDS = ("embedding", "attention scores", "attention", "feed-forward", "last block", "logits")
"""What is measured of a model; of what each block has, the mean over blocks."""
Sizes = dict[str, float]
"""Mean absolute value by kind."""


def activation_sizes(job: LoadedConfig, mesh: Mesh, steps: int) -> list[Sizes]:
    """The sizes of activations on the first sequences, before the first step and after each of `steps` steps."""
    found: list[Sizes] = []
    first: list[Tensor] = []

    def look(learner: Learner, tokens: Tensor) -> None:
        first[:] = first or [tokens.clone()]
        found.append(_sizes_of(learner.stages[0], first[0]))

    _train(job, mesh, steps, look)
    return found


def final_loss(job: LoadedConfig, mesh: Mesh) -> float:
    """The mean loss of the last tenth of the job's steps; nan if it has left the finite numbers."""
    losses = _train(job, mesh, job.config.training.steps, lambda learner, tokens: None)
    return fmean(losses[-max(1, len(losses) // 10) :])


def _train(job: LoadedConfig, mesh: Mesh, steps: int, look: Callable[[Learner, Tensor], None]) -> list[float]:
    """Train, and call `look` before the first step and after each; returns the losses, until one is not finite."""
    learner = build_learner(job.config, mesh)
    loader = build_loader(learner.config, 0, 1, start_sample=0)
    losses: list[float] = []
    try:
        for step, micro_batches in enumerate(islice(loader, steps + 1)):
            look(learner, micro_batches[0].tokens)
            if step == steps:
                break
            learner.freeze(step)
            losses.append(learner.step(micro_batches, learning_rate_of(job.stages[0], step + 1)).result().loss)
            if not math.isfinite(losses[-1]):
                return [math.nan]
    finally:
        loader.close()
    return losses


def _sizes_of(model: Any, tokens: Tensor) -> Sizes:
    """The sizes of a forward pass on tokens (batch, seq)."""
    with torch.no_grad(), _recorded(model) as seen:
        seen["logits"].append(_size(model(tokens)))
    return {kind: fmean(seen[kind]) for kind in KINDS}


@contextmanager
def _recorded(model: Any) -> Iterator[dict[str, list[float]]]:
    """Record the sizes of what the modules compute within."""
    seen: dict[str, list[float]] = {kind: [] for kind in KINDS}
    blocks = list(model.layers.values())
    modules = [(model.embed_tokens, "embedding"), (blocks[-1], "last block")]
    for block in blocks:
        modules += [(block.self_attn, "attention"), (block.mlp, "feed-forward")]

    def recorder(kind: str) -> Callable[..., None]:
        def record(_module: Any, _given: Any, found: Any) -> None:
            seen[kind].append(_size(found[0] if isinstance(found, tuple) else found))

        return record

    hooks = [module.register_forward_hook(recorder(kind)) for module, kind in modules]
    attends = [block.self_attn.attend for block in blocks]
    for block, attend in zip(blocks, attends, strict=True):
        # With optimizer.qk_clip `attend` is a module, in whose place torch sets no function: the attribute hides it.
        vars(block.self_attn)["attend"] = _with_scores(attend, seen["attention scores"])
    try:
        yield seen
    finally:
        for hook in hooks:
            hook.remove()
        for block, attend in zip(blocks, attends, strict=True):
            block.self_attn.attend = attend


def _with_scores(attend: Callable[..., Tensor], seen: list[float]) -> Callable[..., Tensor]:
    """The same attention, of whose scores it records the size."""

    def attending(q: Tensor, k: Tensor, v: Tensor, mask: Any) -> Tensor:
        keys = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        seen.append(_size(q @ keys.transpose(-1, -2) / math.sqrt(q.shape[-1])))
        return attend(q, k, v, mask)

    return attending


def _size(x: Tensor) -> float:
    return x.float().abs().mean().item()
