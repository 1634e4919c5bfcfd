"""Plots as SVG: lines, stacked areas, and bars on a common axis, with labels at their ends."""

import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from geojax.cli.markup import Markup, element, joined

Point = tuple[float, float]
Format = Callable[[float], str]

BLUE, VERMILION, GREEN = "#0072B2", "#D55E00", "#009E73"
ORANGE, SKY, PURPLE, GRAY = "#E69F00", "#56B4E9", "#AA4499", "#6b7280"
COLORS = (BLUE, VERMILION, GREEN, PURPLE, ORANGE, SKY, GRAY)
"""Colors that are told apart with any kind of color vision (after Okabe and Ito)."""

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 132, 26, 42
_RIGHT_WITHOUT_LABELS = 16
_LIGHT = (ORANGE, SKY, "#d1d5db", "#a3a3a3")
"""Colors on which words are dark."""
_FONT = 11
_LABEL_HEIGHT = 13
_LONGEST_LABEL = 22


@dataclasses.dataclass(frozen=True)
class Series:
    """A line with its label."""

    label: str
    segments: Sequence[Sequence[Point]]
    """Points by x; between segments the line is broken."""
    color: str
    stroke: float = 1.8
    opacity: float = 1.0
    band: Sequence[tuple[float, float, float]] = ()
    """x, least and largest value of an area in the line's color."""
    is_marked: bool = False
    """True for a mark at each point."""
    is_dashed: bool = False


class ShadedRange(NamedTuple):
    """A range of x that is shaded."""

    start: float
    end: float
    label: str


class PlotAxes:
    """A plotting area with its two scales.

    Args:
        x: least and largest x.
        y: least and largest y; the scale goes on to the next tick.
        has_labels: True for a margin beside the area.
    """

    def __init__(self, x: Point, y: Point, has_labels: bool = True) -> None:
        self.x_range = (x[0], x[1] if x[1] > x[0] else x[0] + 1)
        self.y_ticks = ticks(*y, 5)
        low, high = min(y[0], self.y_ticks[0]), max(y[1], self.y_ticks[-1])
        self.y_range = (low, high if high > low else low + 1)
        self.x_ticks = [tick for tick in ticks(*self.x_range, 6) if tick <= self.x_range[1]]
        self.x_ticks = [tick for tick in self.x_ticks if tick >= self.x_range[0]]
        self.right = WIDTH - (_RIGHT if has_labels else _RIGHT_WITHOUT_LABELS)
        self.bottom = HEIGHT - _BOTTOM

    def x(self, value: float) -> float:
        """Return the pixel of an x."""
        low, high = self.x_range
        return _LEFT + (value - low) / (high - low) * (self.right - _LEFT)

    def y(self, value: float) -> float:
        """Return the pixel of a y, which is not far beyond the area."""
        low, high = self.y_range
        share = min(3.0, max(-2.0, (value - low) / (high - low)))
        return self.bottom - share * (self.bottom - _TOP)

    def frame(self, x_label: str, y_label: str, x_format: Format, y_format: Format) -> Markup:
        """Draw grid, ticks and labels."""
        parts: list[Markup] = [_text(8, 14, y_label, class_="axis")]
        for tick in self.y_ticks:
            y = self.y(tick)
            parts.append(_line(_LEFT, y, self.right, y, "grid"))
            parts.append(_text(_LEFT - 6, y + 4, y_format(tick), text_anchor="end"))
        for tick in self.x_ticks:
            x = self.x(tick)
            parts.append(_line(x, self.bottom, x, self.bottom + 4, "tick"))
            parts.append(_text(x, self.bottom + 16, x_format(tick), text_anchor="middle"))
        middle = (_LEFT + self.right) / 2
        parts.append(_text(middle, HEIGHT - 6, x_label, text_anchor="middle", class_="axis"))
        return joined(*parts)

    def inside(self, *parts: Markup) -> Markup:
        """Cut off what leaves the area."""
        box = {"x": _LEFT, "y": _TOP - 3, "width": self.right - _LEFT + 3}
        box["height"] = self.bottom - _TOP + 6
        view = f"{box['x']} {box['y']} {box['width']} {box['height']}"
        return element("svg", *parts, **box, viewBox=view)

    def svg(self, title: str, *parts: Markup) -> Markup:
        """Put the parts of a plot together; the title is for those who cannot see it."""
        return element(
            "svg",
            element("title", title),
            *parts,
            viewBox=f"0 0 {WIDTH} {HEIGHT}",
            role="img",
            class_="plot",
        )


