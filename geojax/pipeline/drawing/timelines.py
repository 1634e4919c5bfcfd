"""Timelines as a picture: a row for each stage, schedules under each other on one time axis."""

import itertools
from collections.abc import Sequence
from pathlib import Path

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import EngFormatter

from geojax.pipeline.schedule import Kind, Placement
from geojax.pipeline.simulation.timeline import TimedMessage, Timeline, WorkSpan

_COLORS = {Kind.FORWARD: "#4f8fc7", Kind.BACKWARD: "#e39a3b", Kind.WEIGHT: "#6fae75"}
_NAMES = {
    Kind.FORWARD: "F: forward",
    Kind.BACKWARD: "B: backward",
    Kind.WEIGHT: "W: weight gradient",
}
_DARK = {Kind.FORWARD: "#1d4e79", Kind.BACKWARD: "#a35a00"}
_IDLE = "#e4e4e4"

_WIDTH, _DPI = 16.0, 120  # inches, pixels per inch
_SITE_GAP = 0.9  # in rows: there the messages between sites are seen
_ROW, _PANEL = 0.26, 3.6  # inches: the height of a row, and of the rows of one panel at most
_LARGEST, _SMALLEST = 7.0, 4.8  # points: the size of numbers; where they are smaller, none
Polygon = list[tuple[float, float]]


def draw_timelines(timelines: Sequence[Timeline], sites: Sequence[str]) -> Figure:
    """Draw a panel for each timeline, all on the same time axis.

    Args:
        timelines: at least one, all of pipelines of the same stages.
        sites: the name of each stage's site; stages of one site lie together.
    """
    stages = timelines[0].schedule.placement.stages
    assert all(each.schedule.placement.stages == stages for each in timelines)
    assert len(sites) == stages, "every stage lies in a site"
    tops = _tops(sites)
    panel = min(_PANEL, _ROW * (tops[-1] + 1))
    height = (panel + 0.42) * len(timelines) + 0.9
    figure = Figure(figsize=(_WIDTH, height), dpi=_DPI, layout="constrained")
    panels = figure.subplots(len(timelines), sharex=True, squeeze=False)[:, 0]
    longest = max(timeline.seconds for timeline in timelines)
    for axes, timeline in zip(panels, timelines, strict=True):
        _draw(axes, timeline, tops, longest, panel / (tops[-1] + 1))
        _label_rows(axes, tops, sites)
        axes.set_title(_title(timeline), loc="left", fontsize=10)
    panels[-1].set_xlim(0, longest)
    panels[-1].xaxis.set_major_formatter(EngFormatter("s"))
    figure.legend(handles=_legend(timelines), loc="outside upper right", ncols=6, frameon=False)
    return figure


def save_timelines(timelines: Sequence[Timeline], sites: Sequence[str], image: Path) -> None:
    """Write `draw_timelines` as a PNG."""
    draw_timelines(timelines, sites).savefig(image)


def _draw(
    axes: Axes, timeline: Timeline, tops: Sequence[float], longest: float, row: float
) -> None:
    end = timeline.seconds
    idle = [_box(0, end, top) for top in tops]
    axes.add_collection(PolyCollection(idle, facecolor=_IDLE, linewidth=0))
    placement = timeline.schedule.placement
    inches = (_WIDTH - 1.2) / longest  # of a second
    spans = timeline.spans
    shortest = min(span.end - span.start for span in spans if span.end > span.start)
    outline = 0.4 if shortest * inches > 0.03 else 0.0  # finer work would be all outline
    axes.add_collection(
        PolyCollection(
            [_box(span.start, span.end, tops[span.stage]) for span in spans],
            facecolor=[_shade(span, placement) for span in spans],
            edgecolor="white",
            linewidth=outline,
        )
    )
    digits = len(str(timeline.schedule.microbatches - 1))
    for span in spans:
        width = (span.end - span.start) * inches
        points = 72 * min(width / (0.62 * digits + 0.25), 0.6 * row)
        if points >= _SMALLEST:
            axes.text(
                (span.start + span.end) / 2,
                tops[span.stage] + 0.46,
                str(span.action.microbatch),
                fontsize=min(points, _LARGEST),
                ha="center",
                va="center",
                clip_on=True,
            )
    for kind, color in _DARK.items():
        crossing = [
            message
            for message in timeline.messages
            if message.link is not None and message.action.kind is kind
        ]
        lines = [_slanted(message, tops) for message in crossing]
        axes.add_collection(LineCollection(lines, colors=color, linewidths=0.6, alpha=0.75))
    axes.axvline(end, color="#444444", linewidth=0.8)
    axes.set_ylim(tops[-1] + 1, -0.1)


