"""Figures of a run in words, for a terminal and for a page."""

import dataclasses
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from geojax.quantities import duration, quantity
from geojax.saved_runs.records.attempt_records import EventRecord
from geojax.saved_runs.records.curves import CurvePoint
from geojax.saved_runs.records.run_record import DirectoryRecord, RunRecord
from geojax.saved_runs.records.step_record import LinkRecord, SiteRecord, StepRecord

WINDOW = 20
"""Steps over which a figure that varies is averaged."""


def model_words(config: Mapping[str, Any]) -> str | None:
    """Describe the model of a resolved config; None: it is not known."""
    model = config.get("model")
    if not isinstance(model, Mapping):
        return None
    if model.get("module") is not None:
        return str(model["module"])
    words = []
    if (layers := model.get("num_hidden_layers")) is not None:
        words.append(f"{layers} layers of {model.get('hidden_size')}")
    if model.get("num_experts"):
        words.append(f"{model['num_experts']} experts")
    if (size := model.get("vocab_size")) is not None:
        words.append(f"vocabulary {size}")
    return ", ".join(words) or None


def mesh_words(config: Mapping[str, Any]) -> str | None:
    """Name the axes of the mesh that are in use; None: the config tells none."""
    mesh = config.get("mesh")
    if not isinstance(mesh, Mapping):
        return None
    used = [f"{axis}={size}" for axis, size in mesh.items() if size != 1]
    return " x ".join(used) or "one device"


def run_words(config: Mapping[str, Any]) -> list[str]:
    """Describe a run by its config: model, mesh, precision, batch; without those not known."""
    batch = config.get("batch")
    batch = batch if isinstance(batch, Mapping) else {}
    sizes = None
    if "global_batch_size" in batch and "sequence_length" in batch:
        sizes = f"{batch['global_batch_size']} x {batch['sequence_length']} tokens a step"
    dc = config.get("dc")
    join = dc.get("join") if isinstance(dc, Mapping) else None
    words = (
        model_words(config),
        mesh_words(config),
        "islands" if join == "islands" else None,
        config.get("precision"),
        sizes,
    )
    return [str(word) for word in words if word is not None]


def seconds_left(directory: DirectoryRecord) -> float | None:
    """Return the time that the rest of the steps takes at the pace of the last; None: unknown."""
    latest, steps = directory.latest, directory.steps
    pace = mean_of(directory.recent, "seconds")
    if latest is None or steps is None or pace is None:
        return None
    return max(0, steps - latest.step) * pace


def mean_of(records: Iterable[StepRecord], name: str) -> float | None:
    """Return the mean of a metric over the last steps; None: they do not have it."""
    values = [record.values[name] for record in _last(records) if name in record.values]
    return statistics.fmean(values) if values else None


def _last(records: Iterable[StepRecord]) -> Sequence[StepRecord]:
    return list(records)[-WINDOW:]


def parts_of(records: Iterable[StepRecord]) -> dict[str, float]:
    """Return the mean seconds of a step's parts over the last steps; empty: they have none."""
    parts: dict[str, list[float]] = {}
    for record in _last(records):
        for part, seconds in record.seconds_of_parts.items():
            parts.setdefault(part, []).append(seconds)
    return {part: statistics.fmean(seconds) for part, seconds in parts.items()}


_OF_WINDOWS = ("round_trip_seconds", "bytes_per_second", "topology_bytes_per_second")


class LinkWords(NamedTuple):
    """A row of a table of links; "-" is what nobody measured."""

    site: str
    sends: str
    receives: str
    achieved: str
    """Rate while messages are on their way, of that in the topology."""
    round_trip: str
    waits: str
    cause: str
    in_flight: str
    retransmits: str


def achieved_words(achieved: float | None, of: float | None) -> str:
    """Return a link's rate in bytes a second while it is busy, as a share of the topology's."""
    if achieved is None or of is None:
        return _rate(achieved)
    return f"{achieved / of:.0%} of {_rate(of)}"


class LinkMeans(NamedTuple):
    """Means of a link over the last steps."""

    link: LinkRecord
    round_trip: float | None
    achieved: float | None
    """Bytes a second while messages are on their way."""
    topology_rate: float | None
    """Bytes a second of the topology, which `geojax probe` measures."""

    @classmethod
    def by_site(cls, directory: DirectoryRecord) -> "dict[str, LinkMeans]":
        """Return the means of all links of the last steps."""
        figures = {}
        sites = {site: None for record in _last(directory.recent) for site in record.links}
        for site in sites:
            links = [
                record.links[site] for record in _last(directory.recent) if site in record.links
            ]
            # Windows measure these figures, and write them in lines of their own.
            of_windows = [
                _newest(directory.curves.points(f"link/{site}/{name}")) for name in _OF_WINDOWS
            ]
            round_trip = _mean(link.round_trip_seconds for link in links)
            figures[site] = cls(_mean_link(links), *of_windows)
            if round_trip is not None:
                figures[site] = figures[site]._replace(round_trip=round_trip)
        return figures

    def words(self, site: str) -> LinkWords:
        """Return the row of a table."""
        link = self.link
        waits, cause = _waits(link)
        return LinkWords(
            site,
            _rate(link.sent_per_second),
            _rate(link.received_per_second),
            achieved_words(self.achieved, self.topology_rate),
            "-" if self.round_trip is None else duration(self.round_trip),
            waits,
            cause,
            "-" if link.in_flight is None else f"{link.in_flight:.0f}",
            "-" if link.retransmits is None else f"{link.retransmits:.3g}",
        )


