"""The view of `geojax watch`: records of a run, as lines for a terminal of any width."""

import time
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from geojax.cli.escaping import escaped
from geojax.cli.run_figures import (
    LinkMeans,
    loss_words,
    mean_of,
    newest_late,
    parts_of,
    percent,
    run_words,
    seconds_left,
    site_figures,
    tokens_words,
)
from geojax.cli.text_plot import Marked, text_plot
from geojax.quantities import duration
from geojax.saved_runs.records.attempt_records import CATEGORIES, LOST, UNATTRIBUTED, EventRecord
from geojax.saved_runs.records.run_record import DirectoryRecord, RunRecord
from geojax.saved_runs.records.step_record import VALIDATION, StepRecord
from geojax.suggestions import shortened

_WIDE = 120
_LINK_COLUMNS = {
    "sends": 0,
    "receives": 0,
    "round trip": 0,
    "waits a step": 0,
    "busy at": 76,
    "in flight": 100,
    "resent": 110,
}
"""Columns of the table of links, each with the least width of the terminal for it."""
_LEAST_PLOT, _MOST_PLOT = 7, 20
_SILENCE = 10
"""Steps in whose time a run without a new one is called silent."""
_LEAST_SILENCE_SECONDS = 30.0
_MARK_STYLES = ("dark_orange", "magenta", "green", "cyan")
_PART_STYLES = {
    "device": "blue",
    "data": "dark_orange",
    "dispatch": "magenta",
    "waiting": "red",
    "validation": "green",
    "save": "cyan",
}
_USE_STYLES = {"productive": "green", "recomputed": "dark_orange", LOST: "red"}
_EVENT_STYLES = {"failed_save": "red", "lost": "red", "spike": "dark_orange"}
_EVENT_STYLES |= {"skipped": "dark_orange", "late": "dark_orange", "deviation": "dark_orange"}
_SHOWN_ABOVE = ("save", "failed_save", "validation")
_MOST_EVENTS = 8


class Size(NamedTuple):
    """Columns and lines to fill; no number of lines: as many as there are."""

    width: int
    height: int | None