def _slanted(message: TimedMessage, tops: Sequence[float]) -> Polygon:
    """Draw from the edge of the sender's row to the facing edge of the receiver's."""
    down = message.target > message.source
    return [
        (message.start, tops[message.source] + (0.9 if down else 0.0)),
        (message.end, tops[message.target] + (0.0 if down else 0.9)),
    ]


def _box(start: float, end: float, top: float) -> Polygon:
    return [(start, top), (end, top), (end, top + 0.9), (start, top + 0.9)]


def _tops(sites: Sequence[str]) -> list[float]:
    """Return the top of each stage's row, in rows from above."""
    tops = [0.0]
    for before, site in itertools.pairwise(sites):
        tops.append(tops[-1] + 1 + (_SITE_GAP if site != before else 0))
    return tops


def _label_rows(axes: Axes, tops: Sequence[float], sites: Sequence[str]) -> None:
    stride = 1 if len(tops) <= 16 else 4
    shown = range(0, len(tops), stride)
    axes.set_yticks([tops[stage] + 0.45 for stage in shown], [str(stage) for stage in shown])
    axes.tick_params(axis="y", length=0, labelsize=8)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for site in dict.fromkeys(sites):
        rows = [top for top, name in zip(tops, sites, strict=True) if name == site]
        middle = (rows[0] + rows[-1] + 0.9) / 2
        axes.annotate(
            site,
            (0, middle),
            xytext=(-26, 0),
            xycoords=axes.get_yaxis_transform(),
            textcoords="offset points",
            rotation=90,
            ha="center",
            va="center",
            fontsize=8,
        )


def _shade(span: WorkSpan, placement: Placement) -> tuple[float, float, float]:
    """Lighten the color of a stage's later chunks."""
    chunks = placement.chunks_of(span.stage)
    lighter = 0.55 * chunks.index(span.action.chunk) / max(1, len(chunks))
    red, green, blue = (c + (1 - c) * lighter for c in to_rgb(_COLORS[span.action.kind]))
    return red, green, blue


def _title(timeline: Timeline) -> str:
    schedule = timeline.schedule
    seconds = EngFormatter("s", places=2)(timeline.seconds)
    chunks = schedule.placement.chunks_per_stage
    of_what = "microbatches" if chunks == 1 else f"microbatches' chunks ({chunks} a stage)"
    return (
        f"{schedule.name}: {seconds}, bubble {timeline.bubble_ratio:.1%} "
        f"({timeline.bubble_across_sites:.1%} by crossing sites), at most "
        f"{max(timeline.in_flight)} {of_what} in flight"
    )


def _legend(timelines: Sequence[Timeline]) -> list[Artist]:
    kinds = {span.action.kind for timeline in timelines for span in timeline.spans}
    work = [Patch(color=_COLORS[kind], label=_NAMES[kind]) for kind in Kind if kind in kinds]
    sent = {
        message.action.kind
        for timeline in timelines
        for message in timeline.messages
        if message.link is not None
    }
    messages = [
        Line2D([], [], color=_DARK[kind], linewidth=1, label=f"{what} between sites")
        for kind, what in ((Kind.FORWARD, "activations"), (Kind.BACKWARD, "their gradients"))
        if kind in sent
    ]
    return [*work, Patch(color=_IDLE, label="idle (the bubble)"), *messages]
