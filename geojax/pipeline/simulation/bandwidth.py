"""The bandwidth point: how much bandwidth between sites a pipeline can make use of.

A microbatch whose transfer lasts longer than its busiest stage works makes the link the slowest
stage. Shorter transfers add to the time that a microbatch is under way, which costs nothing as long
as enough microbatches may be in flight. R is the residence (all forwards, backwards and hops of a
microbatch), M the limit, and c the busiest stage's work. A steady pipeline then takes

    max(c, transfer, R / M)

a microbatch (Little's law; "delta N is at most what memory allows" is R <= M c). The bandwidth
point is the smallest bandwidth beyond which that gets no better. Real orders come near to it, in
steps: a stage that has to wait waits for a whole forward or backward.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence

import numpy as np

from geojax.pipeline.generators.latency_hiding import latency_hiding
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.simulator import iteration_seconds

TOLERANCE = 0.02
"""A period that is longer by this share at most counts as no worse."""
_HALVINGS = 5
_LIMITS, _BANDWIDTHS, _RANGE = 6, 13, 256.0


@dataclasses.dataclass(frozen=True)
class BandwidthPoint:
    """The smallest bandwidths whose period is within the tolerance of that without any limit."""

    memory_limit: int
    """The most microbatches that a stage may have in flight."""
    simulated: float
    """Bytes per second, of schedules that were generated and simulated; inf: more always helps."""
    closed_form: float
    """Bytes per second, by the formula."""


@dataclasses.dataclass(frozen=True)
class BandwidthSweep:
    """The steady period by bandwidth and memory limit."""

    bandwidths: tuple[float, ...]
    """Bytes per second, rising."""
    memory_limits: tuple[int, ...]
    periods: np.ndarray
    """[memory limit, bandwidth]: seconds a microbatch."""
    work: float
    """Seconds that the busiest stage works on a microbatch: the best period."""
    points: tuple[BandwidthPoint, ...]
    """The bandwidth point of each memory limit."""


def with_bandwidth(costs: Costs, hop_bytes: float, bytes_per_second: float) -> Costs:
    """Return the costs with that bandwidth on every link between sites."""
    transfer = hop_bytes / bytes_per_second
    hops = tuple(
        hop if hop.link is None else dataclasses.replace(hop, transfer=transfer)
        for hop in costs.hops
    )
    return dataclasses.replace(costs, hops=hops)


def steady_period(costs: Costs, memory_limit: int) -> float:
    """Seconds that one more microbatch takes, under the best schedule within the limit."""
    few = len(costs.forward) + 2 * memory_limit
    first, second = (
        iteration_seconds(latency_hiding(count, costs, memory_limit), costs)
        for count in (few, 2 * few)
    )
    return (second - first) / few


def closed_form(
    costs: Costs, hop_bytes: float, memory_limit: int, tolerance: float = TOLERANCE
) -> float:
    """Compute the bandwidth point of a pipeline of one chunk a stage by the formula above."""
    free = with_bandwidth(costs, hop_bytes, math.inf)
    cuts = sum(hop.link is not None for hop in costs.hops)
    residence = sum(costs.work) + 2 * sum(hop.seconds for hop in free.hops)
    longest = (1 + tolerance) * max(*costs.work, residence / memory_limit)
    transfer = min(longest, (memory_limit * longest - residence) / (2 * cuts))
    return hop_bytes / transfer if transfer > 0 else math.inf


def sweep(
    costs: Costs,
    hop_bytes: float,
    bandwidths: Sequence[float],
    memory_limits: Sequence[int],
) -> BandwidthSweep:
    """Periods over bandwidth x memory limit, and the bandwidth point of each limit.

    Args:
        costs: of a pipeline of one chunk a stage that crosses between sites; the bandwidths of its
            links do not matter.
        hop_bytes: what crosses a link for each microbatch.
        bandwidths: bytes per second, rising; points are looked for between them.
        memory_limits: the most microbatches that a stage may have in flight, rising.
    """
    rates = (*bandwidths, math.inf)
    found = np.array(
        [[_period_at(costs, hop_bytes, limit, rate) for rate in rates] for limit in memory_limits]
    )
    # What was found for less memory or bandwidth can be had with more, too.
    periods = np.minimum.accumulate(np.minimum.accumulate(found, axis=0), axis=1)
    points = []
    for limit, row in zip(memory_limits, periods, strict=True):
        longest = (1 + TOLERANCE) * row[-1]
        period = functools.partial(_period_at, costs, hop_bytes, limit)
        simulated = _least_enough(period, longest, rates, int(np.argmax(row <= longest)))
        formula = closed_form(costs, hop_bytes, limit)
        points.append(BandwidthPoint(limit, simulated, formula))
    return BandwidthSweep(
        tuple(bandwidths),
        tuple(memory_limits),
        periods[:, :-1],
        max(costs.work),
        tuple(points),
    )


def _period_at(costs: Costs, hop_bytes: float, limit: int, bandwidth: float) -> float:
    return steady_period(with_bandwidth(costs, hop_bytes, bandwidth), limit)


def _least_enough(
    period: Callable[[float], float], longest: float, rates: Sequence[float], enough: int
) -> float:
    """Find the smallest bandwidth whose period is not too long, at most `rates[enough]`."""
    if enough == 0 or rates[enough] == math.inf:
        return rates[enough]
    too_low, high = rates[enough - 1], rates[enough]
    for _ in range(_HALVINGS):
        middle = math.sqrt(too_low * high)
        if period(middle) <= longest:
            high = middle
        else:
            too_low = middle
    return high


def sweep_around(costs: Costs, hop_bytes: float, memory_limit: int) -> BandwidthSweep:
    """Sweep from half of 1F1B's memory to what hides all latencies, and from a link that is the
    slowest by far to one that hardly matters."""
    stages, work = len(costs.forward), max(costs.work)
    latencies = 2 * sum(hop.latency for hop in costs.hops if hop.link is not None)
    enough = stages + math.ceil(latencies / work) + 2
    low, high = min(max(1, stages // 2), memory_limit), max(enough, memory_limit)
    limits = sorted({*(round(each) for each in np.linspace(low, high, _LIMITS)), memory_limit})
    slowest = hop_bytes / (4 * work)
    bandwidths = slowest * np.geomspace(1, _RANGE, _BANDWIDTHS)
    return sweep(costs, hop_bytes, [float(each) for each in bandwidths], limits)
