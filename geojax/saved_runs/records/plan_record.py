"""Figures of a step.yaml that a measured run is compared with."""

import dataclasses
import itertools
import re
from collections.abc import Mapping
from typing import Any

from geojax.network_names import is_site_name
from geojax.saved_runs.records.step_record import finite
from geojax.yaml_syntax import MOST_BYTES, YamlError, parse

MOST_STEP_BYTES = 1 << 24
"""Size of the largest step.yaml that is read."""

_KEY = re.compile(r"^(\w+):", re.MULTILINE)
_SECTIONS = frozenset(
    (
        "layout",
        "seconds",
        "wait_seconds",
        "bytes_between_sites",
        "memory_bytes",
        "memory",
        "notes",
        "origin",
    )
)


@dataclasses.dataclass(frozen=True)
class PlannedFigure:
    """A predicted number."""

    value: float
    error: float | None
    """Share by which it may be wrong; None: it was never validated."""


@dataclasses.dataclass(frozen=True)
class PlannedSiteLink:
    """A link as the topology describes it."""

    sites: tuple[str, str]
    round_trip: float
    """Seconds."""
    rate: float
    """Bytes a second from the first site to the second."""
    reverse_rate: float


@dataclasses.dataclass(frozen=True)
class PlanRecord:
    """A step.yaml as far as a person compares it with the run; None: not known."""

    step_seconds: PlannedFigure | None
    wait_seconds: PlannedFigure | None
    """Wait of a step for other sites."""
    crossing_bytes: PlannedFigure | None
    """Bytes that the devices of a site together send to other sites in a step."""
    device_bytes: PlannedFigure | None
    """Memory of the device that needs most."""
    memory_line: str
    mesh: Mapping[str, int]
    version: str | None
    """Version of geojax."""
    devices: tuple[str, ...]
    """Devices of each runtime, in words."""
    links: tuple[PlannedSiteLink, ...]
    notes: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "PlanRecord | None":
        """Read the text of a step.yaml; None: it is none.

        The order of a pipeline's work is skipped, which is most of a large file.
        """
        content = parsed_yaml(_sections(text))
        if content is None:
            return None
        origin, memory = _mapping(content.get("origin")), _mapping(content.get("memory"))
        mesh = _mapping(_mapping(content.get("layout")).get("mesh"))
        line, notes = memory.get("line"), content.get("notes")
        version = origin.get("geojax")
        return cls(
            _figure(content.get("seconds")),
            _figure(content.get("wait_seconds")),
            _figure(content.get("bytes_between_sites")),
            _figure(content.get("memory_bytes")),
            line if isinstance(line, str) else "",
            {name: size for name, size in mesh.items() if isinstance(size, int)},
            version if isinstance(version, str) else None,
            tuple(map(_devices, _mappings(origin.get("devices")))),
            _links(_mapping(origin.get("topology")).get("links")),
            tuple(map(str, notes)) if isinstance(notes, list) else (),
        )

    def link(self, site: str | None, other: str) -> PlannedSiteLink | None:
        """Return the link between two sites; with one known name, the only link that it has."""
        known = [link for link in self.links if other in link.sites]
        if site is not None:
            known = [link for link in known if site in link.sites]
        return known[0] if len(known) == 1 else None


def parsed_yaml(text: str, most_bytes: int = MOST_BYTES) -> dict[str, Any] | None:
    """Read the mapping of a YAML document; None: it is none."""
    try:
        content = parse(text, most_bytes)
    except (YamlError, RecursionError):
        return None
    return content if isinstance(content, dict) else None


def _sections(text: str) -> str:
    """Return the parts of a document whose keys are needed."""
    starts = [match.start() for match in _KEY.finditer(text)]
    sections = [text[start:end] for start, end in itertools.pairwise([*starts, len(text)])]
    return "".join(each for each in sections if each.partition(":")[0] in _SECTIONS)


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _mappings(value: Any) -> list[Mapping[str, Any]]:
    return [each for each in value if isinstance(each, Mapping)] if isinstance(value, list) else []


def _figure(content: Any) -> PlannedFigure | None:
    figure = _mapping(content)
    value = finite(figure.get("value"))
    return None if value is None else PlannedFigure(value, finite(figure.get("relative_error")))


def _devices(runtime: Mapping[str, Any]) -> str:
    count = runtime.get("processes")
    processes = "one process" if count == 1 else f"{count} processes"
    return f"{runtime.get('count')} x {runtime.get('kind')}, {processes}"


def _links(content: Any) -> tuple[PlannedSiteLink, ...]:
    links = []
    for link in _mappings(content):
        sites = link.get("sites")
        round_trip = finite(link.get("round_trip_seconds"))
        rate = finite(link.get("bytes_per_second"))
        reverse = finite(link.get("reverse_bytes_per_second"))
        if not isinstance(sites, list) or len(sites) != 2 or round_trip is None or rate is None:
            continue
        first, second = map(str, sites)
        if is_site_name(first) and is_site_name(second):
            reverse_rate = rate if reverse is None else reverse
            links.append(PlannedSiteLink((first, second), round_trip, rate, reverse_rate))
    return tuple(links)