def line_plot(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_label: str,
    *,
    y_range: Point | None = None,
    x_format: Format | None = None,
    y_format: Format | None = None,
    spans: Sequence[ShadedRange] = (),
) -> Markup:
    """Draw lines with labels at their right ends.

    Args:
        title: of the plot.
        series: lines; those without points are left out.
        x_label: quantity and unit.
        y_label: quantity and unit.
        y_range: values to show; lines beyond it leave at the edge. None: from 0 to the largest.
        x_format: words of a tick; None: a plain number.
        y_format: the same.
        spans: shaded ranges.
    """
    series = [each for each in series if any(each.segments)]
    points = [point for each in series for segment in each.segments for point in segment]
    if not points:
        return element("p", f"{title}: not recorded.", class_="none")
    if y_range is None:
        highs = [high for each in series for _, _, high in each.band]
        y_range = (0.0, max([*(y for _, y in points), *highs, 0.0]) or 1.0)
    xs = [x for x, _ in points]
    axes = PlotAxes((min(xs), max(xs)), y_range, any(each.label for each in series))
    y_format = y_format or tick_format(axes.y_ticks)
    parts = [axes.frame(x_label, y_label, x_format or tick_format(axes.x_ticks), y_format)]
    for span in spans:
        start, end = (
            axes.x(max(span.start, axes.x_range[0])),
            axes.x(min(span.end, axes.x_range[1])),
        )
        if end > start:
            box = {"x": start, "y": _TOP, "width": max(1.0, end - start)}
            shade = element("rect", **box, height=axes.bottom - _TOP, class_="span")
            parts.append(element("g", shade, element("title", span.label)))
    parts.append(axes.inside(*(part for each in series for part in _drawn(each, axes))))
    if (highest := max(y for _, y in points)) > axes.y_range[1]:
        words = f"cut off: up to {highest:.3g}"
        parts.append(_text(axes.right, 14, words, text_anchor="end", class_="cut"))
    ends = [
        (axes.y(last[-1][1]), each.label, each.color)
        for each in series
        if each.label
        if (last := next((segment for segment in reversed(each.segments) if segment), None))
    ]
    return axes.svg(title, *parts, *_labels(ends, axes))


def _drawn(series: Series, axes: PlotAxes) -> list[Markup]:
    parts = []
    if series.band:
        there = [(axes.x(x), axes.y(high)) for x, _, high in series.band]
        back = [(axes.x(x), axes.y(low)) for x, low, _ in reversed(series.band)]
        path = f"{_path([*there, *back])}Z"
        parts.append(element("path", d=path, fill=series.color, opacity="0.2"))
    for segment in filter(None, series.segments):
        pixels = [(axes.x(x), axes.y(y)) for x, y in segment]
        if len(pixels) > 1:
            dashes = "5 3" if series.is_dashed else None
            line = element(
                "path",
                d=_path(pixels),
                fill="none",
                stroke=series.color,
                stroke_width=series.stroke,
                stroke_dasharray=dashes,
                stroke_linejoin="round",
                opacity=f"{series.opacity:g}",
            )
            parts.append(line)
        if series.is_marked or len(pixels) == 1:
            parts += [element("circle", cx=x, cy=y, r="2.6", fill=series.color) for x, y in pixels]
    return parts


def _labels(ends: Sequence[tuple[float, str, str]], axes: PlotAxes) -> list[Markup]:
    """Write labels beside the lines' ends, none over another."""
    parts, free = [], float(_TOP)
    ordered = sorted(ends)
    for number, (y, label, color) in enumerate(ordered):
        room = axes.bottom + _LABEL_HEIGHT - (len(ordered) - number) * _LABEL_HEIGHT
        y = max(free, min(y + 4, room))
        free = y + _LABEL_HEIGHT
        parts.append(_text(axes.right + 7, y, cut(label), fill=color, class_="label"))
    return parts


