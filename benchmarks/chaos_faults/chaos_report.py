"""The table of a chaos run by kind, its failures, and its record."""

import statistics
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.table import Table

from chaos_faults.campaign import Trial
from chaos_faults.drawn_faults import KINDS

FIGURES: dict[str, Callable[[Trial], float | None]] = {
    "detection": lambda trial: trial.verdict.detection,
    "next_step": lambda trial: trial.verdict.next_step,
    "rejoin": lambda trial: trial.verdict.rejoin,
}
"""Seconds of a fault, by name."""


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """Return the median, the 95th percentile and the maximum of values; None: there are none."""
    if not values:
        return None
    ordered = sorted(values)
    at_95 = ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)]
    return {"p50": statistics.median(ordered), "p95": at_95, "max": ordered[-1]}


def by_kind(trials: Sequence[Trial]) -> dict[str, dict[str, Any]]:
    """Sum up the trials of each kind, and of all."""
    found = {}
    for kind in [*KINDS, "all"]:
        chosen = [trial for trial in trials if kind in (trial.fault.kind, "all")]
        if not chosen:
            continue
        summary: dict[str, Any] = {
            "count": len(chosen),
            "recovered": sum(not trial.verdict.misses for trial in chosen),
            "no_gap": sum(trial.verdict.has_no_gap for trial in chosen),
        }
        for name, figure in FIGURES.items():
            values = [value for trial in chosen if (value := figure(trial)) is not None]
            summary[name] = percentiles(values)
        found[kind] = summary
    return found


def table_of(trials: Sequence[Trial]) -> Table:
    """Make the table by kind."""
    columns = [f"{name.replace('_', ' ')} p50/p95/max, s" for name in FIGURES]
    table = Table("kind", "faults", "recovered", "no gap", *columns)
    for kind, summary in by_kind(trials).items():
        cells = [
            ""
            if (at := summary[name]) is None
            else f"{at['p50']:.2f} {at['p95']:.2f} {at['max']:.2f}"
            for name in FIGURES
        ]
        counts = [str(summary[name]) for name in ("count", "recovered", "no_gap")]
        table.add_row(kind, *counts, *cells)
    return table


def failures(trials: Sequence[Trial]) -> list[str]:
    """List each fault that was not recovered from, with what was missed."""
    return [
        f"{in_words(trial)}: {'; '.join(trial.verdict.misses)}"
        for trial in trials
        if trial.verdict.misses
    ]


def is_late_at_most(trial: Trial) -> bool:
    """Return True if a fault missed no bounds, or those of seconds alone."""
    return set(trial.verdict.misses) <= set(trial.verdict.late)


def in_words(trial: Trial) -> str:
    """Name a fault: number, kind, sites and phase."""
    fault = trial.fault
    struck = [trial.sites[site] for site in trial.injected.struck]
    sites = " and ".join(struck) or trial.sites[fault.site]
    hit = "" if trial.injected.hit else " (not seen)"
    note = f", {trial.injected.note}" if trial.injected.note else ""
    return f"{fault.number}. {fault.kind} of {sites} in {fault.phase}{hit}{note}"


def span_of(trials: Sequence[Trial]) -> int:
    """Return the number of steps from the one under way at the first fault to the last return."""
    return trials[-1].last_step - trials[0].first_step if trials else 0


def killed_sites(trials: Sequence[Trial]) -> dict[str, int]:
    """Count how often each site was killed."""
    names = trials[0].sites if trials else ()
    deaths = [trial for trial in trials if KINDS[trial.fault.kind].outcome == "death"]
    return {
        name: sum(site in trial.injected.struck for trial in deaths)
        for site, name in enumerate(names)
    }


def growth(trials: Sequence[Trial]) -> dict[str, dict[str, float]]:
    """Return how much each process that outlived several faults has grown, by site and number.

    The first figures of a process are left out: it has done few steps.
    """
    series: dict[str, list[Any]] = {}
    for trial in trials:
        for site, figures in trial.figures.items():
            series.setdefault(f"{site} {figures.process}", []).append(figures)
    grown = {}
    for name, figures in series.items():
        if len(figures) > 2:
            first, last = figures[1], figures[-1]
            grown[name] = {
                "faults": len(figures),
                "resident": last.resident_megabytes / first.resident_megabytes,
                "threads": last.threads - first.threads,
                "open_files": last.open_files - first.open_files,
            }
    return grown


def summary_of(trials: Sequence[Trial]) -> Mapping[str, Any]:
    """Return what the record says of all trials."""
    return {
        "by_kind": by_kind(trials),
        "struck": {
            "the first site": sum(trial.hit_first for trial in trials),
            "the holder": sum(trial.hit_holder for trial in trials),
        },
        "failures": failures(trials),
        "growth": growth(trials),
        "faults": [trial.as_json() for trial in trials],
    }
