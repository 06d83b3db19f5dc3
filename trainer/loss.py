"""Cross-entropy from the hidden states, without ever holding the logits of all tokens.

The tokens go through the head in chunks. A chunk's logits are turned into the loss and, in place, into their own
gradient, which is multiplied at once into the gradients of the hidden states and of the head; the next chunk reuses the
buffer. So the forward pass already computes the gradients, and backward only scales them: the same three matrix
products as the plain loss, with nothing computed twice. (The plain loss holds several tensors of tokens x vocabulary:
2 GiB each for 4,096 tokens of a 128K vocabulary in float32.) The idea is from Liger Kernel's fused linear
cross-entropy (Hsu et al. 2024, arXiv:2410.10989), here without a custom kernel. Since a chunk can stay in the cache, it
is no slower: in float32 on 2 CPU threads, 2,048 tokens of dim 256 and vocabulary 8,192 take 0.75 of the plain loss's
time, forward and backward; compiled, 0.98 of the plain loss compiled as a whole.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from configs.errors import ConfigError
from configs.own_code import code_of
from parallelisms.compile import compiled
from parallelisms.ranges import named_range
from trainer.data.loader import IGNORED

# Bytes of a chunk's logits, in the dtype of the softmax. CPU: half of a typical level-3 cache, the best of 1 to 64 MiB.
# GPU: every chunk adds to the head's gradient, at 8 bytes per weight; 4,096 rows (2 GiB at 128K) keep that below a
# fifteenth of the matrix products' time (estimated from 790 TFLOP/s and 4.3 TB/s).
_CPU_CHUNK_BYTES = 16 * 2**20
_GPU_CHUNK_BYTES = 2 * 2**30
# With fewer rows, reading the head takes longer than multiplying by it.
_MIN_CHUNK_ROWS = 256


@dataclass(frozen=True)
class CrossEntropy:
    """Loss over the vocabulary, summed over the valid tokens; the caller divides by their number."""

    z_loss_weight: float = 0.0
    """Weight of the squared log-partition, the z-loss: keeps logits from drifting (PaLM, Chowdhery et al. 2022, section
    5). It is in the gradients alone, so that the loss is the cross-entropy with any weight."""
    compile: bool = False
    """Compile what happens between the matrix products."""
    compiler_options: tuple[tuple[str, Any], ...] = ()
    """Settings of `torch._inductor.config` for that."""
    own: str = ""
    """A function of the user's own in place of the cross-entropy, by its import path; "": none."""
    repeatable: bool = False
    """Let backward run more than once, at the cost of a copy of the gradients. A zero-bubble pipeline needs that, since
    it computes the gradients of inputs and weights separately."""

    def __call__(
        self,
        hidden: Tensor,
        weight: Tensor,
        targets: Tensor,
        group: dist.ProcessGroup | None = None,
        bias: Tensor | None = None,
        softcap: float = 0.0,
        lesson: "Lesson | None" = None,
    ) -> Tensor:
        """Sum over valid tokens of -log softmax(hidden @ weight.T)[target], in nats.

        The softmax is in float32, or in float64 if the inputs are. This call also computes the gradients of this sum
        and of z_loss_weight * logsumexp^2, which backward only scales (so it may run once); under `torch.no_grad()` it
        does not compute them.

        Args:
            hidden: (batch, seq, dim).
            weight: (vocab, dim); with `group`, this rank's rows [rank * vocab / n, (rank + 1) * vocab / n).
            targets: (batch, seq), token ids of the whole vocabulary; `IGNORED` does not count.
            group: the ranks that hold the vocabulary's rows. All call with the same hidden states and targets. Each
                gets the same loss, the gradient of its own rows, and the part of the hidden states' gradient that
                flows through its rows; the sum over the group is the whole (the backward of a gather sums it).
            bias: (vocab,), or this rank's elements of it; added to the logits.
            softcap: above 0, the logits are softcap * tanh(logits / softcap) (Gemma 2, arXiv:2408.00118, section 2).
            lesson: a teacher's, whose part in the gradients takes a share of that of the targets.

        Returns:
            A scalar in the softmax's dtype.
        """
        hidden = hidden.flatten(0, 1)
        given = Given(targets.flatten(), group, softcap, self, lesson)
        with named_range("loss"):
            if torch.is_grad_enabled() and (hidden.requires_grad or weight.requires_grad):
                return _LossWithGradients.apply(hidden, weight, bias, given)
            return _sweep(hidden, weight, bias, given)


