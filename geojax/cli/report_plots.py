"""The plots of a run's page, of one run or of two in the same axes."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from geojax.cli.markup import Markup, element, joined
from geojax.cli.svg_plot import (
    BLUE,
    COLORS,
    GRAY,
    GREEN,
    ORANGE,
    PURPLE,
    SKY,
    VERMILION,
    Bar,
    Lane,
    Point,
    Series,
    ShadedRange,
    Tick,
    lane_plot,
    line_plot,
    share_bar,
    stack_plot,
)
from geojax.quantities import duration
from geojax.saved_runs.records.attempt_records import (
    CATEGORIES,
    LOST,
    UNATTRIBUTED,
    AttemptRecord,
    EventRecord,
    gaps,
)
from geojax.saved_runs.records.curves import CurvePoint, shown_range
from geojax.saved_runs.records.run_record import DirectoryRecord, RunRecord
from geojax.saved_runs.records.smoothing import smooth
from geojax.saved_runs.records.step_record import PARTS, VALIDATION

USE_COLORS = {
    "productive": GREEN,
    "recomputed": VERMILION,
    "starting": SKY,
    "compiling": BLUE,
    "waiting": ORANGE,
    "data": PURPLE,
    "validation": "#117733",
    "saving": "#332288",
    "other": "#a3a3a3",
    LOST: "#1f2937",
    UNATTRIBUTED: "#d1d5db",
}
"""Colors of a run's uses of time."""

_PART_COLORS = {
    "device": BLUE,
    "dispatch": PURPLE,
    "waiting": VERMILION,
    "data": ORANGE,
    "save": SKY,
    "validation": GREEN,
}
_OUTCOME_COLORS = {"end": GREEN, "stopped": SKY, "failed": VERMILION, "killed": VERMILION}
_FAULTS = ("failed_save", "lost", "late", "spike", "skipped")
_EVENT_ORDER = (*_FAULTS, "deviation", "replan", "compiled", "save", "validation")
_EVENT_COLORS = dict.fromkeys(_FAULTS, VERMILION) | {"save": SKY, "validation": GREEN}
_MOST_TICKS = 400
_MOST_LANES = 16
_MOST_LINES = 8
_MOST_COLUMNS = 100
_MOST_MARKS = 60

Row = tuple[float, dict[str, float]]


class ReportedRun(NamedTuple):
    """A run on a page."""

    name: str
    color: str
    record: RunRecord

    @property
    def main(self) -> DirectoryRecord:
        """The directory that tells of the run."""
        return self.record.main


def _points(points: Iterable[CurvePoint]) -> list[Point]:
    return [(point.step, point.mean) for point in points]


def _named(run: ReportedRun, runs: Sequence[ReportedRun], label: str) -> str:
    """Return a line's label, with the run's name where there are two."""
    return label if len(runs) == 1 else f"{run.name} {label}".strip()


def loss_plot(runs: Sequence[ReportedRun]) -> Markup:
    """Draw training loss, smoothed over its range, and validation losses."""
    series, shown = [], []
    for run in runs:
        curves = run.main.curves
        points = curves.points("loss")
        if points:
            values = smooth([point.mean for point in points])
            steps = [point.step for point in points]
            label = _named(run, runs, f"training {values[-1]:.4g}")
            band = [(point.step, point.low, point.high) for point in points]
            line = list(zip(steps, values, strict=True))
            if len(runs) == 1:
                series.append(Series("", [_points(points)], run.color, 0.9, opacity=0.45))
            series.append(Series(label, [line], run.color, band=band))
            shown.append(values)
        names = [name for name in curves.names if name.startswith(VALIDATION)]
        colors = [VERMILION, GREEN, PURPLE, ORANGE] if len(runs) == 1 else [run.color] * 4
        for name, color in zip(names, colors, strict=False):
            line = _points(curves.points(name))
            label = f"{name.removeprefix(VALIDATION)} {line[-1][1]:.4g}"
            label = _named(run, runs, label)
            few = len(line) <= _MOST_MARKS
            series.append(Series(label, [line], color, 1.2, is_marked=few, is_dashed=few))
            shown.append([value for _, value in line])
    return line_plot(
        "Loss by step", series, "step", "loss, nats a token", y_range=shown_range(shown)
    )


