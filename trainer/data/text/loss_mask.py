"""Which tokens of a document give no loss: instructions are read, and only answers learned.

A prompt may be in a column of its own: it gives no loss, and the document's text, which comes behind it, does.

Otherwise markers in the text divide it. A document begins without loss. Each token behind the text `until` gives loss,
up to and including the text `after`, from where the next `until` is looked for. So a model that is to answer learns the
answers, and the marker by which an answer ends, but neither the questions nor the marker by which an answer begins.
Without `after`, everything behind the first `until` gives loss. A document without `until` gives none.

Each part is encoded by itself, so that no token has text of both kinds. That is also how a prompt is encoded when the
model is asked, and the answer comes token by token.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from trainer.data.tokenizer import Tokenizer, encode_runs


def parts_of(text: str, until: str, after: str | None) -> Iterator[tuple[str, bool]]:
    """Cut a text behind the markers: each part, of which the last may be empty, and whether its tokens give loss."""
    start = 0
    gives_loss = False
    while (marker := after if gives_loss else until) and (at := text.find(marker, start)) >= 0:
        stop = at + len(marker)
        yield text[start:stop], gives_loss
        start = stop
        gives_loss = not gives_loss
    yield text[start:], gives_loss


def encode_masked(tokenizer: Tokenizer, parts: Iterable[tuple[str, bool]]) -> np.ndarray:
    """Encode a whole document as `encode_document`, with its loss mask.

    EOS gives loss if the last part of the text does, BOS never.

    Args:
        parts: of the text, in order, and whether their tokens give loss.

    Returns:
        For each token 2 * id, plus 1 if it gives no loss; int64, as token files store it.
    """
    numbers = [] if tokenizer.bos_id is None else [2 * tokenizer.bos_id + 1]
    gives_none = True
    for part, gives_loss in parts:
        gives_none = not gives_loss
        numbers += [2 * token + gives_none for token in encode_runs(tokenizer, part)]
    if tokenizer.eos_id is not None:
        numbers.append(2 * tokenizer.eos_id + gives_none)
    return np.array(numbers, dtype=np.int64)