def _newest(points: Sequence[CurvePoint]) -> float | None:
    return points[-1].mean if points else None


def _mean_link(links: Sequence[LinkRecord]) -> LinkRecord:
    causes: dict[str, list[float]] = {}
    for link in links:
        for cause, seconds in link.wait_causes.items():
            causes.setdefault(cause, []).append(seconds)
    return LinkRecord(
        sent_per_second=_mean(link.sent_per_second for link in links),
        received_per_second=_mean(link.received_per_second for link in links),
        sent_bytes=_mean(link.sent_bytes for link in links),
        in_flight=_mean(link.in_flight for link in links),
        wait_seconds=_mean(link.wait_seconds for link in links),
        wait_causes={cause: statistics.fmean(seconds) for cause, seconds in causes.items()},
        planned_wait_seconds=_mean(link.planned_wait_seconds for link in links),
        retransmits=_mean(link.retransmits for link in links),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _rate(bytes_per_second: float | None) -> str:
    return "-" if bytes_per_second is None else quantity(8 * bytes_per_second, "bit/s")


def _waits(link: LinkRecord) -> tuple[str, str]:
    """Return the wait of a step, and its largest cause."""
    if link.wait_seconds is None:
        planned = link.planned_wait_seconds
        return ("-", "") if planned is None else (f"{duration(planned)} planned", "")
    largest = max(link.wait_causes, key=lambda cause: link.wait_causes[cause], default="")
    return duration(link.wait_seconds), largest if link.wait_seconds else ""


class SiteFigures(NamedTuple):
    """The newest figures of a site."""

    record: SiteRecord
    is_late: bool
    """True if the figures are older than a few steps."""


def site_figures(run: RunRecord, now: float) -> dict[str, SiteFigures]:
    """Return the newest figures of every site, by its own directory or by what it sent."""
    main, name = run.main, run.main_site
    records = {} if main.latest is None else _sent_figures(main.latest, now)
    for site, directory in run.sites.items():
        if directory.latest is not None:
            records[site] = _of_directory(directory, now)
    if name is None and records and main.latest is not None:
        records = {"this site": _of_directory(main, now), **records}
    pace = main.seconds.median or 0.0
    late = max(10.0, 3 * pace)
    return {
        site: SiteFigures(record, record.age_seconds is not None and record.age_seconds > late)
        for site, record in records.items()
    }


def _sent_figures(latest: StepRecord, now: float) -> dict[str, SiteRecord]:
    """Return what other sites sent, which is older than it was at the end of the step."""
    since = max(0.0, now - latest.values.get("time", now))
    return {
        site: record
        if record.age_seconds is None
        else dataclasses.replace(record, age_seconds=record.age_seconds + since)
        for site, record in latest.sites.items()
    }


def _of_directory(directory: DirectoryRecord, now: float) -> SiteRecord:
    assert directory.latest is not None, "a site of which a step is known"
    values = directory.latest.values
    waits = [link.wait_seconds for link in directory.latest.links.values()]
    time = values.get("time")
    return SiteRecord(
        loss=values.get("loss"),
        seconds=values.get("seconds"),
        tokens_per_second=values.get("tokens_per_second"),
        wait_seconds=sum(wait for wait in waits if wait is not None) if any(waits) else None,
        age_seconds=None if time is None else max(0.0, now - time),
    )


def newest_late(directory: DirectoryRecord) -> EventRecord | None:
    """Return the last event that named the slowest process or site; None: nobody was."""
    return next((event for event in reversed(directory.events) if event.kind == "late"), None)


def loss_words(loss: float) -> str:
    """Return a loss, or another number that is small as a rule."""
    return f"{loss:.4f}" if abs(loss) < 1e5 else f"{loss:.3g}"


def percent(share: float) -> str:
    """Return a share as a percentage of three digits."""
    return f"{100 * share:.3g}%"


def tokens_words(per_second: float) -> str:
    """Return a rate of tokens."""
    return quantity(per_second, "tokens/s")
