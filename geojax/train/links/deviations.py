"""Measured times beside the plan: what deviates, by what term, and whether a link has changed.

A window is some steps of a run. Its figures and the expected ones are `StepFigures`, plain data, of
which all that follows is a function:

    deviations        names each term that is off, and what that tells: a link, a site that is late,
                      slower compute, or a step of which no term is known
    changed_links     the links that were off in each of the last `WINDOWS` windows
    with_links        the topology with what was measured of them, to plan anew for

A link is held to what the topology says of it, the rest to the run's own first window: a predicted
step has an error of its own.
"""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple

from geojax.quantities import quantity
from geojax.topology import SiteLink, Topology

WINDOWS = 3
"""Windows in a row in which a link is off before it counts as changed."""

STEP_TOLERANCE = 0.1
"""Share by which a step's time, or a part of it, may differ."""

ROUND_TRIP_TOLERANCE = 0.25
"""Share by which a round trip may differ."""

ROUND_TRIP_SECONDS = 2e-3
"""Time by which a round trip may differ in any case: of processes that are busy."""

RATE_TOLERANCE = 0.5
"""Share by which a link's rate may differ: TCP, its headers and busy hosts take a part of what is
described."""


@dataclasses.dataclass(frozen=True)
class LinkFigures:
    """The link to another site; None: not known."""

    round_trip_seconds: float | None = None
    bytes_per_second: float | None = None
    """Rate towards the other site."""
    wait_seconds: Mapping[str, float] | None = None
    """Time of a step in which the site's devices wait for the other one and have nothing to do, by
    cause."""

    @property
    def waited(self) -> float | None:
        """Sum of the waits; None: not known."""
        return None if self.wait_seconds is None else sum(self.wait_seconds.values())


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """A step as one site sees it."""

    step_seconds: float | None
    links: Mapping[str, LinkFigures] = dataclasses.field(default_factory=dict)
    """The link to each other site, by its name."""

    @property
    def compute_seconds(self) -> float | None:
        """Time of a step in which the site waits for no other; None: not known."""
        waits = [link.waited for link in self.links.values()]
        known = [wait for wait in waits if wait is not None]
        if self.step_seconds is None or not known or len(known) < len(waits):
            return None
        return self.step_seconds - sum(known)


class LinkRequest(NamedTuple):
    """Request of a process for a new plan."""

    changed: Mapping[str, LinkFigures] = MappingProxyType({})
    """Links to other sites that were off in the last windows, and what they are."""
    unexplained: bool = False
    """True if steps were off in the last windows, and nothing tells whether a link is why."""

    @property
    def is_one(self) -> bool:
        """True if it asks for anything."""
        return bool(self.changed) or self.unexplained


class Deviation(NamedTuple):
    """A term that is not as expected."""

    kind: Literal["link", "late site", "compute", "step"]
    site: str | None
    """The other site of a link, or the one that is late."""
    text: str
    """Sentence with what was measured, what was expected, and what that tells."""


def deviations(expected: StepFigures, measured: StepFigures) -> list[Deviation]:
    """List the terms of a window that are not as expected, slower or faster."""
    found = [
        deviation
        for site, link in measured.links.items()
        for deviation in _of_link(site, expected.links.get(site, LinkFigures()), link)
    ]
    changed = {deviation.site for deviation in found}
    if measured.compute_seconds is None:
        found += _of_step(expected, measured, explained=bool(changed))
        return found
    found += _of_compute(expected.compute_seconds, measured.compute_seconds)
    for site, link in measured.links.items():
        if site not in changed and (late := _lateness(site, expected, measured, link)):
            found.append(late)
    return found


def _of_link(site: str, expected: LinkFigures, measured: LinkFigures) -> list[Deviation]:
    found = []
    planned, trip = expected.round_trip_seconds, measured.round_trip_seconds
    if planned is not None and trip is not None:
        allowed = max(ROUND_TRIP_TOLERANCE * planned, ROUND_TRIP_SECONDS)
        if abs(trip - planned) > allowed:
            text = (
                f"link to {site}: round trip {trip * 1e3:.3g} ms, planned {planned * 1e3:.3g} ms: "
                f"{'a slower' if trip > planned else 'a faster'} link"
            )
            found.append(Deviation("link", site, text))
    planned, rate = expected.bytes_per_second, measured.bytes_per_second
    if planned is not None and rate is not None and _off(rate, planned, RATE_TOLERANCE):
        text = (
            f"link to {site}: {quantity(8 * rate, 'bit/s')}, planned "
            f"{quantity(8 * planned, 'bit/s')}: {'a slower' if rate < planned else 'a faster'} link"
        )
        found.append(Deviation("link", site, text))
    return found


