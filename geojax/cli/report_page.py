"""The page of `geojax report`: sections of figures, plots and tables in one HTML file.

The page loads nothing and runs nothing: its policy forbids both, and names its only style sheet by
hash.
"""

import base64
import collections
import hashlib
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from geojax.cli.markup import Markup, element, joined
from geojax.cli.report_plots import (
    USE_COLORS,
    ReportedRun,
    attempt_words,
    began,
    clock,
    event_words,
    goodput_bars,
    last_moment,
    late_plots,
    link_plots,
    link_sites,
    loss_plot,
    metric_plot,
    parts_plots,
    throughput_plot,
    timeline,
)
from geojax.cli.run_figures import (
    achieved_words,
    loss_words,
    newest_late,
    percent,
    run_words,
    seconds_left,
    site_figures,
    tokens_words,
)
from geojax.quantities import duration, quantity
from geojax.run_paths import CONFIG
from geojax.saved_runs.records.attempt_records import CATEGORIES, LOST, UNATTRIBUTED
from geojax.saved_runs.records.plan_record import PlannedFigure, PlanRecord
from geojax.saved_runs.records.run_record import DirectoryRecord
from geojax.settings import leaves_by_key

_STYLE = """
:root { color-scheme: light; }
body { margin: 0; background: #fff; color: #1f2937; font: 14px/1.45 system-ui, sans-serif; }
main { max-width: 1180px; margin: 0 auto; padding: 20px 24px 60px; }
h1 { font-size: 24px; margin: 0 0 4px; overflow-wrap: anywhere; }
h2 { font-size: 17px; margin: 34px 0 8px; padding-top: 10px; border-top: 1px solid #d1d5db; }
p { margin: 4px 0 10px; max-width: 90ch; }
.words, .none, footer { color: #4b5563; }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 16px 0; }
.card { border: 1px solid #d1d5db; border-radius: 6px; padding: 8px 14px; min-width: 104px; }
.card b { display: block; font-size: 19px; font-variant-numeric: tabular-nums; }
.card span { color: #4b5563; font-size: 12px; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(440px, 1fr)); gap: 20px; }
svg.plot { width: 100%; height: auto; display: block; }
.plots svg.plot { max-width: 700px; }
svg text { font-family: system-ui, sans-serif; }
svg text:not(.label) { fill: #374151; }
svg text.axis { fill: #111827; font-weight: 600; }
svg text.on { fill: #fff; font-weight: 600; }
svg text.on.dark { fill: #111827; }
svg .grid { stroke: #e5e7eb; } svg .tick { stroke: #6b7280; }
svg .span { fill: #6b7280; opacity: 0.22; }
table { border-collapse: collapse; margin: 8px 0 12px; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 3px 14px 3px 0; border-bottom: 1px solid #e5e7eb; }
th { color: #4b5563; font-weight: 600; vertical-align: bottom; }
th:first-child, td:first-child, td.left, th.left { text-align: left; }
td { overflow-wrap: anywhere; max-width: 62ch; }
code, td.key { font-family: ui-monospace, monospace; font-size: 12.5px; }
details { margin: 6px 0; } summary { cursor: pointer; font-weight: 600; }
.scroll { overflow-x: auto; }
"""
_MOST_EVENTS = 200
_MOST_VALUE = 300
_MOST_KEYS = 2000


class PageTable(NamedTuple):
    """A table; columns after the first are numbers, or words where `words` says so."""

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: bool = False

    def html(self) -> Markup:
        """Return the table as an element."""
        kind = "left" if self.words else None
        head = element("tr", *(element("th", each, class_=kind) for each in self.headings))
        rows = [
            element("tr", *(element("td", cell, class_=kind) for cell in row)) for row in self.rows
        ]
        table = element("table", element("thead", head), element("tbody", *rows))
        return element("div", table, class_="scroll")


