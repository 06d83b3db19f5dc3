"""Gated DeltaNet by the kernels of flash-linear-attention, where its package is installed (`attention.delta_backend`).

The kernels take queries, keys and values in bfloat16, and add up in float32. Each process chooses among them by their
times, so that the order of sums, and with it the last bits, differ between launches. Keel gives them sequences of one
length, also with documents: of a token that begins one, the memory's factor is so small that nothing is left of what
was before. The kernels' own way, a list of lengths, would let the host wait in each layer.
"""

import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from configs.architectures.llama_keys import is_delta
from configs.delta import passes_states, reasons_against_kernels
from configs.errors import ConfigError
from configs.layout import micro_batch_size
from configs.plan import recurrent_of
from configs.schema import Config, is_described

_PACKAGE = "fla"
_NAME = "flash-linear-attention"
_NOT_TRIED = f"{_NAME} has not been tried"
_DTYPE = torch.bfloat16
"""Type of queries, keys and values."""
_FORGOTTEN = -104.0
"""Logarithm of a factor that is 0 in float32: exp(-104) is less than half of the smallest number."""


def delta_kernel(config: Config, device: torch.device, say: Callable[[str], None]) -> str:
    """What computes the layers of kind delta on this device, for people; empty if the model has none.

    Args:
        config, device: the job, and what it runs on.
        say: told that the kernels are tried, for which a person waits.

    Raises:
        ConfigError: the job names the kernels, and they can't run here; with the reason.
    """
    if not _has_layers(config):
        return ""
    if config.attention.delta_backend == "torch":
        return 'torch\'s operations (attention.delta_backend = "torch")'
    if _why_not(config, device, tries=False) == _NOT_TRIED:
        say(f"trying {_NAME}'s kernels, which takes minutes where they were never compiled")
    reason = _why_not(config, device)
    if reason and config.attention.delta_backend == "fla":
        raise ConfigError(f'attention.delta_backend is "fla": {reason}')
    if device.type == "cpu":
        return "torch's operations"
    return f"torch's operations, since {reason}" if reason else _NAME


def computes_by_kernels(config: Config, device: torch.device, tries: bool = True) -> bool:
    """Whether the kernels compute the model's layers of kind delta.

    Args:
        config: the job.
        device: that it runs on.
        tries: whether to try the kernels, which takes minutes the first time, if "auto" asks for it; otherwise, they
            compute only if they have been tried.
    """
    backend = config.attention.delta_backend
    return _has_layers(config) and (backend == "fla" or (backend == "auto" and not _why_not(config, device, tries)))


def apply_delta_backend(model: nn.Module, config: Config, device: torch.device, tries: bool = True) -> None:
    """Let the model's layers of kind delta use the kernels if these compute them; arguments as above."""
    if computes_by_kernels(config, device, tries):
        for module in recurrent_of(model):
            module.rule = by_kernels


def _has_layers(config: Config) -> bool:
    return is_described(config.model) and any(is_delta(config.model, layer) for layer in range(config.model.n_layers))


