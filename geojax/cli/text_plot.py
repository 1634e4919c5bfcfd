"""A plot of curves in characters, for a terminal."""

from collections.abc import Sequence
from typing import NamedTuple

from rich.text import Text

from geojax.saved_runs.records.curves import shown_range

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a braille character's dots, by column and row."""
_BRAILLE = 0x2800
_MARKS = "ox+*"

Point = tuple[float, float]


class Marked(NamedTuple):
    """Points that are drawn as marks of one kind."""

    name: str
    points: Sequence[Point]
    style: str


def text_plot(
    line: Sequence[Point],
    marked: Sequence[Marked],
    width: int,
    height: int,
    *,
    style: str = "blue",
    is_unicode: bool = True,
) -> Text:
    """Draw a line and marks over steps, with the axes' ends.

    Args:
        line: step and value, by step; a value far above the later ones is cut off.
        marked: other curves.
        width: columns of the whole plot.
        height: lines of the whole plot.
        style: of the line.
        is_unicode: the terminal shows braille; else ASCII.
    """
    curves = [line, *(curve.points for curve in marked)]
    shown = shown_range([value for _, value in curve] for curve in curves)
    if shown is None:
        return Text("no loss yet", style="dim")
    low, high = shown
    points = [point for curve in curves for point in curve]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    rows = max(3, height - 1)
    labels = [_label(high), _label((high + low) / 2), _label(low)]
    margin = max(map(len, labels)) + 1
    columns = max(10, width - margin)
    canvas = _Canvas(columns, rows, (first, last), (low, high))
    canvas.draw(line)
    cells = [[(character, style) for character in row] for row in canvas.rows(is_unicode)]
    for curve, mark in zip(marked, _MARKS, strict=False):
        for point in curve.points:
            if point[1] <= high:
                row, column = canvas.cell(point)
                cells[row][column] = mark, curve.style
    text = Text(no_wrap=True)
    places = {0: labels[0], rows // 2: labels[1], rows - 1: labels[2]}
    for number, line_of_cells in enumerate(cells):
        text.append(f"{places.get(number, ''):>{margin - 1}} ", style="dim")
        for character, of_cell in line_of_cells:
            text.append(character, style=of_cell)
        text.append("\n")
    ends = f"step {first:,.0f}", f"{last:,.0f}"
    text.append(" " * margin + ends[0] + f"{ends[1]:>{columns - len(ends[0])}}", style="dim")
    return text


def _label(value: float) -> str:
    return f"{value:.3g}"


class _Canvas:
    """Dots in a grid of characters, two by four in each."""

    def __init__(self, columns: int, rows: int, x: Point, y: Point) -> None:
        self._columns, self._rows = columns, rows
        self._x, self._y = x, y
        self._bits = [[0] * columns for _ in range(rows)]

    def _dot(self, point: Point) -> tuple[int, int]:
        (x, y), (left, right), (low, high) = point, self._x, self._y
        across = (x - left) / (right - left) if right > left else 0.5
        up = min(1.0, max(0.0, (y - low) / (high - low)))
        column = round(across * (2 * self._columns - 1))
        return column, round((1 - up) * (4 * self._rows - 1))

    def cell(self, point: Point) -> tuple[int, int]:
        """Return row and column of the character in which a point lies."""
        column, row = self._dot(point)
        return row // 4, column // 2

    def draw(self, line: Sequence[Point]) -> None:
        """Draw a line through points, of which those in one column of dots are averaged."""
        columns: dict[int, list[float]] = {}
        for point in line:
            columns.setdefault(self._dot(point)[0], []).append(point[1])
        before: tuple[int, int] | None = None
        for column in sorted(columns):
            value = sum(columns[column]) / len(columns[column])
            if value > self._y[1]:  # cut off
                before = None
                continue
            _, row = self._dot((self._x[0], value))
            for x, y in [(column, row)] if before is None else _between(before, (column, row)):
                self._bits[y // 4][x // 2] |= _DOTS[x % 2][y % 4]
            before = column, row

    def rows(self, is_unicode: bool) -> list[str]:
        """Return the characters."""
        if not is_unicode:
            return ["".join("*" if bits else " " for bits in row) for row in self._bits]
        return [
            "".join(chr(_BRAILLE + bits) if bits else " " for bits in row) for row in self._bits
        ]


def _between(start: tuple[int, int], end: tuple[int, int]) -> list[tuple[int, int]]:
    """Return the dots of a straight line, without its start."""
    (x, y), (right, top) = start, end
    count = max(abs(right - x), abs(top - y), 1)
    return [
        (round(x + (right - x) * number / count), round(y + (top - y) * number / count))
        for number in range(1, count + 1)
    ]
