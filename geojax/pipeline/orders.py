"""The makers of every schedule's order: for ticks, and for stages that do not wait for each other.

A schedule is an entry of `geojax.pipeline.registry`, which describes it, and one here.
"""

import dataclasses
import functools
from collections.abc import Callable

from geojax.pipeline.generators import tick_orders
from geojax.pipeline.generators.interleaved import interleaved
from geojax.pipeline.generators.latency_hiding import latency_hiding
from geojax.pipeline.generators.tick_orders import TickRequest
from geojax.pipeline.generators.warmup import geopipe, gpipe, one_forward_one_backward
from geojax.pipeline.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2
from geojax.pipeline.generators.zero_bubble_v import zbv
from geojax.pipeline.schedule import MemoryLimit, Schedule
from geojax.pipeline.simulation.costs import Costs


@dataclasses.dataclass(frozen=True)
class EventRequest:
    """A pipeline whose stages begin an action as soon as its input has arrived."""

    stages_per_site: tuple[int, ...]
    microbatches: int
    costs: Costs
    """The seconds of one chunk a stage."""

    memory_limit: int | MemoryLimit
    """The most that a stage may hold, in microbatches or bytes; only schedules that can bend heed
    it."""

    virtual_stages: int
    """The chunks of a stage; only schedules that leave their number open heed it."""

    @property
    def stages(self) -> int:
        """The number of stages, over all sites."""
        return sum(self.stages_per_site)


@dataclasses.dataclass(frozen=True)
class OrderMakers:
    """The makers of a schedule's order."""

    in_ticks: Callable[[TickRequest], list[Schedule]]
    """The orders that may do well in lock-step; the fastest of them within the limit is taken."""

    by_events: Callable[[EventRequest], Schedule] | None
    """The order for stages that do not wait for each other; None: the order of the tick table."""


def _fixed(generator: Callable[[int, int], Schedule]) -> OrderMakers:
    """Enter an order of (stages, microbatches) that is the same by events and in ticks."""
    # The tables of one order differ in packings and hop ticks, and are made one after the other.
    made = functools.lru_cache(maxsize=1)(generator)
    return OrderMakers(
        lambda request: [made(request.placement.stages, request.microbatches)],
        lambda request: made(request.stages, request.microbatches),
    )


ORDERS = {
    "branch_free": OrderMakers(tick_orders.branch_free, None),
    "gpipe": _fixed(gpipe),
    "1f1b": OrderMakers(
        tick_orders.one_forward_one_backward,
        lambda request: one_forward_one_backward(request.stages, request.microbatches),
    ),
    "geopipe": OrderMakers(
        tick_orders.geopipe, lambda request: geopipe(request.microbatches, request.costs)
    ),
    "interleaved": OrderMakers(
        tick_orders.interleaved,
        lambda request: interleaved(
            request.stages_per_site, request.virtual_stages, request.microbatches
        ),
    ),
    "zero_bubble_h1": _fixed(zero_bubble_h1),
    "zero_bubble_h2": _fixed(zero_bubble_h2),
    "zbv": _fixed(zbv),
    "latency_hiding": OrderMakers(
        tick_orders.latency_hiding,
        lambda request: latency_hiding(request.microbatches, request.costs, request.memory_limit),
    ),
    "latency_hiding_split": OrderMakers(
        tick_orders.latency_hiding_split,
        lambda request: latency_hiding(
            request.microbatches, request.costs, request.memory_limit, split_backward=True
        ),
    ),
}
"""The makers of each schedule by its name."""