def stack_plot(
    title: str,
    rows: Sequence[tuple[float, Mapping[str, float]]],
    colors: Mapping[str, str],
    label_of: Mapping[str, str],
    x_label: str,
    y_label: str,
    *,
    top: float | None = None,
) -> Markup:
    """Draw areas above each other, with labels in the margin.

    Args:
        title: of the plot.
        rows: x, and the values there by name.
        colors: of the names, the lowest area first.
        label_of: words beside the areas.
        x_label: quantity and unit.
        y_label: quantity and unit.
        top: largest value to show; None: the largest sum.
    """
    names = [name for name in colors if any(name in values for _, values in rows)]
    if not rows or not names:
        return element("p", f"{title}: not recorded.", class_="none")
    top = top or max(sum(values.values()) for _, values in rows)
    axes = PlotAxes((rows[0][0], rows[-1][0]), (0.0, top or 1.0))
    formats = tick_format(axes.x_ticks), tick_format(axes.y_ticks)
    parts = [axes.frame(x_label, y_label, *formats)]
    edges = _edges([axes.x(x) for x, _ in rows])
    sums, areas = [0.0] * len(rows), []
    for name in names:
        lower = _steps(edges, [axes.y(value) for value in sums])
        sums = [
            below + values.get(name, 0.0) for below, (_, values) in zip(sums, rows, strict=True)
        ]
        there = _steps(edges, [axes.y(value) for value in sums])
        back = reversed(lower)
        areas.append(element("path", d=f"{_path([*there, *back])}Z", fill=colors[name]))
    parts.append(axes.inside(*areas))
    for number, name in enumerate(reversed(names)):
        y = _TOP + 8 + 15 * number
        parts.append(
            element("rect", x=axes.right + 8, y=y - 8, width=9, height=9, fill=colors[name])
        )
        parts.append(_text(axes.right + 21, y, cut(label_of.get(name, name)), class_="label"))
    return axes.svg(title, *parts)


def _edges(pixels: Sequence[float]) -> list[float]:
    """Return the left and the right edges of columns around their middles."""
    between = [(a + b) / 2 for a, b in itertools.pairwise(pixels)]
    return [pixels[0], *between, pixels[-1]]


def _steps(edges: Sequence[float], heights: Sequence[float]) -> list[Point]:
    """Return the corners of columns of the given heights."""
    columns = zip(itertools.pairwise(edges), heights, strict=True)
    return [corner for (left, right), y in columns for corner in ((left, y), (right, y))]


class Bar(NamedTuple):
    """A bar of a lane."""

    start: float
    end: float
    color: str
    label: str
    """Words on the bar, where they have room."""
    meaning: str
    """Words that a pointer on the bar shows."""


class Tick(NamedTuple):
    """A moment in a lane."""

    x: float
    meaning: str


class Lane(NamedTuple):
    """A row of bars and moments."""

    label: str
    bars: Sequence[Bar]
    ticks: Sequence[Tick]
    color: str


