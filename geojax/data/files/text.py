"""Documents in pieces, so that one that is larger than the memory can be read."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from geojax.data.files.opening import Advance, open_text, silent

PIECE_CHARACTERS = 1 << 18
"""Size of the pieces, cut at the end of a line, in which longer documents are tokenized."""


class DocumentPiece(NamedTuple):
    """A part of a document's text; `first` and `last` mark the document's ends."""

    text: str
    first: bool
    last: bool


def split_text(text: str) -> Iterator[DocumentPiece]:
    """Split a text in memory, which is one document, into pieces."""
    if len(text) <= PIECE_CHARACTERS:
        if text:
            yield DocumentPiece(text, first=True, last=True)
        return
    yield from _pieces(io.StringIO(text))


def read_text(path: Path, advance: Advance = silent) -> Iterator[DocumentPiece]:
    """Read a file of text, which is one document.

    Raises:
        UserError: it cannot be read, or is not UTF-8 text.
    """
    with open_text(path, advance) as text:
        yield from _pieces(text)


def _pieces(text: io.TextIOBase) -> Iterator[DocumentPiece]:
    def take() -> str:
        part = text.read(PIECE_CHARACTERS)
        # A line without an end must not pull the rest of the file into memory.
        return part + text.readline(PIECE_CHARACTERS) if part else ""

    current, first = take(), True
    while current:
        following = take()
        yield DocumentPiece(current, first, last=not following)
        current, first = following, False