def metric_plot(
    runs: Sequence[ReportedRun], metric: str, title: str, y_label: str, factor: float = 1.0
) -> Markup:
    """Draw a metric by step: its mean, and in one run its range."""
    series = []
    for run in runs:
        points = run.main.curves.points(metric)
        line = [(point.step, factor * point.mean) for point in points]
        band = [(point.step, factor * point.low, factor * point.high) for point in points]
        label = run.name if len(runs) > 1 else ""
        shown_band = band if len(runs) == 1 else ()
        series.append(Series(label, [line], run.color, 1.4, band=shown_band))
    return line_plot(title, series, "step", y_label)


def throughput_plot(runs: Sequence[ReportedRun]) -> Markup:
    """Draw tokens a second over the time since the run's first start."""
    metric, series, spans = "tokens_per_second", [], []
    hours = all("time" in run.main.curves.names for run in runs)
    longest = max((_seconds_of(run.main) for run in runs), default=0.0)
    scale, unit = time_scale(longest)
    largest = max(
        (point.high for run in runs for point in run.main.curves.points(metric)), default=0.0
    )
    factor, prefix = _prefix(largest)
    for run in runs:
        main = run.main
        attempts = main.attempts
        breaks = gaps(attempts)
        begin = began(main)
        if hours:
            points = [
                ((values["time"] - begin) / scale, values[metric] / factor)
                for _, values in main.curves.paired(("time", metric))
                if len(values) == 2
            ]
            cuts = [(start - begin) / scale for start, _ in breaks]
            if len(runs) == 1:
                spans = [
                    ShadedRange((start - begin) / scale, (end - begin) / scale, "no attempt ran")
                    for start, end in breaks
                ]
        else:
            points, cuts = (
                [(step, y / factor) for step, y in _points(main.curves.points(metric))],
                [],
            )
        median = _median([y for _, y in points])
        label = _named(run, runs, f"median {median:.3g} {prefix}") if points else ""
        series.append(Series(label, _split(points, cuts), run.color, 1.2))
    x_label = f"{unit} since the first start" if hours else "step"
    return line_plot("Tokens a second over time", series, x_label, f"{prefix}tokens/s", spans=spans)


