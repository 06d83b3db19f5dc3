"""A model that remembers the tokens it has seen, by keys and values or by states, so that one more costs one position.

The model is not changed but for the `attend` of its plan's attention modules and the `mix` of its recurrent ones, the
only places that read other tokens. A sequence's token at position i has row i of its cache. Prompts of different
lengths are padded at their end, and the rows of the padding are overwritten as the sequence grows, so no token ever
attends to padding. A state is that after a sequence's newest token.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from configs.plan import attention_of, plan_of, recurrent_of
from models.hf.check import depends_on_longest
from trainer.loss import logits_of

Attend = Callable[[Tensor, Tensor, Tensor, Any], Tensor]
Continued = Callable[[Tensor, Tensor, Any, Any], tuple[Tensor, Any]]


class CachedModel:
    """A whole model in one process, which continues a batch of sequences token by token."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._model = model
        self._device = device
        attention = attention_of(model) if plan_of(model).can_cache else []
        recurrent = recurrent_of(model) if plan_of(model).can_cache else []
        self._sequences: list[list[int]] | None = None if attention or recurrent else []
        """The tokens so far, of a model whose attention cannot be replaced: every token reads all before it again."""
        self._is_apart = depends_on_longest(model)
        """Whether each sequence is computed apart from the others."""
        self._layers: list[list[Tensor]] = []
        """Keys and values of each attention module, (batch, heads, length, head_dim); empty before `start`."""
        for module in attention:
            self._layers.append([])
            window = getattr(module, "window", None)
            module.attend = partial(self._attend, self._layers[-1], window, module.attend)
        self._states: list[list[Any]] = []
        """The state of each recurrent module; empty before `start`."""
        for each in recurrent:
            self._states.append([])
            each.mix = partial(self._mix, self._states[-1], each.continued)
        self._length = self._end = 0
        self._is_even = True
        """Whether all sequences have the same length."""
        self._places = torch.empty(0, dtype=torch.int64)
        """(batch,): the position of each sequence's newest token."""
        self._shortest = 0
        """The position of the newest token of the shortest sequence."""

    @torch.no_grad()
    def start(self, prompts: Sequence[Sequence[int]], length: int) -> Tensor:
        """Forget the last batch and read these prompts.

        Args:
            prompts: the tokens of each, at least one.
            length: tokens that each sequence has room for, the longest prompt's included.

        Returns:
            The logits of the tokens after the prompts, (batch, vocab).
        """
        for kept in (*self._layers, *self._states):
            kept.clear()
        if self._sequences is not None:
            self._sequences = [list(prompt) for prompt in prompts]
            self._length = length
            return self._of_whole_sequences()
        lengths = [len(prompt) for prompt in prompts]
        self._is_even = len(set(lengths)) == 1
        tokens = torch.tensor([[*prompt, *[0] * (max(lengths) - len(prompt))] for prompt in prompts])
        self._length = length
        self._end = max(lengths)
        self._places = torch.tensor(lengths, device=self._device) - 1
        self._shortest = min(lengths) - 1
        return self._logits(tokens.to(self._device), None, self._places)

    @torch.no_grad()
    def step(self, tokens: Tensor) -> Tensor:
        """Append a token, (batch,), to each sequence; returns the logits of the next ones, (batch, vocab).

        A sequence that has no more room keeps overwriting its last token: its logits mean nothing.
        """
        if self._sequences is not None:
            for sequence, token in zip(self._sequences, tokens.tolist(), strict=True):
                del sequence[self._length - 1 :]
                sequence.append(token)
            return self._of_whole_sequences()
        self._end = min(self._end + 1, self._length)
        self._places = (self._places + 1).clamp(max=self._length - 1)
        self._shortest = min(self._shortest + 1, self._length - 1)
        return self._logits(tokens.to(self._device)[:, None], self._places[:, None], torch.zeros_like(self._places))

    def _of_whole_sequences(self) -> Tensor:
        """The logits after the whole of each sequence."""
        sequences = self._sequences or []
        if not self._is_apart:
            return self._of_padded(sequences)
        return torch.cat([self._of_padded([tokens]) for tokens in sequences])

    def _of_padded(self, sequences: Sequence[Sequence[int]]) -> Tensor:
        """The logits after the whole of each sequence, padded at its end, where nothing attends to."""
        longest = max(map(len, sequences))
        tokens = torch.tensor([[*tokens, *[0] * (longest - len(tokens))] for tokens in sequences])
        last = torch.tensor([len(tokens) - 1 for tokens in sequences], device=self._device)
        return self._logits(tokens.to(self._device), None, last)

    def _logits(self, tokens: Tensor, positions: Tensor | None, last: Tensor) -> Tensor:
        """Run the model; returns the logits at the index `last`, (batch,), of each sequence of `tokens`."""

        def at_last(hidden: Tensor, weight: Tensor, **of_head: Any) -> Tensor:
            return logits_of(hidden[torch.arange(len(last), device=self._device), last], weight, **of_head)

        return self._model(tokens, positions, loss=at_last)

    def _attend(
        self, layer: list[Tensor], window: int | None, attend: Attend, q: Tensor, k: Tensor, v: Tensor, mask: Any
    ) -> Tensor:
        """Attend to the tokens so far, or the last `window`; (batch, heads, seq, head_dim), seq 1 after the prompts."""
        if not layer:
            # Zeros: a masked row still enters a product with a weight of zero, and must not be NaN.
            layer += [new.new_zeros(*new.shape[:2], self._length, new.shape[3]) for new in (k, v)]
            for cached, new in zip(layer, (k, v), strict=True):
                cached[:, :, : new.shape[2]] = new
            return attend(q, k, v, mask)
        batch = torch.arange(len(k), device=self._device)
        for cached, new in zip(layer, (k, v), strict=True):
            cached[batch, :, self._places] = new[:, :, 0]
        first = max(0, self._shortest - window + 1) if window else 0
        keys, values = (cached[:, :, first : self._end] for cached in layer)
        seen = None if self._is_even else self._seen(first, window)
        return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=q.shape[1] != keys.shape[1])

    def _seen(self, first: int, window: int | None) -> Tensor:
        """(batch, 1, 1, end - first): whether each sequence's newest token sees a row of the cache."""
        rows = torch.arange(first, self._end, device=self._device)
        newest = self._places[:, None]
        seen = rows <= newest
        return (seen & (rows > newest - window) if window else seen)[:, None, None]

    def _mix(
        self, kept: list[Any], continued: Continued, rows: Tensor, gates: Tensor, heads: Any, _documents: None
    ) -> Tensor:
        """Go on from the state that is kept; (batch, seq, heads, n), where seq is 1 after the prompts."""
        if kept or self._is_even:
            out, state = continued(rows, gates, heads, kept[0] if kept else None)
            kept[:] = [state]
            return out
        # Each prompt alone, since the state after its padding would be another.
        lengths = (self._places + 1).tolist()
        read = [continued(rows[i, :n][None], gates[i, :n][None], heads, None) for i, n in enumerate(lengths)]
        states = [state for _, state in read]
        kept.append(type(states[0])(*map(torch.cat, zip(*states, strict=True))))
        return pad_sequence([out[0] for out, _ in read], batch_first=True)
