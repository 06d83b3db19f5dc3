"""The reference's loss of modules that predict further tokens: one document after the other, in plain lists.

It is written from DeepSeek-V3's equations (2024, arXiv:2412.19437, eq. 21 to 25), and shares with the model its weights
and its blocks, whose own reference is the model without such modules.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from configs.architectures.llama_keys import embedding_scale, n_further
from configs.schema import Config, is_described
from trainer.data.loader import IGNORED

Total = Callable[[Tensor, Tensor], Tensor]
"""(logits (tokens, vocab), targets (tokens,)) -> the loss, summed over the valid targets."""


class FurtherTokens:
    """Keeps what the model gives to its head, from which the modules go on."""

    def __init__(self, model: Any, config: Config) -> None:
        """Observe the model; create it before the forward pass."""
        self.model = model
        self.config: Any = config.model
        self.depth = n_further(config.model) if is_described(config.model) else 0
        self.hidden: list[Tensor] = []
        if self.depth:
            self.hook = model.norm.register_forward_hook(lambda _, __, output: self.hidden.append(output))

    def loss(self, tokens: Tensor, targets: Tensor, document_ids: Tensor | None, total: Total) -> Tensor | float:
        """loss_weight / depth * the sum over depths of their losses, divided by the number of the model's targets.

        Args:
            tokens, targets, document_ids: (sequences, seq), in the order in which the forward pass has seen them.
            total: the loss of some logits.
        """
        if not self.depth:
            return 0.0
        self.hook.remove()
        ids = torch.zeros_like(tokens) if document_ids is None else document_ids
        sequences = [row for hidden in self.hidden for row in hidden]
        streams: list[tuple[list[int], list[int]]] = []
        for row, ends, numbers in zip(tokens.tolist(), targets.tolist(), ids.tolist(), strict=True):
            for number in sorted(set(numbers)):
                places = [place for place, other in enumerate(numbers) if other == number]
                last = ends[places[-1]]
                stream = [row[place] for place in places] + ([] if last == IGNORED else [last])
                streams.append((stream, [ends[place] for place in places]))
        losses = [self._of_stream(one, *of_one, total) for one, of_one in zip(sequences, streams, strict=True)]
        weight = self.config.multi_token.loss_weight / self.depth
        return weight * sum(losses) / (targets != IGNORED).sum()

    def _of_stream(self, hidden: Tensor, stream: list[int], ends: list[int], total: Total) -> Tensor | float:
        """The sum over depths for one document of tokens, the last of which may be known as a target only.

        hidden: (its tokens, dim); ends: their targets, or IGNORED. Beyond the stream, a module sees token 0 and has no
        target.
        """
        model = self.model
        places = range(len(hidden))
        loss: Tensor | float = 0.0
        for depth, module in enumerate(model.multi_token.values(), start=1):
            seen = [stream[i + depth] if i + depth < len(stream) else 0 for i in places]
            labels = [ends[i + depth] if i + depth < len(ends) else IGNORED for i in places]
            embedded = F.embedding(torch.tensor(seen), model.embed_tokens.weight) * embedding_scale(self.config)
            joined = torch.cat((module.enorm(embedded), module.hnorm(hidden)), dim=-1)
            near = model.window_rotary if module.block.window else None
            angles = (near or model.rotary)(torch.arange(len(hidden))[None])
            hidden = module.block((joined @ module.eh_proj.weight.T)[None], *angles)[0][0]
            of_width = (self.config.mup_base_dim or self.config.dim) / self.config.dim
            logits = module.norm(hidden) @ model.lm_head.weight.T * of_width
            loss = loss + total(logits, torch.tensor(labels))
        return loss