def run_view(
    run: RunRecord, name: str, size: Size, *, is_unicode: bool = True, now: float | None = None
) -> Group:
    """Arrange all that is known of a run.

    Args:
        run: its records.
        name: shown in the first line.
        size: of the terminal.
        is_unicode: the terminal shows lines, blocks and braille; else ASCII.
        now: seconds since the epoch; None: the clock's.
    """
    now = time.time() if now is None else now
    main = run.main
    head = _head(run, name, now, is_unicode, size.width)
    left = [*_rates(main), *_parts(main, is_unicode), *_saves(main, now)]
    left += _goodput(main, is_unicode)
    right = [
        *_links(run, size.width if size.width < _WIDE else size.width // 2),
        *_sites(run, now),
        *_late(main),
    ]
    if size.width < _WIDE:
        rest = [*left, *right]
        events, height = _room(head, rest, main, size, now)
        return Group(head, _plot(main, size.width, height, is_unicode), *rest, *events)
    half = size.width // 2 - 1
    room = None if size.height is None else size.height - _lines(head, size.width)
    above = None if room is None else room - sum(_lines(each, half) for each in left)
    height = _MOST_PLOT if above is None else max(_LEAST_PLOT, min(_MOST_PLOT, above))
    used = sum(_lines(each, half) for each in right)
    count = _MOST_EVENTS if room is None else max(2, room - used - 1)
    grid = Table.grid(padding=(0, 2, 0, 0), expand=True)
    grid.add_column(width=half)
    grid.add_column(width=half)
    plot = _plot(main, half, height, is_unicode)
    grid.add_row(Group(plot, *left), Group(*right, *_events(main, now, count, half)))
    return Group(head, grid)


def _room(
    head: RenderableType,
    rest: Sequence[RenderableType],
    main: DirectoryRecord,
    size: Size,
    now: float,
) -> tuple[list[RenderableType], int]:
    """Return the events, and the lines of the plot above."""
    if size.height is None:
        return _events(main, now, _MOST_EVENTS, size.width), 12
    room = size.height - sum(_lines(each, size.width) for each in (head, *rest))
    count = max(1, min(_MOST_EVENTS, (room - _LEAST_PLOT) // 2))
    events = _events(main, now, count, size.width)
    room -= sum(_lines(each, size.width) for each in events)
    return events, max(_LEAST_PLOT, min(_MOST_PLOT, room))


def _lines(content: RenderableType, width: int) -> int:
    console = Console(width=width, color_system=None, force_terminal=False)
    return len(console.render_lines(content, console.options.update(height=None)))


def state_words(run: RunRecord, now: float) -> tuple[str, str]:
    """Return the run's state in words, and a style of rich."""
    main = run.main
    if main.has_ended:
        event = next((each for each in reversed(main.events) if each.kind in ("end", "stop")), None)
        return ("stopped" if event is not None and event.kind == "stop" else "done"), "bold green"
    attempts = main.attempts
    if attempts and attempts[-1].outcome is not None:
        return f"{escaped(attempts[-1].outcome)}; waits for its restart", "bold red"
    latest = main.latest
    if latest is None:
        return "no step yet", "yellow"
    ended = latest.values.get("time")
    if ended is not None:
        limit = max(_LEAST_SILENCE_SECONDS, _SILENCE * (main.seconds.median or 0.0))
        if now - ended > limit:
            return f"no step since {age_words(now - ended)}", "bold yellow"
        return "running", "bold green"
    return "", ""


def _head(run: RunRecord, name: str, now: float, is_unicode: bool, width: int) -> Group:
    main = run.main
    state, style = state_words(run, now)
    title = Table.grid(expand=True)
    title.add_column(no_wrap=True, overflow="ellipsis")
    title.add_column(justify="right", no_wrap=True)
    title.add_row(Text(escaped(name), style="bold"), Text(state, style=style))
    words = Text(escaped("  ".join(run_words(main.config))), no_wrap=True, overflow="ellipsis")
    lines: list[RenderableType] = [title, words] if words else [title]
    if main.latest is not None:
        lines.append(_progress(main, is_unicode, width))
    return Group(*lines)


def _progress(main: DirectoryRecord, is_unicode: bool, width: int) -> Text:
    assert main.latest is not None, "there is a step"
    step, steps, left = main.latest.step, main.steps, seconds_left(main)
    if not steps:
        return Text(f"step {step:,}")
    share = min(1.0, step / steps)
    line = Text(f"step {step:,} of {steps:,}  ", no_wrap=True)
    tail = f"  {share:.1%}"
    if left is not None and not main.has_ended:
        tail += f"  {duration(left)} left"
    bar = max(5, min(60, width - len(line) - len(tail)))
    line.append_text(_bar([(share, "green")], bar, is_unicode))
    return line.append(tail)


def _bar(shares: Iterable[tuple[float, str]], width: int, is_unicode: bool) -> Text:
    """Draw shares of one as a bar of blocks."""
    full, empty = ("█", "░") if is_unicode else ("#", "-")
    text, done, position = Text(), 0.0, 0
    for number, (share, style) in enumerate(shares):
        done = min(1.0, done + share)
        count = round(done * width) - position
        # Without colors neighbors are told apart by letters.
        text.append((full if is_unicode else "#=+:."[number % 5]) * count, style=style)
        position += count
    return text.append(empty * (width - position), style="dim")


def _plot(main: DirectoryRecord, width: int, height: int, is_unicode: bool) -> RenderableType:
    line = [(point.step, point.mean) for point in main.curves.points("loss")]
    names = [name for name in main.curves.names if name.startswith(VALIDATION)]
    marked = [
        Marked(
            escaped(name.removeprefix(VALIDATION)),
            [(point.step, point.mean) for point in main.curves.points(name)],
            style,
        )
        for name, style in zip(names, _MARK_STYLES, strict=False)
    ]
    legend = Text(no_wrap=True, overflow="ellipsis").append("loss: ", style="dim")
    legend.append("training", style="blue")
    for curve, mark in zip(marked, "ox+*", strict=False):
        legend.append(f"  {mark} {shortened(curve.name)}", style=curve.style)
    if len(names) > len(marked):
        legend.append(f"  and {len(names) - len(marked)} more", style="dim")
    plot = text_plot(line, marked, width, height - 1, is_unicode=is_unicode)
    return Group(legend, plot)


def _rates(main: DirectoryRecord) -> list[RenderableType]:
    latest = main.latest
    if latest is None:
        return []
    figures = []
    for name, value in _named(latest):
        figures.append(f"{name} {value}" if name else value)
    validation = [
        f"{shortened(escaped(name))} {loss_words(loss)} (step {step:,})"
        for name, (step, loss) in list(main.validation.items())[:4]
    ]
    lines: list[RenderableType] = [_labelled("step", "  ".join(figures))]
    if validation:
        lines.append(_labelled("validation", "  ".join(validation)))
    return lines


def age_words(seconds: float) -> str:
    """Return how long ago something was, of one unit where it was long ago."""
    rounded = float(round(max(0.0, seconds)))
    for unit in (60, 3600, 86_400):
        rounded = round(rounded / unit) * unit if rounded >= 10 * unit else rounded
    return f"{duration(rounded)} ago" if rounded >= 1 else "now"


def _named(record: StepRecord) -> Iterable[tuple[str, str]]:
    values = record.values
    if "loss" in values:
        yield "loss", loss_words(values["loss"])
    else:
        yield "loss", "not finite"
    if "tokens_per_second" in values:
        yield "", tokens_words(values["tokens_per_second"])
    if "mfu" in values:
        yield "MFU", percent(values["mfu"])
    if "gradient_norm" in values:
        yield "|g|", f"{values['gradient_norm']:.3g}"
    if "learning_rate" in values:
        yield "lr", f"{values['learning_rate']:.3g}"


def _labelled(label: str, content: str | Text) -> Table:
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(width=10, no_wrap=True, style="bold")
    table.add_column(ratio=1)
    table.add_row(label, content)
    return table


def _parts(main: DirectoryRecord, is_unicode: bool) -> list[RenderableType]:
    seconds, parts = mean_of(main.recent, "seconds"), parts_of(main.recent)
    if seconds is None:
        return []
    text = Text(duration(seconds))
    total = sum(parts.values())
    if total > 0:
        text.append(" a step  ")
        ordered = sorted(parts.items(), key=lambda part: -part[1])
        shares = [(value / total, _PART_STYLES[part]) for part, value in ordered]
        text.append_text(_bar(shares, 16, is_unicode))
        for part, value in ordered:
            if value >= 0.0005:
                text.append(f"  {part} {duration(value)}", style=_PART_STYLES[part])
    planned = main.known("seconds/planned_waiting")
    if planned is not None:
        text.append(f"  waits for other sites {duration(planned)} planned")
    return [_labelled("seconds", text)]


def _links(run: RunRecord, width: int) -> list[RenderableType]:
    main = run.main
    figures = LinkMeans.by_site(main)
    if not figures:
        return []
    headings = [heading for heading, least in _LINK_COLUMNS.items() if width >= least]
    table = _table("link to", *headings)
    for site, link in figures.items():
        words = link.words(site)
        waits = f"{words.waits} ({escaped(words.cause)})" if words.cause else words.waits
        cells = [words.sends, words.receives, words.round_trip, waits]
        cells += [words.achieved, words.in_flight, words.retransmits]
        table.add_row(site, *cells[: len(headings)])
    return [table]


def _sites(run: RunRecord, now: float) -> list[RenderableType]:
    sites = site_figures(run, now)
    if not sites:
        return []
    table = _table("site", "loss", "a step", "rate", "waits", "as of")
    for site, (record, is_late) in sites.items():
        age = "-" if record.age_seconds is None else age_words(record.age_seconds)
        table.add_row(
            site,
            "-" if record.loss is None else loss_words(record.loss),
            _or_dash(record.seconds),
            "-" if record.tokens_per_second is None else tokens_words(record.tokens_per_second),
            _or_dash(record.wait_seconds),
            Text(age, style="bold yellow" if is_late and not run.main.has_ended else ""),
        )
    return [table]


def _or_dash(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold", padding=(0, 2, 0, 0))
    table.add_column(first, no_wrap=True)
    for heading in others:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def _late(main: DirectoryRecord) -> list[RenderableType]:
    event = newest_late(main)
    if main.latest is None or "slowest/seconds" not in main.latest.values or event is None:
        return []
    return [_labelled("slowest", Text(escaped(event.text), style="yellow"))]


def _saves(main: DirectoryRecord, now: float) -> list[RenderableType]:
    saves = [event for event in main.events if event.kind in ("save", "failed_save")]
    if not saves:
        failed = main.known("failed_saves")
        return [_labelled("saves", f"{failed:.0f} failed")] if failed else []
    words = []
    for event in list(reversed(saves))[:3]:
        step = "-" if event.step is None else f"step {event.step:,}"
        failed_word = "failed " if event.kind == "failed_save" else ""
        words.append(f"{failed_word}{step}{_ago(event, now)}")
    return [_labelled("saves", "  ".join(words))]


def _ago(event: EventRecord, now: float) -> str:
    if event.time is None:
        return ""
    return f" ({age_words(now - event.time)})"


def _goodput(main: DirectoryRecord, is_unicode: bool) -> list[RenderableType]:
    goodput = main.goodput
    if goodput is None or goodput.productive_share is None:
        return []
    text = Text(f"{goodput.productive_share:.1%} productive  ")
    uses = {name: goodput.seconds.get(name, 0.0) for name in (*CATEGORIES, LOST, UNATTRIBUTED)}
    shares = {name: seconds / goodput.total_seconds for name, seconds in uses.items()}
    bar = [(share, _USE_STYLES.get(name, "blue")) for name, share in shares.items()]
    text.append_text(_bar(bar, 16, is_unicode))
    others = sorted(
        (name for name in shares if name != "productive"), key=lambda name: -shares[name]
    )
    for name in others[:4]:
        if shares[name] >= 0.001:
            text.append(f"  {name} {shares[name]:.1%}", style=_USE_STYLES.get(name, ""))
    return [_labelled("goodput", text)]


def _events(main: DirectoryRecord, now: float, count: int, width: int) -> list[RenderableType]:
    late = newest_late(main)  # each window of steps has one
    events = [
        event
        for event in main.events
        if event.kind not in _SHOWN_ABOVE and (event.kind != "late" or event is late)
    ]
    if not events or count < 1:
        return []
    table = Table.grid(padding=(0, 1, 0, 0), expand=True)
    table.add_column(width=10, no_wrap=True, style="bold")
    table.add_column(ratio=1, no_wrap=True, overflow="ellipsis")
    for number, event in enumerate(events[-count:]):
        table.add_row("" if number else "events", event_text(event, now))
    return [table]


def event_text(event: EventRecord, now: float | None = None) -> Text:
    """Return an event as a line."""
    step = "" if event.step is None else f"step {event.step:,} "
    ago = "" if now is None else _ago(event, now)
    line = f"{step}{escaped(event.kind)}{ago}: {escaped(event.text)}"
    return Text(line, style=_EVENT_STYLES.get(event.kind, ""))


def step_line(record: StepRecord, steps: int | None) -> str:
    """Return a step as a line of text without a terminal."""
    of = "" if steps is None else f"/{steps}"
    words = [f"step {record.step}{of}"]
    if record.is_of_training:
        words += [f"{name} {value}".strip() for name, value in _named(record)]
        if (seconds := record.values.get("seconds")) is not None:
            words.append(f"{duration(seconds)} a step")
        planned = record.values.get("seconds/planned_waiting")
        if planned is not None:
            words.append(f"waits {duration(planned)} planned")
        for site, link in record.links.items():
            if link.wait_seconds is not None:
                words.append(f"waits {duration(link.wait_seconds)} for {site}")
    words += [
        f"validation {escaped(name)} {loss_words(loss)}" for name, loss in record.validation.items()
    ]
    return "  ".join(words)
