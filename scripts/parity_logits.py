"""A second, plain implementation of QK-clip, for the reference of the parity table."""

from typing import Any

import torch
from torch import Tensor, nn

from configs.plan import plan_of


class LargestLogits:
    """Observes the attention modules of a model, in one process, from its creation until `clip`."""

    def __init__(self, model: nn.Module) -> None:
        self._attends: dict[Any, Any] = {}
        self._largest: dict[Any, Tensor] = {}
        for module in map(model.get_submodule, plan_of(model).attention):
            self._observe(module)

    def _observe(self, module: Any) -> None:
        attend = module.attend
        self._attends[module] = attend

        def observed(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
            assert mask is None, "the reference computes each document alone"
            keys = k.repeat_interleave(q.shape[1] // k.shape[1], dim=1)
            logits = (q @ keys.transpose(2, 3)).detach() / q.shape[-1] ** 0.5
            distance = torch.arange(q.shape[2])[:, None] - torch.arange(q.shape[2])
            is_seen = (distance >= 0) & (distance < (module.window or q.shape[2]))
            found = logits.where(is_seen, -torch.inf).amax((0, 2, 3))
            self._largest[module] = torch.maximum(self._largest.get(module, found), found)
            return attend(q, k, v, mask)

        module.attend = observed

    @torch.no_grad()
    def clip(self, limit: float) -> None:
        """Scale weights, and biases, of heads above the limit, unless they are frozen."""
        for module, largest in self._largest.items():
            for head, logit in enumerate(largest.tolist()):
                if logit > limit:
                    _scale(module, head, limit / logit)

    def stop(self) -> None:
        """Observe no further."""
        for module, attend in self._attends.items():
            module.attend = attend


def _scale(module: Any, head: int, factor: float) -> None:
    parts: list[tuple[nn.Module, int, int, float]]
    first = head * module.head_dim
    if hasattr(module, "latent"):
        plain = module.plain_dim
        queries = module.q_b_proj if module.latent.query_rank else module.q_proj
        of_keys = head * (plain + module.latent.value_head_dim)
        parts = [
            (queries, first, plain, factor**0.5),
            (queries, first + plain, module.latent.rope_head_dim, factor),
            (module.kv_b_proj, of_keys, plain, factor**0.5),
        ]
    elif module.k_proj.weight.shape == module.q_proj.weight.shape:
        parts = [(each, first, module.head_dim, factor**0.5) for each in (module.q_proj, module.k_proj)]
    else:
        parts = [(module.q_proj, first, module.head_dim, factor)]
    for projection, start, rows, by in parts:
        for parameter in projection.parameters():
            if parameter.requires_grad:
                parameter[start : start + rows] *= by
