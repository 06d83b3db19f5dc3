"""A small folder of token files, with the tokenizer that it was made for; in a tenth of a second."""

import shlex
from functools import cache
from pathlib import Path

import numpy as np

from trainer.data.text.token_writer import TokenFileWriter
from trainer.data.tokenizer import load_tokenizer, train_sentencepiece

VOCAB_SIZE = 300
SOURCE = '[{name = "web", kind = "tokens", path = "%s"}]'


def make_web(folder: Path, seed: int = 0, n_tokens: int = 50_000, vocab_size: int = VOCAB_SIZE) -> Path:
    """Write `web/0.tokens` of random ids, and `web.model`, to `folder`; returns the token file."""
    tokenizer = folder / "web.model"
    tokenizer.write_bytes(_tokenizer(folder / "made.model"))
    (folder / "web").mkdir(exist_ok=True)
    file = folder / "web" / "0.tokens"
    with TokenFileWriter(file, vocab_size, load_tokenizer(tokenizer).hash) as writer:
        for ids in np.split(np.random.default_rng(seed).integers(0, vocab_size, n_tokens), 10):
            writer.append(ids)
    return file


def web_words(folder: Path | None = None) -> list[str]:
    """The words of the command line that train on it; None: found in the current folder."""
    path = (lambda name: name) if folder is None else (lambda name: str(folder / name))
    return [
        *("--data.sources", SOURCE % path("web"), "--tokenizer.path", path("web.model")),
        *("--model.vocab_size", str(VOCAB_SIZE)),
    ]


def typed(words: list[str]) -> str:
    """As one would type them."""
    return shlex.join(words)


@cache
def _tokenizer(path: Path) -> bytes:
    texts = (f"Text number {number} of many: {number**5} and {number**7}.\n" for number in range(200))
    train_sentencepiece(texts, path, VOCAB_SIZE)
    content = path.read_bytes()
    path.unlink()
    return content
