"""The documents of a folder of token files: which one a token is in, and where a text occurs."""

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import numpy as np

from trainer.data.text.fill_in import fim_tokens_or_none, text_order
from trainer.data.token_file import TokenFolder
from trainer.data.tokenizer import Tokenizer


@dataclass(frozen=True)
class Document:
    """A document's place in its folder, whose documents and tokens are numbered through all files."""

    number: int
    start: int
    """Its first token."""
    stop: int
    """The token after its last."""
    file: str | Path


class Documents:
    """All documents of a folder, found by binary search in the files' tables, without reading these whole."""

    def __init__(self, folder: TokenFolder) -> None:
        """Use an open folder."""
        self.folder = folder
        self._first_documents = [0, *accumulate(file.header.n_documents for file in folder.files)]
        self._first_tokens = [0, *accumulate(file.n_tokens for file in folder.files)]

    def __len__(self) -> int:
        return self._first_documents[-1]

    def __getitem__(self, number: int) -> Document:
        """The document of this number, from 0; raises IndexError if there is none."""
        if not 0 <= number < len(self):
            raise IndexError(number)
        place = bisect_right(self._first_documents, number) - 1
        file = self.folder.files[place]
        in_file = number - self._first_documents[place]
        start, stop = (self._first_tokens[place] + file.document_offset(in_file + i) for i in (0, 1))
        return Document(number, start, stop, file.path)

    def at(self, token: int) -> Document:
        """The document that a token belongs to; tokens are numbered through all files."""
        place = bisect_right(self._first_tokens, token) - 1
        file = self.folder.files[place]
        in_file = token - self._first_tokens[place]
        after = bisect_right(range(file.header.n_documents), in_file, key=file.document_offset)
        return self[self._first_documents[place] + after - 1]

    def between(self, start: int, stop: int) -> Iterator[Document]:
        """The documents that have a token in [start, stop), in order."""
        while start < stop:
            document = self.at(start)
            yield document
            start = document.stop


def occurrences(text: str, documents: Documents, tokenizer: Tokenizer) -> Iterator[tuple[Document, int, int]]:
    """Find a text by decoding every document; yields the document and the tokens [start, stop) that spell the text.

    There is no index: a megabyte of text takes about 0.1 s. A document whose middle comes last is searched in the order
    of its text; the tokens of what was cut are then all those between its parts, too.
    """
    lengths = tokenizer.token_bytes()
    fim = fim_tokens_or_none(tokenizer)
    for number in range(len(documents)):
        document = documents[number]
        ids = documents.folder.read(document.start, document.stop - document.start)
        order = np.arange(len(ids)) if fim is None else text_order(fim, ids)
        ids = ids[order]
        decoded = tokenizer.decode(ids.tolist())
        if text not in decoded:
            continue
        ends = np.cumsum(lengths[ids])
        raw = decoded.encode()
        sought = text.encode()
        at = raw.find(sought)
        while at >= 0:
            if ends[-1] == len(raw):
                first = int(np.searchsorted(ends, at, side="right"))
                last = int(np.searchsorted(ends, at + len(sought), side="left"))
                places = order[first : last + 1]
                yield document, document.start + int(places.min()), document.start + int(places.max()) + 1
            else:  # the decoder adds or drops characters, so that bytes do not tell the token
                yield document, document.start, document.stop
                break
            at = raw.find(sought, at + 1)