def page(runs: Sequence[ReportedRun], made: float) -> str:
    """Return the HTML of one run, or of two side by side.

    Args:
        runs: one or two.
        made: the moment at which the page is made, in seconds since the epoch.
    """
    names = " and ".join(run.name for run in runs)
    body = [
        _title(runs),
        _headline(runs),
        *_section("Loss", _plots(loss_plot(runs), _gradient(runs))),
        *_section(
            "Speed",
            _plots(throughput_plot(runs), *parts_plots(runs), *late_plots(runs)),
            *map(_slowest, runs),
        ),
        *_links(runs),
        *_sites(runs),
        *_section("Attempts and events", timeline(runs), *map(_attempts, runs), *_events(runs)),
        *_goodput(runs),
        *_plan(runs),
        *_memory(runs),
        *_config(runs),
        *_environment(runs),
        _footer(runs, made),
    ]
    digest = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = joined(
        Markup('<meta charset="utf-8">'),
        Markup(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Markup('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        element("title", f"geojax report: {names}"),
        element("style", Markup(_STYLE)),
    )
    html = element(
        "html", element("head", head), element("body", element("main", *body)), lang="en"
    )
    return f"<!DOCTYPE html>\n{html}\n"


def _section(title: str, *parts: str) -> list[Markup]:
    return [element("h2", title), *map(joined, parts)]


def _plots(*plots: Markup) -> Markup:
    return element("div", *plots, class_="plots")


def _title(runs: Sequence[ReportedRun]) -> Markup:
    parts = [element("h1", " against ".join(run.name for run in runs))]
    for run in runs:
        words = " · ".join(run_words(run.main.config))
        line = [words or "no config.yaml"]
        if len(runs) > 1:
            line = [_swatch(run.color), f" {run.name}: ", *line]
        parts.append(element("p", *line, class_="words"))
    return joined(*parts)


class _Headline(NamedTuple):
    """A figure of the headline."""

    name: str
    text: str
    value: float | None


def _figures(main: DirectoryRecord) -> list[_Headline]:
    latest, goodput = main.latest, main.goodput
    assert latest is not None, "a page has a step"
    figures = []

    def add(name: str, value: float | None, text: str) -> None:
        figures.append(_Headline(name, text if value is not None else "-", value))

    of = "" if main.steps is None else f" of {main.steps:,}"
    add("steps", float(latest.step), f"{latest.step:,}{of}")
    loss = latest.values.get("loss")
    add("last training loss", loss, loss_words(loss or 0))
    for name, (step, value) in list(main.validation.items())[:4]:
        add(f"validation {name}, step {step:,}", value, loss_words(value))
    rate = _median_of(main, "tokens_per_second")
    add("median rate", rate, tokens_words(rate or 0))
    mfu = _median_of(main, "mfu")
    if mfu is not None:
        add("median MFU", mfu, percent(mfu))
    median = main.seconds.median
    add("median step", median, duration(median or 0))
    tokens = main.known("tokens")
    if tokens is not None:
        add("tokens", tokens, quantity(tokens))
    if goodput is not None:
        share = goodput.productive_share
        add("goodput", share, f"{share or 0:.1%}")
        total = goodput.total_seconds
        add("wall clock", total, duration(total))
        add("attempts", float(len(main.attempts)), str(len(main.attempts)))
    return figures


def _median_of(main: DirectoryRecord, name: str) -> float | None:
    values = sorted(point.mean for point in main.curves.points(name))
    return values[len(values) // 2] if values else None


def _headline(runs: Sequence[ReportedRun]) -> Markup:
    if len(runs) == 1:
        main = runs[0].main
        figures = _figures(main)
        left = seconds_left(main)
        if left and not main.has_ended:
            figures.append(_Headline("left at this pace", duration(left), left))
        cards = [
            element("div", element("b", each.text), element("span", each.name), class_="card")
            for each in figures
        ]
        return element("div", *cards, class_="cards")
    columns = [{each.name: each for each in _figures(run.main)} for run in runs]
    rows = []
    for name in dict.fromkeys(name for column in columns for name in column):
        figures_of = [column.get(name) for column in columns]
        texts = [figure.text if figure is not None else "-" for figure in figures_of]
        values = [figure.value if figure is not None else None for figure in figures_of]
        rows.append([name, *texts, _difference(values[0], values[1])])
    return PageTable(["", *(run.name for run in runs), "difference"], rows).html()


def _difference(before: float | None, after: float | None) -> str:
    if before is None or after is None or not before:
        return "-"
    if after == before:
        return "equal"
    change = 100 * (after / before - 1)
    return f"{change:+.1f}%" if abs(change) < 1000 else f"{change:+.3g}%"


def _gradient(runs: Sequence[ReportedRun]) -> Markup:
    return metric_plot(runs, "gradient_norm", "Norm of the gradient", "norm of the gradient")


def _links(runs: Sequence[ReportedRun]) -> list[Markup]:
    plots = link_plots(runs)
    if not plots:
        return []
    rows = []
    for run in runs:
        for site in link_sites(run.main):
            rows.append([_of_run(run, runs, f"to {site}"), *_link_cells(run.main, site)])
    headings = ["link", "sends a step", "sends", "receives", "busy at", "round trip"]
    headings += ["waits a step", "planned wait"]
    return _section("Links between sites", _plots(*plots), PageTable(headings, rows).html())


def _sites(runs: Sequence[ReportedRun]) -> list[Markup]:
    rows = []
    for run in runs:
        for site, (record, _) in site_figures(run.record, last_moment(run.main)).items():
            loss, rate = record.loss, record.tokens_per_second
            rows.append(
                [
                    _of_run(run, runs, site),
                    "-" if loss is None else loss_words(loss),
                    _seconds(record.seconds),
                    "-" if rate is None else tokens_words(rate),
                    _seconds(record.wait_seconds),
                    _seconds(record.age_seconds),
                ]
            )
    if not rows:
        return []
    headings = ["site", "last loss", "a step", "rate", "waits", "age of the figures"]
    return _section("Sites", PageTable(headings, rows).html())


def _of_run(run: ReportedRun, runs: Sequence[ReportedRun], words: str) -> str:
    return words if len(runs) == 1 else f"{run.name} {words}"


def _link_cells(main: DirectoryRecord, site: str) -> list[str]:
    def mean(figure: str) -> float | None:
        return main.curves.mean(f"link/{site}/{figure}")

    sent, planned = mean("sent_bytes"), mean("planned_wait_seconds")
    rates = (mean("sent_bytes_per_second"), mean("received_bytes_per_second"))
    return [
        "-" if sent is None else quantity(sent, "B"),
        *("-" if rate is None else quantity(8 * rate, "bit/s") for rate in rates),
        achieved_words(mean("bytes_per_second"), mean("topology_bytes_per_second")),
        _seconds(mean("round_trip_seconds")),
        _seconds(mean("wait_seconds")),
        "-" if planned is None else f"{duration(planned)} (planned)",
    ]


def _seconds(seconds: float | None) -> str:
    return "-" if seconds is None else duration(seconds)


def _slowest(run: ReportedRun) -> Markup:
    """Name the process or site that was the slowest, and how often; nothing if nobody was."""
    event = newest_late(run.main)
    if event is None:
        return joined()
    when = "" if event.step is None else f" (step {event.step:,})"
    return element("p", f"The slowest of {run.name}{when}: {event.text}.")


def _attempts(run: ReportedRun) -> Markup:
    attempts = run.main.attempts
    if not attempts:
        return joined()
    lines = [
        element("li", f"{attempt_words(attempt)}; began {clock(attempt.began)} UTC")
        for attempt in attempts[-50:]
    ]
    earlier = f" (the last 50 of {len(attempts)})" if len(attempts) > 50 else ""
    summary = element("summary", f"Attempts of {run.name}{earlier}")
    return element("details", summary, element("ul", *lines))


def _events(runs: Sequence[ReportedRun]) -> list[Markup]:
    tables = []
    for run in runs:
        events = list(run.main.events)
        if not events:
            continue
        rows = [
            ["-" if event.time is None else clock(event.time), event.kind, event_words(event)]
            for event in events[-_MOST_EVENTS:]
        ]
        words = f"Events of {run.name}: the last {len(rows):,} of {len(events):,}"
        table = PageTable(["time (UTC)", "kind", "event"], rows, words=True).html()
        tables.append(element("details", element("summary", words), table))
    return tables


def _goodput(runs: Sequence[ReportedRun]) -> list[Markup]:
    goodputs = [run.main.goodput for run in runs]
    if not any(goodputs):
        return _section("Goodput", element("p", "Goodput: not recorded.", class_="none"))
    rows = []
    for use in (*CATEGORIES, LOST, UNATTRIBUTED):
        if not any(goodput is not None and use in goodput.seconds for goodput in goodputs):
            continue
        cells: list[str] = [joined(_swatch(USE_COLORS[use]), f" {use}")]
        for goodput in goodputs:
            seconds = 0.0 if goodput is None else goodput.seconds.get(use, 0.0)
            total = 0.0 if goodput is None else goodput.total_seconds
            cells += [duration(seconds), f"{seconds / total:.1%}" if total else "-"]
        rows.append(cells)
        if use == "waiting":
            rows += _waiting(runs)
    total_cells: list[str] = ["total"]
    for goodput in goodputs:
        total_cells += [duration(goodput.total_seconds), "100%"] if goodput else ["-", "-"]
    rows.append(total_cells)
    headings = [""]
    for run in runs:
        headings += [f"{run.name}: time" if len(runs) > 1 else "time", "share"]
    return _section(
        "Goodput",
        element("p", _GOODPUT_WORDS, class_="words"),
        goodput_bars(runs),
        PageTable(headings, rows).html(),
    )


_GOODPUT_WORDS = (
    "Uses of the wall-clock time from the first start. Productive are steps that were done for the "
    "first time, recomputed are those that an earlier attempt had done too. Lost is the time "
    "between attempts."
)


def _swatch(color: str) -> Markup:
    box = element("rect", x=0, y=0, width=10, height=10, fill=color)
    return element("svg", box, width=10, height=10, viewBox="0 0 10 10")


def _waiting(runs: Sequence[ReportedRun]) -> list[list[str]]:
    """Return the rows of the sites that a run waited for."""
    goodputs = [run.main.goodput for run in runs]
    sites = dict.fromkeys(site for goodput in goodputs if goodput for site in goodput.waiting_for)
    rows = []
    for site in sites:
        cells = [f"↳ for {site}"]
        for goodput in goodputs:
            seconds = 0.0 if goodput is None else goodput.waiting_for.get(site, 0.0)
            total = 0.0 if goodput is None else goodput.total_seconds
            cells += [duration(seconds), f"{seconds / total:.1%}" if total else "-"]
        rows.append(cells)
    return rows


def _plan(runs: Sequence[ReportedRun]) -> list[Markup]:
    rows = []
    for run in runs:
        if run.main.planned is not None:
            rows += [
                [_of_run(run, runs, row[0]), *row[1:]] for row in _plan_rows(run, run.main.planned)
            ]
    if not rows:
        return _section("Plan", element("p", "No step.yaml with a prediction.", class_="none"))
    headings = ["", "planned", "measured", "difference", "known to"]
    notes = [note for run in runs if run.main.planned for note in run.main.planned.notes[:20]]
    items = [element("li", note[:_MOST_VALUE]) for note in notes]
    parts = [PageTable(headings, rows).html()]
    if items:
        parts.append(
            element("details", element("summary", "Notes of the plan"), element("ul", *items))
        )
    return _section("Plan against measurement", *parts)


def _plan_rows(run: ReportedRun, planned: PlanRecord) -> list[list[str]]:
    main = run.main
    rows = []

    def add(name: str, figure: PlannedFigure | None, measured: float | None, unit: str) -> None:
        if figure is not None:
            cells = [_quantity(figure.value, unit), _quantity(measured, unit)]
            error = "-" if figure.error is None else f"{figure.error:.0%}"
            rows.append([name, *cells, _difference(figure.value, measured), error])

    add("median step", planned.step_seconds, main.seconds.median, "s")
    waits = main.curves.mean("seconds/waiting")
    add("waits for other sites", planned.wait_seconds, waits, "s")
    sites = link_sites(main)
    sent = [main.curves.mean(f"link/{site}/sent_bytes") for site in sites]
    known = [each for each in sent if each is not None]
    add("a site sends in a step", planned.crossing_bytes, sum(known) if known else None, "B")
    peak = max((point.high for point in main.curves.points("memory/peak_bytes")), default=None)
    add("memory of a device", planned.device_bytes, peak, "B")
    for site in sites:
        link = planned.link(run.record.main_site, site)
        if link is not None:
            measured = main.curves.mean(f"link/{site}/round_trip_seconds")
            add(f"round trip to {site}", PlannedFigure(link.round_trip, None), measured, "s")
            forwards = link.sites[1] == site
            bandwidth = link.rate if forwards else link.reverse_rate
            rate = main.curves.mean(f"link/{site}/bytes_per_second")
            add(f"bandwidth to {site}", PlannedFigure(bandwidth, None), rate, "B/s")
    return rows


def _quantity(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "s":
        return duration(value)
    return quantity(8 * value, "bit/s") if unit == "B/s" else quantity(value, unit)


def _memory(runs: Sequence[ReportedRun]) -> list[Markup]:
    parts: list[Markup] = []
    rows = []
    for run in runs:
        main, planned = run.main, run.main.planned
        if planned is not None and planned.memory_line:
            words = _of_run(run, runs, f"Planned: {planned.memory_line[:2000]}")
            parts.append(element("p", words, class_="words"))
        peaks = main.curves.points("memory/peak_bytes")
        limit = main.curves.mean("memory/limit_bytes")
        if peaks:
            highest = max(point.high for point in peaks)
            share = f"{highest / limit:.1%}" if limit else "-"
            cells = [quantity(highest, "B"), "-" if limit is None else quantity(limit, "B"), share]
            rows.append([run.name, *cells])
    if rows:
        parts.append(PageTable(["run", "peak", "limit", "share"], rows).html())
        plot = metric_plot(runs, "memory/peak_bytes", "Peak memory", "peak, GB of a device", 1e-9)
        parts.append(_plots(plot))
    return _section("Memory", *parts) if parts else []


def _config(runs: Sequence[ReportedRun]) -> list[Markup]:
    parts: list[Markup] = []
    if len(runs) == 2:
        first, second = (run.main.config for run in runs)
        parts.append(_changes("What differs", first, second, [run.name for run in runs]))
    for run in runs:
        parts += _restarts(run)
    for run in runs:
        leaves = list(leaves_by_key(run.main.config))[:_MOST_KEYS]
        rows = [[key, _value(value)] for key, value in leaves]
        summary = element("summary", f"Config of {run.name}: {len(rows):,} keys")
        table = PageTable(["key", "value"], rows, words=True).html()
        parts.append(element("details", summary, table))
    return _section("Config", *parts)


def _restarts(run: ReportedRun) -> list[Markup]:
    """Return what changed in the config from attempt to attempt."""
    main = run.main
    configs = [main.earlier_configs[number] for number in sorted(main.earlier_configs)]
    configs.append(main.config)
    numbers = [f"config.{number}.yaml" for number in sorted(main.earlier_configs)]
    numbers.append(CONFIG)
    parts = []
    for number in range(len(configs) - 1):
        title = f"Changes over a restart of {run.name}"
        pair = numbers[number : number + 2]
        parts.append(_changes(title, configs[number], configs[number + 1], pair))
    return parts


def _changes(
    title: str, before: Mapping[str, Any], after: Mapping[str, Any], names: Sequence[str]
) -> Markup:
    of_both = [dict(leaves_by_key(each)) for each in (before, after)]
    rows = []
    for key in list(dict.fromkeys([*of_both[0], *of_both[1]]))[:_MOST_KEYS]:
        cells = [_value(each[key]) if key in each else "absent" for each in of_both]
        if cells[0] != cells[1]:
            rows.append([key, *cells])
    if not rows:
        return element("p", f"{title}: nothing.", class_="words")
    return joined(element("p", f"{title}:"), PageTable(["key", *names], rows, words=True).html())


def _value(value: object) -> str:
    text = (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )
    return text if len(text) <= _MOST_VALUE else f"{text[:_MOST_VALUE]}…"


def _environment(runs: Sequence[ReportedRun]) -> list[Markup]:
    rows = [[_of_run(run, runs, name), value] for run in runs for name, value in _facts(run)]
    if not rows:
        return []
    return _section("Environment", PageTable(["", ""], rows, words=True).html())


def _facts(run: ReportedRun) -> list[tuple[str, str]]:
    """List where and when a run was, by name."""
    main, planned, facts = run.main, run.main.planned, list[tuple[str, str]]()
    if planned is not None:
        facts.append(("geojax", planned.version or "-"))
        of_runtimes = collections.Counter(planned.devices)
        for devices, count in itertools.islice(of_runtimes.items(), 64):
            facts.append(("devices", devices if count == 1 else f"{count} sites of {devices}"))
        mesh = " x ".join(f"{axis}={size}" for axis, size in planned.mesh.items() if size != 1)
        facts.append(("mesh", mesh or "one device"))
    if began(main):
        facts.append(("first start", f"{clock(began(main))} UTC"))
        facts.append(("last known", f"{clock(last_moment(main))} UTC"))
    if run.record.sites:
        facts.append(("sites", ", ".join(sorted(run.record.sites))))
    return facts


def _footer(runs: Sequence[ReportedRun], made: float) -> Markup:
    words = [f"Made by geojax report at {clock(made)} UTC."]
    for run in runs:
        if count := run.main.unreadable_lines:
            words.append(f"Lines of {run.name} that are no records and were left out: {count:,}.")
    words.append("Curves are means of neighboring steps; a band is their range.")
    return element("footer", element("p", " ".join(words)))
