"""Documents in pieces, so that one that is larger than the memory can be read."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from geojax.data.files.opening import Advance, open_text, silent

PIECE_CHARACTERS = 1 << 18
"""Size of the pieces in which longer documents are tokenized.

A piece ends with a line, where a line ends within as many characters again. Else it ends with a
word, and only a run of so many characters without a blank is cut.
"""


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
    rest = ""

    def take() -> str:
        nonlocal rest
        piece = rest + text.read(PIECE_CHARACTERS)
        rest = ""
        if piece and not piece.endswith("\n"):
            # A line without an end must not pull the rest of the file into memory.
            piece += text.readline(PIECE_CHARACTERS)
            if len(piece) >= 2 * PIECE_CHARACTERS and not piece.endswith("\n"):
                # Most tokenizers begin a word with the blank before it.
                blank = piece.rfind(" ", len(piece) // 2)
                end = len(piece) if blank < 0 else blank
                piece, rest = piece[:end], piece[end:]
        return piece

    current, first = take(), True
    while current:
        following = take()
        yield DocumentPiece(current, first, last=not following)
        current, first = following, False