def _of_step(expected: StepFigures, measured: StepFigures, *, explained: bool) -> list[Deviation]:
    """Compare the time of a step whose parts are not known."""
    planned, seconds = expected.step_seconds, measured.step_seconds
    if planned is None or seconds is None or not _off(seconds, planned, STEP_TOLERANCE):
        return []
    why = "the link" if explained else "a link of another rate, a straggler or slower kernels"
    text = f"step {seconds:.3g} s, expected {planned:.3g} s: {why}"
    return [Deviation("step", None, text)]


def _of_compute(planned: float | None, seconds: float) -> list[Deviation]:
    if planned is None or not _off(seconds, planned, STEP_TOLERANCE):
        return []
    why = "a slower kernel or device here" if seconds > planned else "faster kernels here"
    text = f"compute of a step {seconds:.3g} s, expected {planned:.3g} s: {why}"
    return [Deviation("compute", None, text)]


def _lateness(
    site: str, expected: StepFigures, measured: StepFigures, link: LinkFigures
) -> Deviation | None:
    """Compare the waits for a site whose link is as it should be."""
    planned = expected.links.get(site, LinkFigures()).waited
    if link.wait_seconds is None or link.waited is None or planned is None:
        return None
    if measured.step_seconds is None or expected.step_seconds is None:
        return None
    longer = link.waited - planned
    if longer <= STEP_TOLERANCE * expected.step_seconds:
        return None
    cause, _ = max(link.wait_seconds.items(), key=lambda item: item[1])
    text = (
        f"waits {link.waited * 1e3:.3g} ms a step for {site}, most of it for '{cause}', expected "
        f"{planned * 1e3:.3g} ms: {site} is late (a straggler), or its link back is slower"
    )
    return Deviation("late site", site, text)


def _off(value: float, expected: float, tolerance: float) -> bool:
    """Return True if a value is larger or smaller by more than a share, either way the same."""
    return not 1 / (1 + tolerance) <= value / expected <= 1 + tolerance


def changed_links(
    expected: StepFigures, windows: Sequence[StepFigures]
) -> Mapping[str, LinkFigures]:
    """Return the medians of the last windows for each link that was off in all of them."""
    last = windows[-WINDOWS:]
    if len(last) < WINDOWS:
        return {}
    off = [
        {each.site for each in deviations(expected, window) if each.kind == "link"}
        for window in last
    ]
    return {
        site: LinkFigures(
            _median([window.links[site].round_trip_seconds for window in last]),
            _median([window.links[site].bytes_per_second for window in last]),
        )
        for site in windows[-1].links
        if all(site in sites for sites in off)
    }


def is_unexplained(expected: StepFigures, windows: Sequence[StepFigures]) -> bool:
    """Return True if the step was off in all of the last windows, and nothing tells why."""
    last = windows[-WINDOWS:]
    return len(last) == WINDOWS and all(
        any(each.kind == "step" for each in deviations(expected, window)) for window in last
    )


def with_links(topology: Topology, measured: Mapping[tuple[str, str], LinkFigures]) -> Topology:
    """Return a topology with links as they were measured.

    Args:
        topology: describes the links.
        measured: by the names of sender and receiver; what is None or missing stays.
    """

    def changed(link: SiteLink) -> SiteLink:
        first, second = link.sites
        there = measured.get((first, second), LinkFigures())
        back = measured.get((second, first), LinkFigures())
        trips = [
            trip for trip in (there.round_trip_seconds, back.round_trip_seconds) if trip is not None
        ]
        forwards, backwards = (link.towards(site).bytes_per_second for site in (second, first))
        return SiteLink(
            sites=link.sites,
            round_trip_seconds=min(trips, default=link.round_trip_seconds),
            bytes_per_second=there.bytes_per_second or forwards,
            reverse_bytes_per_second=back.bytes_per_second or backwards,
        )

    return topology.model_copy(update={"links": tuple(map(changed, topology.links))})


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None and math.isfinite(value)]
    return statistics.median(known) if known else None
