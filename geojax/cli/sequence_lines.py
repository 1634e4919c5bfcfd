"""Lines of a sequence: each token's text above its number, document by document."""

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from geojax.cli.escaping import escaped_visibly
from geojax.suggestions import listed

if TYPE_CHECKING:
    from geojax.data.preview import DocumentSpan, ShownSequence, TokenTexts

_MARGIN = 8
_LENGTHS = 40
"""Most characters of the list of a sequence's documents."""


def counted(number: int, noun: str) -> str:
    """Write a number of things."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def sequence_lines(
    sequence: "ShownSequence", texts: "TokenTexts", most: int, width: int
) -> Iterator[Text]:
    """Yield the lines of a sequence, document by document."""
    shown = min(most, len(sequence.arrays["tokens"]))
    documents = sequence.documents
    lengths = [f"{each.tokens:,}" for each in documents if each.segment]
    if len(lengths) > 1:
        yield Text(f"{len(lengths):,} documents: {listed(lengths, longest=_LENGTHS)} tokens")
    for number, document in enumerate(documents):
        if document.start >= shown:
            break
        yield Text(_document_title(number, documents, sequence))
        if document.segment:
            stop = min(document.stop, shown)
            yield from _token_lines(sequence, texts, range(document.start, stop), width)
    left = len(sequence.arrays["tokens"]) - shown
    if left:
        yield Text(f"{counted(left, 'more token')} left out; --tokens {shown + left} shows all")
    elif documents[-1].segment:
        yield Text("target of the last position")
        yield from _token_lines(sequence, texts, range(shown, shown + 1), width)


def _document_title(
    number: int, documents: "Sequence[DocumentSpan]", sequence: "ShownSequence"
) -> str:
    document = documents[number]
    if not document.segment:
        return f"padding: {counted(document.tokens, 'position')}"
    title = f"document {document.segment:,}: {counted(document.tokens, 'token')}"
    if number == 0 and sequence.begins_document is False:
        title += ", without its beginning"
    return title


class _Cell(NamedTuple):
    """A token as it is printed."""

    text: str
    number: str
    is_counted: bool
    is_special: bool

    @property
    def width(self) -> int:
        return max(cell_len(self.text), len(self.number))


def _token_lines(
    sequence: "ShownSequence", texts: "TokenTexts", positions: range, width: int
) -> Iterator[Text]:
    """Yield a line of texts and a line of numbers below it, in turn."""
    room = max(width - _MARGIN, 20)
    tokens, is_counted = sequence.with_last_target, sequence.is_counted
    row: list[_Cell] = []
    first, taken = positions.start, 0
    for position in positions:
        cell = _cell(texts, tokens[position], is_counted[position], room)
        if row and taken + cell.width > room:
            yield from _row(first, row)
            row, first, taken = [], position, 0
        row.append(cell)
        taken += cell.width + 2
    yield from _row(first, row)


def _cell(texts: "TokenTexts", token: int, is_counted: bool, room: int) -> _Cell:
    text = escaped_visibly(texts.text(token))
    if cell_len(text) > room:
        text = f"{set_cell_size(text, room - 3).rstrip()}..."
    number = str(token) if is_counted else f"({token})"
    return _Cell(text, number, is_counted, texts.is_special(token))


def _row(first: int, cells: Sequence[_Cell]) -> Iterator[Text]:
    above, below = Text(f"{first:>{_MARGIN - 2}}  ", "dim"), Text(" " * _MARGIN)
    for number, cell in enumerate(cells):
        is_last = number == len(cells) - 1
        for line, word, style in (
            (above, cell.text, "bold" if cell.is_special else ""),
            (below, cell.number, "green"),
        ):
            line.append(word, style if cell.is_counted else f"{style} dim".strip())
            line.append("" if is_last else " " * (cell.width + 2 - cell_len(word)))
    yield above
    yield below
