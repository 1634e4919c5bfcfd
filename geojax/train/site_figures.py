"""Figures of a step that the first process of each site tells those of the other sites."""

import json
import math
import time
from collections.abc import Mapping

from geojax.islands.traffic import LinkTraffic
from geojax.quantities import duration
from geojax.saved_runs.records.step_record import finite
from geojax.transport import ToldFigures

_LATE_SECONDS = 10.0
"""Age of figures that is told with them."""
_TOLD = ("step", "loss", "seconds", "tokens_per_second", "wait_seconds")


def told_figures(step: int, values: Mapping[str, float], links: Mapping[str, LinkTraffic]) -> bytes:
    """Write what a site tells of a step: a JSON object of some 120 bytes.

    Args:
        step: number of the step.
        values: its metrics.
        links: its traffic with each other site.
    """
    waited = sum(sum(link.wait_seconds.values()) for link in links.values())
    known = {"step": step, "wait_seconds": waited, **values}
    figures = {name: known[name] for name in _TOLD if math.isfinite(known.get(name, math.nan))}
    return json.dumps(figures).encode()


def site_metrics(told: Mapping[str, ToldFigures]) -> dict[str, float]:
    """Return the figures of other sites as metrics, each site's with their age.

    Args:
        told: the newest figures of each site, by its name; what is none is left out.
    """
    metrics: dict[str, float] = {}
    for site, (content, heard) in told.items():
        if figures := _read(content):
            metrics |= {f"site/{site}/{name}": value for name, value in figures.items()}
            metrics[f"site/{site}/age_seconds"] = time.monotonic() - heard
    return metrics


def site_words(site: str, metrics: Mapping[str, float]) -> str:
    """Return another site's part of a progress line, of its `site_metrics`: how long it waits."""
    waits = metrics.get(f"site/{site}/wait_seconds", 0.0)
    age = metrics[f"site/{site}/age_seconds"]
    words = f"{site} waits {duration(waits)}"
    return words if age < _LATE_SECONDS else f"{words} ({duration(age)} ago)"


def _read(content: bytes) -> dict[str, float]:
    """Read figures that a site told; {}: they are none."""
    try:
        figures = json.loads(content)
    except (ValueError, RecursionError):
        return {}
    if not isinstance(figures, dict):
        return {}
    return {
        name: figures[name]
        for name in _TOLD
        if finite(figures.get(name)) is not None  # a whole number may be beyond all floats
    }
