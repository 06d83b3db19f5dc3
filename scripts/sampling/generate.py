"""Continues prompts token by token, several at once."""

from collections.abc import Iterator, Sequence

import numpy as np

from configs.errors import UserError
from scripts.sampling.cache import CachedModel
from scripts.sampling.draw import NOT_FINITE, Distribution, draw


def generate(
    model: CachedModel,
    prompts: Sequence[Sequence[int]],
    max_tokens: int,
    seq_len: int,
    distribution: Distribution,
    randomness: Sequence[np.random.Generator],
    eos_id: int | None,
) -> Iterator[list[int | None]]:
    """Yield, for one token after the other, the token of each sequence; None: the sequence has ended.

    A sequence ends with EOS, which is yielded, after `max_tokens`, or when it has `seq_len` tokens in all.

    Args:
        model: starts with these prompts; use it for nothing else until the end.
        prompts: the tokens of each, between 1 and seq_len.
        max_tokens: new tokens per sequence.
        seq_len: tokens that the model was made for.
        distribution: of each next token.
        randomness: a generator for each prompt.
        eos_id: None if the tokenizer has no such token.

    Raises:
        UserError: logits are not finite.
    """
    rooms = [min(max_tokens, seq_len - len(prompt)) for prompt in prompts]
    alive = [room > 0 for room in rooms]
    if not any(alive):
        return
    logits = model.start(prompts, min(max(map(len, prompts)) + max_tokens, seq_len))
    for n in range(1, max(rooms) + 1):
        drawn = draw(logits, distribution, [generator.random() for generator in randomness])
        tokens: list[int] = drawn.tolist()
        if any(going and token == NOT_FINITE for going, token in zip(alive, tokens, strict=True)):
            raise UserError("the model's output is not finite, so no token can be drawn; choose an earlier checkpoint")
        yield [token if going else None for going, token in zip(alive, tokens, strict=True)]
        alive = [
            going and token != eos_id and n < room for going, token, room in zip(alive, tokens, rooms, strict=True)
        ]
        if not any(alive):
            return
        logits = model.step(drawn.clamp(min=0))
