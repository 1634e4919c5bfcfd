"""A line of metrics.jsonl as a typed record."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

from geojax.network_names import is_site_name

PARTS = ("data", "dispatch", "waiting", "device", "validation", "save")
"""Parts of a step's seconds, as metrics.jsonl names them: `seconds/<part>`."""

VALIDATION = "validation/"
"""Beginning of the names of validation losses."""

_MOST_NAMES = 256
_MOST = 1e100
"""Bound of a number, of which sums and differences stay finite."""
_MOST_WHOLE = 2**53


@dataclasses.dataclass(frozen=True)
class LinkRecord:
    """Figures of a step on the link to another site; None: not known."""

    sent_per_second: float | None = None
    """Bytes a second over the whole step."""
    received_per_second: float | None = None
    sent_bytes: float | None = None
    in_flight: float | None = None
    wait_seconds: float | None = None
    wait_causes: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Seconds of the wait by its cause."""
    planned_wait_seconds: float | None = None
    """The plan's wait, which nobody measured."""
    round_trip_seconds: float | None = None
    retransmits: float | None = None


@dataclasses.dataclass(frozen=True)
class SiteRecord:
    """Figures that another site last sent; None: not known."""

    loss: float | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    wait_seconds: float | None = None
    age_seconds: float | None = None
    """Seconds since the site sent them."""


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """The figures of a step."""

    step: int
    values: Mapping[str, float]
    """Finite numbers of the line by name, but for the step."""

    @classmethod
    def of(cls, line: Mapping[str, Any]) -> "StepRecord | None":
        """Read a line; None: it is no line of metrics."""
        step = whole(line.get("step"))
        if step is None:
            return None
        values: dict[str, float] = {}
        for name, value in line.items():
            # The usual case first: a long run has millions of numbers.
            number = value if type(value) is float and -_MOST < value < _MOST else None
            if number is None:
                number = finite(value)
            if number is not None and len(values) < _MOST_NAMES:
                values[name] = number
        values.pop("step", None)
        return cls(step, values)

    @functools.cached_property
    def links(self) -> dict[str, LinkRecord]:
        """Figures of the links, by the other site."""
        return {site: LinkRecord(**fields) for site, fields in _of_links(self.values).items()}

    @functools.cached_property
    def sites(self) -> dict[str, SiteRecord]:
        """Figures of the other sites."""
        sites: dict[str, dict[str, float]] = {}
        for name, value in self.values.items():
            kind, site, figure = _split(name)
            if kind == "site" and figure in _SITE_FIELDS:
                sites.setdefault(site, {})[figure] = value
        return {site: SiteRecord(**fields) for site, fields in sites.items()}

    @property
    def validation(self) -> dict[str, float]:
        """Validation losses by the name of their data."""
        return {
            name.removeprefix(VALIDATION): value
            for name, value in self.values.items()
            if name.startswith(VALIDATION)
        }

    @property
    def is_of_training(self) -> bool:
        """True if the line has more than validation losses, or than figures of a window."""
        return "seconds" in self.values or "loss" in self.values

    @property
    def seconds_of_parts(self) -> dict[str, float]:
        """Known parts of the step's seconds."""
        named = {part: self.values.get(f"seconds/{part}") for part in PARTS}
        return {part: seconds for part, seconds in named.items() if seconds is not None}


def finite(value: Any) -> float | None:
    """Return a number of JSON as a float; None: it is none, or beyond all measure."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if -_MOST < number < _MOST else None


def whole(value: Any) -> int | None:
    """Return a count of JSON; None: it is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        return None
    return value if 0 <= value < _MOST_WHOLE else None


_LINK_FIELDS = {
    "sent_bytes": "sent_bytes",
    "sent_bytes_per_second": "sent_per_second",
    "received_bytes_per_second": "received_per_second",
    "messages_in_flight": "in_flight",
    "wait_seconds": "wait_seconds",
    "planned_wait_seconds": "planned_wait_seconds",
    "round_trip_seconds": "round_trip_seconds",
    "tcp_round_trip_seconds": "round_trip_seconds",
    "retransmits": "retransmits",
}
_SITE_FIELDS = {field.name for field in dataclasses.fields(SiteRecord)}
_CAUSE = "wait_seconds_"


def _split(name: str) -> tuple[str, str, str]:
    """Return the kind, the site and the figure of `link/west/sent_bytes`; empty: it is another."""
    kind, _, rest = name.partition("/")
    site, _, figure = rest.partition("/")
    return (kind, site, figure) if is_site_name(site) else ("", "", "")


def _of_links(values: Mapping[str, float]) -> dict[str, dict[str, Any]]:
    links: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        kind, site, figure = _split(name)
        if kind != "link":
            continue
        if figure in _LINK_FIELDS:
            links.setdefault(site, {})[_LINK_FIELDS[figure]] = value
        elif figure.startswith(_CAUSE):
            causes = links.setdefault(site, {}).setdefault("wait_causes", {})
            causes[figure.removeprefix(_CAUSE)] = value
    return links