class Given(NamedTuple):
    """What a loss is computed by, besides the tensors that may have gradients; as for `CrossEntropy`."""

    targets: Tensor
    """(tokens,)."""
    group: dist.ProcessGroup | None
    softcap: float
    settings: CrossEntropy
    lesson: "Lesson | None" = None


Gradients = tuple[Tensor | None, Tensor | None, Tensor | None]
"""The gradients of hidden (tokens, dim), weight (vocab, dim) and bias (vocab,); None: not wanted."""


class Lesson(Protocol):
    """What a teacher has computed for the tokens of a micro-batch."""

    def sweep(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None, given: Given, gradients: Gradients | None
    ) -> Tensor:
        """Compute the loss and, into `gradients`, the wanted ones, in the place of the cross-entropy's own sweep."""


class _LossWithGradients(torch.autograd.Function):
    """Computes gradients in forward, and scales them in backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, bias: Tensor | None, given: Given) -> Tensor:
        ctx.repeatable = given.settings.repeatable
        by_hidden, by_weight, by_bias = ctx.needs_input_grad[:3]
        gradients = (
            torch.empty_like(hidden) if by_hidden else None,
            torch.zeros_like(weight, dtype=softmax_dtype(weight)) if by_weight else None,
            None if bias is None or not by_bias else torch.zeros_like(bias, dtype=softmax_dtype(weight)),
        )
        loss = _sweep(hidden, weight, bias, given, gradients)
        ctx.save_for_backward(*gradients)
        ctx.weight_dtype = weight.dtype
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_hidden, grad_weight, grad_bias = ctx.saved_tensors
        # Scaling in place makes autograd's version check turn a second backward into an error.
        scale = torch.mul if ctx.repeatable else torch.Tensor.mul_
        by_hidden = None if grad_hidden is None else scale(grad_hidden, grad_loss)
        if grad_weight is None or grad_weight.dtype == ctx.weight_dtype:
            by_weight = None if grad_weight is None else scale(grad_weight, grad_loss)
        else:  # scaled and rounded in one pass
            by_weight = torch.mul(grad_weight, grad_loss, out=torch.empty_like(grad_weight, dtype=ctx.weight_dtype))
        by_bias = None if grad_bias is None else scale(grad_bias, grad_loss).to(ctx.weight_dtype)
        return by_hidden, by_weight, by_bias, None


def _sweep(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, given: Given, gradients: Gradients | None = None
) -> Tensor:
    """Compute the loss and, into `gradients`, the wanted ones."""
    targets, group, softcap, settings, lesson = given
    if lesson:
        return lesson.sweep(hidden, weight, bias, given, gradients)
    if settings.own:
        return _own_sweep(hidden, weight, bias, given, gradients)
    measure, differentiate_ = _kernels(settings.compile, settings.compiler_options)
    dtype = softmax_dtype(hidden)
    rows = chunk_rows(len(hidden), len(weight) * dtype.itemsize, hidden.device.type)
    first_id = dist.get_rank(group) * len(weight) if group else 0
    buffer = hidden.new_empty(rows, len(weight))
    log_partition, target_logit = hidden.new_empty(2, len(hidden), dtype=dtype)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        local_targets = targets[part] - first_id
        logits = torch.mm(hidden[part], weight.T, out=buffer[: len(local_targets)])
        slope = finish_(logits, bias, softcap)
        log_partition[part], target_logit[part] = _over_group(measure(logits, local_targets), group)
        if gradients:
            ignored = targets[part] == IGNORED
            by_logits = differentiate_(logits, local_targets, ignored, log_partition[part], settings.z_loss_weight)
            add_gradients_(gradients, by_logits if slope is None else by_logits.mul_(slope), hidden, weight, part)
    loss = log_partition - target_logit
    return loss.masked_fill(targets == IGNORED, 0).sum()


# --------------------------------------------------------------------------- a function of the user's own


def _own_sweep(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, given: Given, gradients: Gradients | None
) -> Tensor:
    """The same as `_sweep`: each rank of the group computes from the logits of all, and keeps its own gradients."""
    targets, group, softcap, settings, _ = given
    function = code_of(settings.own)
    dtype = softmax_dtype(hidden)
    ranks = dist.get_world_size(group) if group else 1
    first_id = dist.get_rank(group) * len(weight) if group else 0
    rows = chunk_rows(len(hidden), ranks * len(weight) * dtype.itemsize, hidden.device.type)
    total = hidden.new_zeros((), dtype=dtype)
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        own_logits = hidden[part] @ weight.T
        slope = finish_(own_logits, bias, softcap)
        logits = side_by_side(own_logits, group).to(dtype)
        is_valid = targets[part] != IGNORED
        with torch.set_grad_enabled(gradients is not None):
            logits.requires_grad_(gradients is not None)
            values = own_values(function, logits, targets[part].clamp(min=0), settings.own)
            loss = values.where(is_valid, 0).sum()
        total += loss.detach()
        if gradients:
            (by_logits,) = torch.autograd.grad(loss, logits)
            by_logits = by_logits[:, first_id : first_id + len(weight)].to(hidden.dtype)
            add_gradients_(gradients, by_logits if slope is None else by_logits * slope, hidden, weight, part)
    return total


def own_values(function: Callable[..., Any], logits: Tensor, targets: Tensor, name: str) -> Tensor:
    """The loss of each token, (tokens,), by a function of the user's own.

    Args:
        function: the function.
        logits: (tokens, vocab) in the softmax's dtype.
        targets: (tokens,), ids of the vocabulary.
        name: the function's import path, for a message.

    Raises:
        ConfigError: it returns something else.
    """
    values = function(logits, targets)
    if not isinstance(values, Tensor) or values.shape != targets.shape:
        got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ConfigError(
            f'"{name}" must return a loss for each token, a tensor of shape ({len(targets)},) for logits of shape '
            f"{tuple(logits.shape)}, and it returned {got}; only a sum over tokens is the same on every mesh"
        )
    return values


def side_by_side(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """The columns of all ranks of the group, (rows, vocab)."""
    if group is None:
        return logits
    parts = [torch.empty_like(logits) for _ in range(dist.get_world_size(group))]
    # The logits of the other ranks' rows of the vocabulary.
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=-1)


# --------------------------------------------------------------------------- chunks and kernels


def chunk_rows(tokens: int, bytes_per_row: int, device_type: str) -> int:
    """Tokens per chunk: as many as the device's budget holds, evened out so that all chunks have one compiled shape."""
    budget = _CPU_CHUNK_BYTES if device_type == "cpu" else _GPU_CHUNK_BYTES
    most = max(_MIN_CHUNK_ROWS, budget // bytes_per_row)
    return math.ceil(tokens / math.ceil(tokens / most))


@functools.cache
def _kernels(
    is_compiled: bool, options: tuple[tuple[str, Any], ...]
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """The work on a chunk between the matrix products, which stay outside: compiled or not, a library does them."""
    return compiled_chunks(_measure, _differentiate_, is_compiled, options)


def compiled_chunks(
    measure: Callable[..., Tensor],
    differentiate_: Callable[..., Tensor],
    is_compiled: bool,
    options: tuple[tuple[str, Any], ...],
) -> tuple[Callable[..., Tensor], Callable[..., Tensor]]:
    """Functions of a chunk's logits, compiled if that is wanted."""
    if not is_compiled:
        return measure, differentiate_
    # No CUDA graphs: the kernels write into a buffer.
    settings = {**dict(options), "triton.cudagraphs": False} if options else None
    return compiled(measure, "the loss", settings), compiled(differentiate_, "the loss's gradient", settings)


def _measure(logits: Tensor, targets: Tensor) -> Tensor:
    """Logsumexp and target's logit, (2, rows); the latter is 0 if the target is not among these logits' columns."""
    logits = logits.to(softmax_dtype(logits))
    column, present = column_of(targets, logits)
    target_logit = logits.gather(-1, column).squeeze(-1)
    return torch.stack((logits.logsumexp(-1), target_logit.where(present, 0)))


def _differentiate_(
    logits: Tensor, targets: Tensor, ignored: Tensor, log_partition: Tensor, z_loss_weight: float
) -> Tensor:
    """Replace logits (rows, vocab) by the loss's gradient: softmax * (1 + 2 z logsumexp) - one-hot."""
    # Few passes over memory, in eager mode as well: an infinite log-partition zeroes an ignored token's row.
    shift = log_partition.masked_fill(ignored, math.inf).unsqueeze(-1)
    factor = (1 + 2 * z_loss_weight * log_partition).unsqueeze(-1) if z_loss_weight else None
    column, present = column_of(targets, logits)
    # Targets separately: subtracting from the whole in the softmax's dtype would cost a copy of it when compiled.
    at_target = _exp_(logits.gather(-1, column), shift, factor) - present.unsqueeze(-1).to(shift.dtype)
    gradient = _exp_(logits, shift, factor).to(logits.dtype)
    return gradient.scatter_(-1, column, at_target.to(logits.dtype))


def _exp_(logits: Tensor, shift: Tensor, factor: Tensor | None) -> Tensor:
    """exp(logits - shift) * factor in the dtype of `shift`; in place if the logits have that dtype."""
    result = logits.to(shift.dtype).sub_(shift).exp_()
    return result if factor is None else result.mul_(factor)


def column_of(targets: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each target, (rows, 1), and whether it exists, (rows,): not for IGNORED or another rank's target."""
    last = logits.shape[-1] - 1
    return targets.clamp(0, last).unsqueeze(-1), (targets >= 0) & (targets <= last)


def _over_group(measured: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    """Combine what each rank measured on its columns, in one collective of two numbers per token and rank."""
    if group is None:
        return measured
    parts = measured.new_empty(dist.get_world_size(group), *measured.shape)
    dist.all_gather(list(parts.unbind()), measured, group=group)
    log_partition, target_logit = parts.unbind(1)
    return torch.stack((log_partition.logsumexp(0), target_logit.sum(0)))


@torch.no_grad()
def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None = None, softcap: float = 0.0) -> Tensor:
    """The logits that a loss is computed from, (..., vocab); hidden: (..., dim), others as of `CrossEntropy`."""
    logits = F.linear(hidden, weight)
    finish_(logits, bias, softcap)
    return logits


def finish_(logits: Tensor, bias: Tensor | None, softcap: float) -> Tensor | None:
    """Add the bias and apply softcapping, in place; returns the slope of the latter at each logit, None without it."""
    if bias is not None:
        logits.add_(bias)
    if not softcap:
        return None
    logits.div_(softcap).tanh_()
    slope = 1 - logits.square()
    logits.mul_(softcap)
    return slope


def add_gradients_(gradients: Gradients, by_logits: Tensor, hidden: Tensor, weight: Tensor, part: slice) -> None:
    """Write a chunk's gradient of the hidden states, and add those of the weight and the bias."""
    by_hidden, by_weight, by_bias = gradients
    if by_hidden is not None:
        torch.mm(by_logits, weight, out=by_hidden[part])
    if by_weight is not None:
        _add_product_(by_weight, by_logits.T, hidden[part])
    if by_bias is not None:
        by_bias.add_(by_logits.sum(0, dtype=by_bias.dtype))


def _add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Compute total += a @ b; the sum over chunks stays in total's dtype if the product has lower precision."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    elif total.device.type == "cuda":  # the matrix product's kernel adds in total's dtype, and rounds nothing
        torch.addmm(total, a, b, out_dtype=total.dtype, out=total)
    else:
        total.add_(a @ b)


def softmax_dtype(tensor: Tensor) -> torch.dtype:
    return torch.promote_types(tensor.dtype, torch.float32)
