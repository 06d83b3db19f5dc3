"""Prompts to tokens."""

from configs.errors import UserError
from trainer.data.tokenizer import Tokenizer


def prompt_tokens(tokenizer: Tokenizer, prompt: str, most: int | None = None) -> list[int]:
    """The tokens from which a model continues `prompt`: BOS, as before every document, and the text.

    Raises:
        UserError: there is no token to start from, or more than `most`. The message is a clause about the prompt.
    """
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    try:
        prompt.encode()
    except UnicodeEncodeError:  # an argument of the command line may have any bytes
        raise UserError("is not valid UTF-8") from None
    tokens = [*begin, *tokenizer.encode(prompt)]
    if not tokens:
        raise UserError("is empty, and the tokenizer has no BOS token to start from; give a text")
    if most is not None and len(tokens) > most:
        raise UserError(f"has {len(tokens)} tokens, and there is room for {most}")
    return tokens