def _median(values: Sequence[float]) -> float:
    return sorted(values)[len(values) // 2] if values else 0.0


def _split(points: Sequence[Point], cuts: Sequence[float]) -> list[list[Point]]:
    """Break a line where no attempt ran."""
    segments: list[list[Point]] = [[]]
    left = sorted(cuts)
    for point in points:
        while left and point[0] > left[0]:
            left.pop(0)
            segments.append([])
        segments[-1].append(point)
    return segments


def _prefix(largest: float) -> tuple[float, str]:
    for factor, prefix in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if largest >= factor:
            return factor, prefix
    return 1.0, ""


def began(main: DirectoryRecord) -> float:
    """Return the moment of the first known start, in seconds since the epoch; 0: none is known."""
    attempts = main.attempts
    if attempts:
        return attempts[0].began
    times = [event.time for event in main.events if event.time is not None]
    return min([*times, *([main.first_time] if main.first_time is not None else [])], default=0.0)


def last_moment(main: DirectoryRecord) -> float:
    """Return the last known moment, in seconds since the epoch."""
    moments = [attempt.ended for attempt in main.attempts]
    moments += [event.time for event in main.events if event.time is not None]
    if main.latest is not None and "time" in main.latest.values:
        moments.append(main.latest.values["time"])
    return max(moments, default=began(main))


def _seconds_of(main: DirectoryRecord) -> float:
    return last_moment(main) - began(main)


def time_scale(seconds: float) -> tuple[float, str]:
    """Return the seconds of a unit that suits an axis, and its name."""
    for size, unit in ((86_400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return float(size), unit
    return 1.0, "seconds"


def parts_plots(runs: Sequence[ReportedRun]) -> list[Markup]:
    """Draw the seconds of a step by part, a plot for each run in the same scale."""
    plots, rows_of = [], []
    for run in runs:
        names = {f"seconds/{part}": part for part in PARTS}
        rows = [
            (step, {names[name]: value for name, value in values.items()})
            for step, values in run.main.curves.paired(names)
        ]
        if not rows:  # an older run knows the whole alone
            line = _points(run.main.curves.points("seconds"))
            rows = [(step, {"step": seconds}) for step, seconds in line]
        rows_of.append(_coarse(rows))
    sums = sorted(sum(values.values()) for rows in rows_of for _, values in rows)
    # The first step with its compilation would flatten all others.
    top = 1.1 * sums[int(0.98 * (len(sums) - 1))] if sums else None
    colors = {"step": BLUE, **_PART_COLORS}
    for run, rows in zip(runs, rows_of, strict=True):
        labels = {
            part: f"{part} {duration(mean)}"
            for part in PARTS
            if (mean := run.main.curves.mean(f"seconds/{part}")) is not None
        }
        title = "Seconds of a step by part"
        y_label = _named(run, runs, "seconds a step, mean of each part")
        plots.append(stack_plot(title, rows, colors, labels, "step", y_label, top=top))
    return plots


def _coarse(rows: Sequence[Row]) -> list[Row]:
    """Average neighboring rows, of which few have a save or a validation."""
    size = -(-len(rows) // _MOST_COLUMNS)
    means = []
    for begin in range(0, len(rows), size or 1):
        group = rows[begin : begin + size]
        names = dict.fromkeys(name for _, values in group for name in values)
        means.append(
            (
                sum(step for step, _ in group) / len(group),
                {
                    name: sum(values.get(name, 0.0) for _, values in group) / len(group)
                    for name in names
                },
            )
        )
    return means


def late_plots(runs: Sequence[ReportedRun]) -> list[Markup]:
    """Draw how much later than the others the slowest process or site is, if it is known twice."""
    metric = "slowest/seconds"
    if all(len(run.main.curves.points(metric)) < 2 for run in runs):  # no line to draw
        return []
    return [metric_plot(runs, metric, "Lateness of the slowest", "the slowest, s behind")]


def link_plots(runs: Sequence[ReportedRun]) -> list[Markup]:
    """Draw rate, wait and round trip of every link."""
    plots = []
    for figure, title, y_label, factor, words in (
        ("sent_bytes_per_second", "Bytes sent on links", "sent, Gbit/s", 8e-9, ""),
        ("wait_seconds", "Waits for links", "wait, seconds a step", 1.0, ""),
        (
            "planned_wait_seconds",
            "Planned waits for links",
            "planned wait, s a step",
            1.0,
            "planned ",
        ),
        ("round_trip_seconds", "Round trips of links", "round trip, ms", 1e3, ""),
        ("retransmits", "Segments sent again", "retransmits a step", 1.0, ""),
    ):
        series = []
        for run in runs:
            curves = run.main.curves
            for number, site in enumerate(link_sites(run.main)[:_MOST_LINES]):
                points = curves.points(f"link/{site}/{figure}")
                line = [(point.step, factor * point.mean) for point in points]
                color = COLORS[number % len(COLORS)] if len(runs) == 1 else run.color
                label = _named(run, runs, f"{words}to {site}")
                series.append(Series(label, [line], color, 1.2, is_dashed=bool(words)))
        if any(each.segments[0] for each in series):
            plots.append(line_plot(title, series, "step", y_label))
    return plots


def link_sites(main: DirectoryRecord) -> list[str]:
    """Return the sites to which links are known, in the order of the metrics."""
    names = (name.split("/") for name in main.curves.names if name.startswith("link/"))
    return list(dict.fromkeys(words[1] for words in names if len(words) == 3))


def timeline(runs: Sequence[ReportedRun]) -> Markup:
    """Draw attempts and events on a common clock, from each run's first start."""
    longest = max(_seconds_of(run.main) for run in runs)
    if longest <= 0:
        return element("p", "Times of attempts and events: not recorded.", class_="none")
    scale, unit = time_scale(longest)
    lanes = []
    for run in runs:
        begin = began(run.main)
        lanes.append(_attempt_lane(run, runs, begin, scale))
        lanes += _event_lanes(run, runs, begin, scale)
    x_label = f"{unit} since the first start"
    return lane_plot("Attempts and events", lanes, (0.0, longest / scale), x_label)


def _attempt_lane(
    run: ReportedRun, runs: Sequence[ReportedRun], begin: float, scale: float
) -> Lane:
    bars = [
        Bar(
            (attempt.began - begin) / scale,
            (attempt.ended - begin) / scale,
            _OUTCOME_COLORS.get(attempt.outcome or "", BLUE),
            f"{attempt.attempt}: {outcome_words(attempt)}",
            attempt_words(attempt),
        )
        for attempt in run.main.attempts
    ]
    return Lane(_named(run, runs, "attempts"), bars, (), run.color)


def outcome_words(attempt: AttemptRecord) -> str:
    """Return how an attempt ended."""
    return attempt.outcome or "goes on"


def attempt_words(attempt: AttemptRecord) -> str:
    """Describe an attempt."""
    steps = ""
    if attempt.first_step is not None and attempt.last_step is not None:
        steps = f", steps {attempt.first_step:,} to {attempt.last_step:,}"
    took = duration(attempt.ended - attempt.began)
    return f"attempt {attempt.attempt}: {took}{steps}, {outcome_words(attempt)}"


def _event_lanes(
    run: ReportedRun, runs: Sequence[ReportedRun], begin: float, scale: float
) -> list[Lane]:
    by_kind: dict[str, list[EventRecord]] = {}
    for event in run.main.events:
        if event.time is not None and event.kind not in ("start", "resume", "stop", "end"):
            by_kind.setdefault(event.kind, []).append(event)
    known = [kind for kind in _EVENT_ORDER if kind in by_kind]
    others = [kind for kind in by_kind if kind not in _EVENT_ORDER]
    lanes = []
    for kind in [*known, *others][:_MOST_LANES]:
        events = by_kind[kind]
        stride = -(-len(events) // _MOST_TICKS)
        marks = [
            Tick(((event.time or 0.0) - begin) / scale, event_words(event))
            for event in events[::stride]
        ]
        label = _named(run, runs, f"{kind.replace('_', ' ')} ({len(events):,})")
        lanes.append(Lane(label, (), marks, _EVENT_COLORS.get(kind, GRAY)))
    return lanes


def event_words(event: EventRecord) -> str:
    """Return an event as a line."""
    step = "" if event.step is None else f"step {event.step:,}: "
    return f"{step}{event.text or event.kind}"


def clock(seconds: float) -> str:
    """Return a moment in UTC."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):  # a year that no calendar has
        return "-"


def goodput_bars(runs: Sequence[ReportedRun]) -> Markup:
    """Draw the shares of the wall-clock time by use, a bar for each run."""
    parts = []
    for run in runs:
        goodput = run.main.goodput
        if goodput is None or goodput.total_seconds <= 0:
            parts.append(element("p", _named(run, runs, "Goodput: not recorded."), class_="none"))
            continue
        whole = max(goodput.total_seconds, sum(goodput.seconds.values()))
        shares = [
            (name, goodput.seconds[name] / whole, USE_COLORS[name])
            for name in (*CATEGORIES, LOST, UNATTRIBUTED)
            if name in goodput.seconds
        ]
        if len(runs) > 1:
            parts.append(element("p", run.name, class_="run"))
        parts.append(share_bar("Uses of the time", shares))
    return joined(*parts)