def _why_not(config: Config, device: torch.device, tries: bool = True) -> str:
    """Why the kernels can't compute the job's layers on a device; empty if they can."""
    for reason in reasons_against_kernels(config, device.type == "cuda"):
        return f"{_NAME} {reason}"
    if importlib.util.find_spec(_PACKAGE) is None:
        return f"{_NAME} is not installed (pip install 'fla-core>=0.6')"
    assert is_described(config.model)
    delta = config.model.delta
    is_in_chunks = passes_states(config)
    ranks = config.mesh.tp if is_in_chunks else config.mesh.tp * config.mesh.cp
    heads = (delta.key_heads // ranks, delta.value_heads // ranks, delta.key_head_dim, delta.value_head_dim)
    if (*heads, is_in_chunks) not in _outcomes and tries:
        chunks = 2 * config.mesh.cp if is_in_chunks else 1
        batch = micro_batch_size(config.training) * min(2, chunks)
        seq_len = config.training.seq_len // chunks
        _outcomes[*heads, is_in_chunks] = _outcome(batch, seq_len, *heads, device, is_in_chunks)
    return _outcomes.get((*heads, is_in_chunks), _NOT_TRIED)


_outcomes: dict[tuple[int, ...], str] = {}
"""What went wrong in the kernels by heads and widths, for which they are tuned, and whether a memory comes first; empty
if nothing did."""


def _outcome(
    batch: int,
    seq_len: int,
    key_heads: int,
    value_heads: int,
    key_dim: int,
    value_dim: int,
    device: torch.device,
    has_memory: bool = False,
) -> str:
    """Try the kernels, of which the package refuses some versions of Triton, on as many tokens as a step's.

    It tunes them, too: on fewer tokens, it would choose kernels that are slow on many. `has_memory`: whether to begin
    with a memory that is found from what the tokens make of it.
    """
    keys = (batch, seq_len, key_heads)
    values = (*keys, value_heads // key_heads)
    try:
        q, k, v = (
            torch.randn(*heads, width, device=device, dtype=_DTYPE, requires_grad=True)
            for heads, width in ((keys, key_dim), (keys, key_dim), (values, value_dim))
        )
        log_decay, strength = (torch.zeros(values, device=device, requires_grad=True) for _ in range(2))
        given = q, k, v, log_decay, strength
        memory = (lambda kept, gained: kept @ gained) if has_memory else None
        torch.autograd.grad(by_kernels(*given, None, memory).float().sum(), given)
    except Exception as error:  # of a package and a compiler
        said = (str(error).strip() or type(error).__name__).splitlines()[0]
        return f"{_NAME} refuses: {' '.join(said.split())}"
    return ""


def by_kernels(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    documents: Tensor | None,
    memory: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """`models.delta.outputs`, by the kernels, in their type.

    Where the memory before the first token is found from what the tokens make of it, the kernels start with zeros and
    the identity side by side, for which values are widened by zeros: outputs and the last memory are linear in it.
    """
    if documents is not None:
        begins = F.pad(documents[:, 1:] != documents[:, :-1], (1, 0))
        log_decay = log_decay.masked_fill(begins[..., None, None], _FORGOTTEN)
    q, k, v = (each.to(_DTYPE) for each in (q, k, v))
    heads = v.shape[2:4]
    if memory is None:
        out, _ = _delta_rule(q, k, *(each.flatten(2, 3) for each in (v, log_decay, strength)), None)
        return out.unflatten(2, heads)
    widths = v.shape[-1], k.shape[-1]
    one = torch.eye(widths[1], dtype=log_decay.dtype, device=k.device).expand(len(k), heads.numel(), -1, -1)
    wide = F.pad(v, (0, widths[1])).flatten(2, 3)
    out, after = _delta_rule(q, k, wide, log_decay.flatten(2, 3), strength.flatten(2, 3), F.pad(one, (widths[0], 0)))
    gained, kept = after.unflatten(1, heads).split(widths, -1)
    of_zeros, by_memory = out.unflatten(2, heads).split(widths, -1)
    before = memory(kept, gained).to(_DTYPE)
    return of_zeros + (by_memory.movedim(1, 3) @ before).movedim(3, 1)


@torch.library.custom_op("keel::delta_rule", mutates_args=())
def _delta_rule(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Outputs, shaped like v, and the memory after the last token, shaped like that before the first; empty without it.

    Args:
        q, k: (batch, seq, key_heads, key_dim).
        v: (batch, seq, value_heads, value_dim).
        log_decay, strength: (batch, seq, value_heads).
        memory: (batch, value_heads, key_dim, value_dim) before the first token; None: zeros.
    """
    out, after = _chunk_rule((q, k, v, log_decay, strength), memory)
    return out, v.new_empty(0) if after is None else after


def _chunk_rule(given: Sequence[Tensor], memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    return chunk_gated_delta_rule(*given, scale=1.0, initial_state=memory, output_final_state=memory is not None)


@_delta_rule.register_fake
def _(
    _q: Tensor, _k: Tensor, v: Tensor, _log_decay: Tensor, _strength: Tensor, memory: Tensor | None
) -> tuple[Tensor, Tensor]:
    return v.new_empty(v.shape), v.new_empty(0) if memory is None else memory.new_empty(memory.shape)


@torch.library.custom_op("keel::delta_rule_backward", mutates_args=())
def _delta_rule_backward(
    gradient: Tensor,
    by_after: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    log_decay: Tensor,
    strength: Tensor,
    memory: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of all inputs but the memory, which is a constant here.

    The outputs are computed again: what the package keeps for it changes with versions.
    """
    given = [each.detach().requires_grad_() for each in (q, k, v, log_decay, strength)]
    with torch.enable_grad():
        out, after = _chunk_rule(given, memory)
    outputs, gradients = ([out], [gradient]) if after is None else ([out, after], [gradient, by_after])
    by_q, by_k, by_v, by_decay, by_strength = torch.autograd.grad(outputs, given, gradients)
    return by_q, by_k, by_v, by_decay, by_strength


@_delta_rule_backward.register_fake
def _(_gradient: Tensor, _by_after: Tensor, *given: Tensor | None) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in given[:5] if each is not None)


def _keep_inputs(ctx: Any, inputs: tuple[Tensor | None, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, gradient: Tensor, by_after: Tensor) -> tuple[Tensor | None, ...]:
    return *_delta_rule_backward(gradient.contiguous(), by_after.contiguous(), *ctx.saved_tensors), None


_delta_rule.register_autograd(_backward, setup_context=_keep_inputs)
