"""Prompts to tokens, and tokens to text as they arrive."""

from collections.abc import Sequence

from configs.errors import UserError
from trainer.data.text.fill_in import fim_tokens, to_fill_in
from trainer.data.tokenizer import Tokenizer

_UNFINISHED = "\ufffd"
"""A decoder's result for bytes that are not a character, or not yet."""


def prompt_tokens(tokenizer: Tokenizer, prompt: str, suffix: str | None = None) -> list[int]:
    """The tokens from which a model continues `prompt`: BOS, as before every document, and the text.

    Args:
        suffix: if given, the model continues with the text between `prompt` and this.

    Raises:
        UserError: there is no token to start from. The message is a clause about the prompt.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    for what, text in (("is", prompt), ("has a suffix that is", suffix or "")):
        try:
            text.encode()
        except UnicodeEncodeError:  # an argument of the command line may have any bytes
            raise UserError(f"{what} not valid UTF-8") from None
    tokens = [*begin, *tokenizer.encode(prompt)]
    if suffix is not None:
        tokens = [*begin, *to_fill_in(fim_tokens(tokenizer), tokenizer.encode(prompt), tokenizer.encode(suffix))]
    if not tokens:
        raise UserError("is empty, and the tokenizer has no BOS token to start from; give a text")
    return tokens


class TextStream:
    """The text that continues a prompt, piece by piece: a character comes with its last byte, and never changes."""

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._tokens = list(prompt)
        """The tokens that may still decide how the next ones are decoded."""
        self._shown = len(tokenizer.decode(prompt))
        """Characters of their text that were returned, or are the prompt's."""

    def push(self, token: int) -> str:
        """Add a token; returns the text that is now certain."""
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        certain = text.rstrip(_UNFINISHED)
        new = certain[self._shown :]
        self._shown = max(self._shown, len(certain))
        own = self._tokenizer.decode([token])
        # From a token with whole characters, the next ones are decoded as from the beginning. Not so from a byte.
        if certain == text and own and _UNFINISHED not in own:
            self._tokens = [token]
            self._shown = len(own)
        return new

    def end(self) -> str:
        """The rest: bytes that did not become a character."""
        return self._tokenizer.decode(self._tokens)[self._shown :]
