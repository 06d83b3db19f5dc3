"""Fill in the middle: documents whose middle comes last, from which a model learns to insert (Bavarian et al. 2022,
arXiv 2207.14255).

A document is cut at two of its characters, and read in another order, as models for code are trained (StarCoder,
Qwen-Coder, DeepSeek-Coder):

    prefix first    BOS <prefix> prefix <suffix> suffix <middle> middle EOS
    suffix first    BOS <prefix> <suffix> suffix <middle> prefix middle EOS

A hash of the text draws whether, in which order and where, so that the same text is cut alike, however the work is
divided. Each part is encoded by itself: when the model is asked, prefix and suffix may end anywhere, too.
"""

from typing import NamedTuple

import numpy as np
import xxhash

from configs.errors import UserError
from trainer.data.tokenizer import Tokenizer, encode_document, encode_runs, within_document

NAMES = (
    ("<fim_prefix>", "<fim_suffix>", "<fim_middle>"),
    ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"),
    ("<\uff5cfim\u2581begin\uff5c>", "<\uff5cfim\u2581hole\uff5c>", "<\uff5cfim\u2581end\uff5c>"),
)
"""How the three tokens are called: by StarCoder and Keel, by Qwen-Coder and CodeGemma, and by DeepSeek."""
SUFFIX_FIRST = 0.5
"""The usual share of rearranged documents with the suffix first."""


class FimTokens(NamedTuple):
    """The tokens before each part."""

    prefix: int
    suffix: int
    middle: int


def fim_tokens(
    tokenizer: Tokenizer, remedy: str = "name one that has, or train one: scripts/train_tokenizer.py --fim"
) -> FimTokens:
    """The tokens of a tokenizer that stand before the parts.

    Args:
        remedy: what to do if it has none.

    Raises:
        UserError: it has none.
    """
    if (found := fim_tokens_or_none(tokenizer)) is not None:
        return found
    known = "; ".join(" ".join(names) for names in NAMES)
    raise UserError(f"the tokenizer has no tokens to fill in the middle by (looked for: {known}); {remedy}")


def fim_tokens_or_none(tokenizer: Tokenizer) -> FimTokens | None:
    """The tokens of a tokenizer that stand before the parts; None if it has none."""
    for names in NAMES:
        ids = [tokenizer.id_of(name) for name in names]
        if None not in ids:
            return FimTokens(*[i for i in ids if i is not None])
    return None


def encode_rearranged(
    tokenizer: Tokenizer, tokens: FimTokens, text: str, rate: float, suffix_first: float
) -> list[int]:
    """Encode a whole document as `encode_document`, perhaps with its middle last.

    Args:
        rate: probability of that.
        suffix_first: probability that the suffix then comes before the prefix.
    """
    content = text.encode()

    def drawn(seed: int) -> int:
        """Uniform over 64 bits; seed 0 divides training from validation."""
        return xxhash.xxh3_64_intdigest(content, seed)

    if drawn(1) >= rate * 2**64:
        return encode_document(tokenizer, text)
    first, second = sorted(drawn(seed) * (len(text) + 1) >> 64 for seed in (2, 3))
    prefix, middle, suffix = (
        encode_runs(tokenizer, part) for part in (text[:first], text[first:second], text[second:])
    )
    if drawn(4) < suffix_first * 2**64:
        return within_document(tokenizer, [tokens.prefix, tokens.suffix, *suffix, tokens.middle, *prefix, *middle])
    return within_document(tokenizer, [*to_fill_in(tokens, prefix, suffix), *middle])


def to_fill_in(tokens: FimTokens, prefix: list[int], suffix: list[int]) -> list[int]:
    """What a model continues with the text between prefix and suffix."""
    return [tokens.prefix, *prefix, tokens.suffix, *suffix, tokens.middle]


def text_order(tokens: FimTokens, ids: np.ndarray) -> np.ndarray:
    """The places of a document's tokens in the order of its text, (n,): of one that was rearranged, the middle's, or
    prefix's and middle's, before the suffix's."""
    order = np.arange(len(ids))
    at_suffix, at_middle = (np.flatnonzero(ids == token)[:1] for token in (tokens.suffix, tokens.middle))
    if tokens.prefix not in ids[:2] or not (at_suffix < at_middle).any():  # whole, or a window has cut it
        return order
    begin, suffix, rest = np.split(order, [at_suffix[0], at_middle[0]])
    return np.concatenate([begin, rest, suffix])
