"""Derivatives of a step by its resources, and its time with other links.

    share of a resource    d log(step time) / d log(1 / resource)

so that a share of 0.6 for compute says that accelerators of 1% more FLOP/s save 0.6% of the step.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from geojax.accelerators import Accelerator
from geojax.layout_names import DcRole
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.prediction import Prediction
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.search import search
from geojax.topology import Link, Site, SiteLink, Topology

LayoutTimer = Callable[[LayoutCandidate, Topology], Prediction]
"""Predicts the step of a layout on a topology."""

BETTER = 1.1
"""Factor by which a resource is better where a derivative is taken."""

SWEPT = tuple(10 ** (exponent / 4) for exponent in range(-8, 5))
"""Factors of a link's bandwidth or round trip in a sweep: a hundredth to ten times."""


class Gain(NamedTuple):
    """Time of a step that a better resource saves."""

    resource: str
    """Resource that is `BETTER` times as good."""
    seconds: float
    """Seconds that a step is shorter."""
    share: float
    """Derivative of the step's time by the resource, both in logarithms."""


def gains(layout: LayoutCandidate, topology: Topology, timer: LayoutTimer) -> list[Gain]:
    """Return what each resource saves if it is `BETTER` times as good, the most first.

    Args:
        layout: the layout that is kept.
        topology: the sites and links as they are.
        timer: predicts its step.
    """
    now = timer(layout, topology).step_seconds
    found = []
    for resource, better in _better(topology).items():
        then = timer(layout, better).step_seconds
        found.append(Gain(resource, now - then, math.log(now / then) / math.log(BETTER)))
    return sorted(found, key=lambda gain: -gain.seconds)


def memory_gain(
    request: PlanRequest, seconds: float, timer: LayoutTimer, calibration: Calibration
) -> Gain:
    """Return what the fastest layout saves if accelerators have `BETTER` times the memory.

    Args:
        request: what is asked for.
        seconds: time of its fastest layout.
        timer: predicts the step of a layout.
        calibration: what accelerators and networks reach of their published rates.
    """
    larger = dataclasses.replace(request, memory_factor=BETTER * request.memory_factor)
    found = search(larger, lambda each: timer(each, request.topology), calibration, keep=1)
    then = min(seconds, found.best[0].seconds)
    return Gain("memory", seconds - then, math.log(seconds / then) / math.log(BETTER))


def _better(topology: Topology) -> Mapping[str, Topology]:
    """Return the topology with each of its resources `BETTER` times as good."""

    def sites(change: Callable[[Site], Site]) -> Topology:
        return topology.model_copy(update={"sites": tuple(map(change, topology.sites))})

    def faster(accelerator: Accelerator) -> Accelerator:
        peaks = {name: BETTER * peak for name, peak in accelerator.peak_flops_per_second.items()}
        return accelerator.model_copy(update={"peak_flops_per_second": peaks})

    def memory(accelerator: Accelerator) -> Accelerator:
        rate = accelerator.memory_bytes_per_second
        return accelerator.model_copy(update={"memory_bytes_per_second": rate and BETTER * rate})

    def network(name: str) -> Callable[[Site], Site]:
        return lambda site: site.model_copy(update={name: _wider(getattr(site, name))})

    found = {
        "compute": sites(lambda s: s.model_copy(update={"accelerator": faster(s.accelerator)})),
        "memory bandwidth": sites(
            lambda s: s.model_copy(update={"accelerator": memory(s.accelerator)})
        ),
        "network inside hosts": sites(network("inside_host")),
        "network between hosts": sites(network("between_hosts")),
    }
    if topology.links:
        found["link bandwidth"] = with_links(topology, bandwidth=BETTER)
        found["link latency"] = with_links(topology, round_trip=1 / BETTER)
    return found


def _wider(link: Link | None) -> Link | None:
    if link is None:
        return None
    return link.model_copy(update={"bytes_per_second": BETTER * link.bytes_per_second})


def with_links(topology: Topology, *, bandwidth: float = 1.0, round_trip: float = 1.0) -> Topology:
    """Return the topology with the bandwidth and the round trip of its links multiplied."""

    def changed(link: SiteLink) -> SiteLink:
        reverse = link.reverse_bytes_per_second
        return link.model_copy(
            update={
                "bytes_per_second": bandwidth * link.bytes_per_second,
                "reverse_bytes_per_second": reverse and bandwidth * reverse,
                "round_trip_seconds": round_trip * link.round_trip_seconds,
            }
        )

    return topology.model_copy(update={"links": tuple(map(changed, topology.links))})


@dataclasses.dataclass(frozen=True)
class Sweep:
    """Step times of each role over one property of the links."""

    quantity: str
    """Property of the links: "bandwidth" or "round trip"."""
    now: float
    """Its value in the topology, of the first link: bytes per second, or seconds."""
    values: tuple[float, ...]
    """Its values, ascending."""
    seconds: Mapping[DcRole, tuple[float, ...]]
    """Step time of each role's fastest layout at each value."""

    @property
    def crossings(self) -> tuple[float, ...]:
        """Values at which another role becomes the fastest."""
        if len(self.seconds) < 2:
            return ()
        first, second = self.seconds.values()
        ahead = [math.log(a / b) for a, b in zip(first, second, strict=True)]
        found = []
        for index, (before, after) in enumerate(itertools.pairwise(ahead)):
            if before * after < 0:
                low, high = self.values[index : index + 2]
                found.append(low * (high / low) ** (before / (before - after)))
        return tuple(found)


def sweeps(
    layouts: Mapping[DcRole, Sequence[LayoutCandidate]], topology: Topology, timer: LayoutTimer
) -> tuple[Sweep, Sweep]:
    """Time the layouts of each role over the links' bandwidth and over their round trip.

    Args:
        layouts: layouts of each role, of which the fastest counts at every value.
        topology: sites joined by links.
        timer: predicts the step of a layout.
    """
    link = topology.links[0]

    def fastest(tried: Iterable[LayoutCandidate], changed: Topology) -> float:
        return min(timer(layout, changed).step_seconds for layout in tried)

    def swept(name: str, now: float, change: Callable[[float], Topology]) -> Sweep:
        changed = [change(factor) for factor in SWEPT]
        seconds = {
            role: tuple(fastest(own, each) for each in changed) for role, own in layouts.items()
        }
        return Sweep(name, now, tuple(factor * now for factor in SWEPT), seconds)

    return (
        swept("bandwidth", link.bytes_per_second, lambda f: with_links(topology, bandwidth=f)),
        swept("round trip", link.round_trip_seconds, lambda f: with_links(topology, round_trip=f)),
    )