def lane_plot(
    title: str, lanes: Sequence[Lane], x: Point, x_label: str, x_format: Format | None = None
) -> Markup:
    """Draw rows of bars and moments over one axis, across the whole width."""
    width, left, right, row = 2 * WIDTH + 20, 150, 20, 24
    height = len(lanes) * row + 46
    low, high = x[0], x[1] if x[1] > x[0] else x[0] + 1
    bottom = len(lanes) * row + 6

    def pixel(value: float) -> float:
        share = min(1.0, max(0.0, (value - low) / (high - low)))
        return left + share * (width - left - right)

    parts: list[Markup] = []
    marks = [tick for tick in ticks(low, high, 10) if low <= tick <= high]
    x_format = x_format or tick_format(marks)
    for tick in marks:
        at = pixel(tick)
        parts.append(_line(at, 4, at, bottom, "grid"))
        parts.append(_text(at, bottom + 16, x_format(tick), text_anchor="middle"))
    middle = (left + width - right) / 2
    parts.append(_text(middle, height - 6, x_label, text_anchor="middle", class_="axis"))
    for number, lane in enumerate(lanes):
        y = 6 + number * row
        parts.append(_text(left - 8, y + 15, cut(lane.label), text_anchor="end", class_="lane"))
        for bar in lane.bars:
            start, end = pixel(bar.start), pixel(bar.end)
            box = element(
                "rect",
                x=start,
                y=y + 2,
                width=max(1.0, end - start),
                height=row - 6,
                fill=bar.color,
            )
            words = [element("title", bar.meaning), box]
            if len(bar.label) * 6.2 < end - start:
                at = (start + end) / 2
                kind = _class_on(bar.color)
                words.append(_text(at, y + 15, bar.label, text_anchor="middle", class_=kind))
            parts.append(element("g", *words))
        for tick_of_lane in lane.ticks:
            at = pixel(tick_of_lane.x)
            mark = element(
                "line", x1=at, y1=y + 3, x2=at, y2=y + row - 5, stroke=lane.color, stroke_width="2"
            )
            parts.append(element("g", element("title", tick_of_lane.meaning), mark))
    return element(
        "svg",
        element("title", title),
        *parts,
        viewBox=f"0 0 {width} {height}",
        role="img",
        class_="wide plot",
    )


def share_bar(title: str, shares: Sequence[tuple[str, float, str]]) -> Markup:
    """Draw shares of one, each with its name and color, as one bar with words where they fit."""
    width, height = 2 * WIDTH + 20, 34
    parts: list[Markup] = [element("title", title)]
    x = 0.0
    for name, share, color in shares:
        size = share * width
        box = element("rect", x=x, y=0, width=max(0.0, size - 1), height=height, fill=color)
        words = [element("title", f"{name} {share:.1%}"), box]
        label = f"{name} {share:.0%}"
        if len(label) * 6.6 < size:
            kind = _class_on(color)
            words.append(_text(x + size / 2, 21, label, text_anchor="middle", class_=kind))
        parts.append(element("g", *words))
        x += size
    return element("svg", *parts, viewBox=f"0 0 {width} {height}", role="img", class_="wide plot")


def _class_on(color: str) -> str:
    return "on dark" if color in _LIGHT else "on"


def ticks(low: float, high: float, count: int) -> list[float]:
    """Return about `count` round numbers from below `low` to above `high`."""
    spread = high - low
    if not spread > 0:
        spread = abs(high) or 1.0
    rough = spread / count
    power = 10.0 ** math.floor(math.log10(rough))
    size = next(factor * power for factor in (1, 2, 2.5, 5, 10) if factor * power >= 0.999 * rough)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return [number * size for number in range(first, max(last, first + 1) + 1)]


def tick_format(marks: Sequence[float]) -> Format:
    """Return the shortest format that tells ticks apart."""
    size = min((b - a for a, b in itertools.pairwise(marks)), default=1.0)
    largest = max(map(abs, marks), default=1.0)
    if largest >= 1e7 or 0 < largest < 1e-3:
        return lambda value: f"{value:.3g}"
    places = max(0, -math.floor(math.log10(size) + 1e-9)) if size > 0 else 0
    if abs(size * 10**places - round(size * 10**places)) > 1e-6:
        places += 1
    return lambda value: f"{value:,.{places}f}"


def cut(label: str) -> str:
    """Cut a label that would leave its margin."""
    return label if len(label) <= _LONGEST_LABEL else f"{label[: _LONGEST_LABEL - 1]}…"


def _path(pixels: Sequence[Point]) -> str:
    return "M" + "L".join(f"{x:.1f},{y:.1f}" for x, y in pixels)


def _line(x1: float, y1: float, x2: float, y2: float, kind: str) -> Markup:
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=kind)


def _text(x: float, y: float, words: str, **attributes: object) -> Markup:
    return element("text", words, x=x, y=y, font_size=_FONT, **attributes)
