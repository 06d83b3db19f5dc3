"""The divergence of a model from its teacher, and its gradients (Hinton et al. 2015, arXiv:1503.02531).

Per valid token, with the logits s of the model and t of the teacher, both over the whole vocabulary:

    (1 - weight) * cross-entropy(s, text) + weight * T^2 * KL(softmax(t / T) || softmax(s / T)),   T = temperature

This is what the gradients are of. The value that is returned is the cross-entropy, as without a teacher, so that losses
compare; the divergence is reported beside it. Both models' logits exist in chunks of tokens only, as in `loss.py`.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from configs.schema import Distillation
from trainer.data.loader import IGNORED
from trainer.loss import (
    Given,
    Gradients,
    add_gradients_,
    chunk_rows,
    column_of,
    compiled_chunks,
    finish_,
    side_by_side,
    softmax_dtype,
)


class States(NamedTuple):
    """What a head is about to multiply."""

    hidden: Tensor
    """(tokens, dim)."""
    weight: Tensor
    """(vocab, dim), or this rank's rows."""
    bias: Tensor | None
    """(vocab,), or this rank's elements."""
    softcap: float
    group: dist.ProcessGroup | None
    """The ranks that hold the vocabulary's rows; None: each holds all."""

    def split_over(self, group: dist.ProcessGroup | None) -> "States":
        """The same with the rows that a head has whose vocabulary these ranks hold; all of them call it."""
        if (group is None) == (self.group is None):
            return self
        bias = self.bias
        if group is None:
            weight = side_by_side(self.weight.T, self.group).T
            return self._replace(weight=weight, bias=None if bias is None else side_by_side(bias, self.group))
        rank = dist.get_rank(group)
        ranks = dist.get_world_size(group)
        weight = self.weight.chunk(ranks)[rank]
        return self._replace(weight=weight, bias=None if bias is None else bias.chunk(ranks)[rank])


@dataclass(frozen=True)
class Divergence:
    """How far a model is from its teacher on a micro-batch's tokens; a `Lesson`."""

    teacher: States
    settings: Distillation
    record: Callable[[Tensor], None]
    """Called with the sum over valid tokens of the divergence, without T^2, and their number, float64, (2,)."""

    def sweep(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, given: Given, gradients: Gradients | None
    ) -> Tensor:
        """Implement `Lesson.sweep`."""
        targets, group, softcap, settings, _ = given
        measure, differentiate_ = _kernels(settings.compile, settings.compiler_options)
        temperature = self.settings.temperature
        teacher = self.teacher.split_over(group)
        dtype = softmax_dtype(hidden)
        rows = chunk_rows(len(hidden), 2 * len(weight) * dtype.itemsize, hidden.device.type)
        first_id = dist.get_rank(group) * len(weight) if group else 0
        buffer = hidden.new_empty(rows, len(weight))
        taught = teacher.hidden.new_empty(rows, len(weight))
        measured = hidden.new_empty(_MEASURED, len(hidden), dtype=dtype)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            local_targets = targets[part] - first_id
            logits = torch.mm(hidden[part], weight.T, out=buffer[: len(local_targets)])
            slope = finish_(logits, bias, softcap)
            teachers = torch.mm(teacher.hidden[part], teacher.weight.T, out=taught[: len(local_targets)])
            finish_(teachers, teacher.bias, teacher.softcap)
            measured[:, part] = _over_group(measure(logits, teachers, local_targets, temperature), group)
            if gradients:
                ignored = targets[part] == IGNORED
                shares = (self.settings.weight, temperature, settings.z_loss_weight)
                by_logits = differentiate_(logits, teachers, local_targets, ignored, measured[:, part], *shares)
                add_gradients_(gradients, by_logits if slope is None else by_logits.mul_(slope), hidden, weight, part)
        log_partition, target_logit, cool, taught_cool, gap = measured.masked_fill(targets == IGNORED, 0)
        divergence = (gap - taught_cool + cool).sum(dtype=torch.float64)
        self.record(torch.stack((divergence, (targets != IGNORED).sum(dtype=torch.float64))))
        return (log_partition - target_logit).sum()


_MEASURED = 5
"""Numbers per token that `_measure` returns."""


@functools.cache
def _kernels(
    is_compiled: bool, options: tuple[tuple[str, Any], ...]
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    return compiled_chunks(_measure, _differentiate_, is_compiled, options)


def _measure(logits: Tensor, teachers: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """What the loss and its gradient need of all columns, (5, rows).

    Logsumexp and the target's logit, which is 0 if it is not among these columns; logsumexp of the logits divided by
    the temperature, of the teacher's likewise; and the teacher's mean of the difference between its own and these.
    """
    dtype = softmax_dtype(logits)
    logits = logits.to(dtype)
    column, present = column_of(targets, logits)
    target_logit = logits.gather(-1, column).squeeze(-1).where(present, 0)
    log_partition = logits.logsumexp(-1)
    cool = logits / temperature
    taught = teachers.to(dtype) / temperature
    of_taught = taught.logsumexp(-1)
    of_cool = cool.logsumexp(-1)
    gaps = cool.neg_().add_(taught)
    probabilities = taught.sub_(of_taught.unsqueeze(-1)).exp_()
    return torch.stack((log_partition, target_logit, of_cool, of_taught, probabilities.mul_(gaps).sum(-1)))


def _differentiate_(
    logits: Tensor,
    teachers: Tensor,
    targets: Tensor,
    ignored: Tensor,
    measured: Tensor,
    weight: float,
    temperature: float,
    z_loss_weight: float,
) -> Tensor:
    """The gradient by the logits, (rows, vocab), in their type: that of the text, of the teacher, and of the z-loss."""
    # An infinite log-partition zeroes an ignored token's row.
    shifts = measured.masked_fill(ignored, math.inf).unsqueeze(-1)
    log_partition, _, cool, taught, _ = shifts
    wide = logits.to(measured.dtype)
    gradient = (wide / temperature).sub_(cool).exp_()
    gradient.sub_((teachers.to(measured.dtype) / temperature).sub_(taught).exp_()).mul_(weight * temperature)
    if weight == 1 and not z_loss_weight:
        return gradient.to(logits.dtype)
    factor = (1 - weight) + 2 * z_loss_weight * measured[0].unsqueeze(-1)
    gradient.add_((wide - log_partition).exp_().mul_(factor))
    is_target = torch.arange(logits.shape[-1], device=logits.device) == targets.unsqueeze(-1)
    return torch.where(is_target, gradient - (1 - weight), gradient).to(logits.dtype)


def _over_group(measured: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Combine what each rank measured on its columns, in one collective of five numbers per token and rank."""
    if group is None:
        return measured
    parts = measured.new_empty(dist.get_world_size(group), *measured.shape)
    dist.all_gather(list(parts.unbind()), measured, group=group)
    log_partition, target_logit, cool, taught, gap = parts.unbind(1)
    of_taught = taught.logsumexp(0)
    # A rank's mean is of its columns' probabilities, which are that share of the teacher's.
    gap = ((taught - of_taught).exp() * gap).sum(0)
    return torch.stack((log_partition.logsumexp(0), target_logit.sum(0), cool.logsumexp(0), of_taught, gap))
