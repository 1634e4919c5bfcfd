"""Every schedule by name: its order, its placement and one sentence about it.

A new schedule is an entry here and its generator. The config's validation, the executor's tick
tables, `geojax plan --schedules` and the benchmarks read this registry.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

from geojax.pipeline.generators import tick_orders
from geojax.pipeline.generators.interleaved import interleaved
from geojax.pipeline.generators.latency_hiding import latency_hiding
from geojax.pipeline.generators.tick_orders import TickRequest
from geojax.pipeline.generators.warmup import geopipe, gpipe, one_forward_one_backward
from geojax.pipeline.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2
from geojax.pipeline.generators.zero_bubble_v import zbv
from geojax.pipeline.schedule import MemoryLimit, Placement, Schedule
from geojax.pipeline.simulation.costs import Costs
from geojax.suggestions import entry_called


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
class ScheduleEntry:
    """One schedule."""

    name: str
    description: str
    """One sentence for help texts."""

    tick_orders: Callable[[TickRequest], list[Schedule]]
    """The orders that may do well in lock-step; the fastest of them within the limit is taken."""

    event_order: Callable[[EventRequest], Schedule] | None
    """The order for stages that do not wait for each other; None: the order of the tick table."""

    placement: Callable[[Sequence[int], int], Placement] = Placement.interleaved
    """The stage of each chunk, from the stages of each site and the chunks of a stage."""

    virtual_stages: int | None = 1
    """The chunks of a stage; None: any number."""

    split_backward: bool = False
    """The gradients of weights are actions of their own."""

    branch_free: bool = False
    """True if idle stages compute on unused data, so that the program needs no branches."""


def schedule_entry(name: str) -> ScheduleEntry:
    """Return the entry of the schedule `name`.

    Raises:
        UserError: there is none.
    """
    return entry_called(name, SCHEDULES, "schedule")


def schedules_with(virtual_stages: int) -> list[str]:
    """Return the names of the schedules that can have so many chunks a stage."""
    return [
        name for name, entry in SCHEDULES.items() if entry.virtual_stages in (None, virtual_stages)
    ]


def _vee(stages_per_site: Sequence[int], virtual_stages: int) -> Placement:
    return Placement.vee(sum(stages_per_site))


def _fixed(
    name: str,
    generator: Callable[[int, int], Schedule],
    description: str,
    *,
    placement: Callable[[Sequence[int], int], Placement] = Placement.interleaved,
    virtual_stages: int = 1,
    split_backward: bool = False,
) -> ScheduleEntry:
    """Enter an order of (stages, microbatches) that is the same by events and in ticks."""
    # The tables of one order differ in packings and hop ticks, and are made one after the other.
    made = functools.lru_cache(maxsize=1)(generator)
    return ScheduleEntry(
        name,
        description,
        tick_orders=lambda request: [made(request.placement.stages, request.microbatches)],
        event_order=lambda request: made(request.stages, request.microbatches),
        placement=placement,
        virtual_stages=virtual_stages,
        split_backward=split_backward,
    )


_ENTRIES = (
    ScheduleEntry(
        "branch_free",
        "Forwards, then both, then backwards: idle stages compute on unused data, in a "
        "program without branches, at twice the memory of 1f1b.",
        tick_orders=tick_orders.branch_free,
        event_order=None,
        branch_free=True,
    ),
    _fixed("gpipe", gpipe, "All forwards, then all backwards (Huang et al. 2019)."),
    ScheduleEntry(
        "1f1b",
        "One forward, one backward in turn: a stage holds at most as many microbatches as there "
        "are stages (Narayanan et al. 2021).",
        tick_orders=tick_orders.one_forward_one_backward,
        event_order=lambda request: one_forward_one_backward(request.stages, request.microbatches),
    ),
    ScheduleEntry(
        "geopipe",
        "1F1B after as many more forwards as the round trip over a slow cut takes (GeoPipe).",
        tick_orders=tick_orders.geopipe,
        event_order=lambda request: geopipe(request.microbatches, request.costs),
    ),
    ScheduleEntry(
        "interleaved",
        "Interleaved 1F1B with any number of virtual stages, which stay inside their site "
        "(Narayanan et al. 2021).",
        tick_orders=tick_orders.interleaved,
        event_order=lambda request: interleaved(
            request.stages_per_site, request.virtual_stages, request.microbatches
        ),
        virtual_stages=None,
    ),
    _fixed(
        "zero_bubble_h1",
        zero_bubble_h1,
        "ZB-H1: a third of the bubble of 1f1b in the same memory (Qi et al. 2024).",
        split_backward=True,
    ),
    _fixed(
        "zero_bubble_h2",
        zero_bubble_h2,
        "ZB-H2: no bubble between a stage's first and last action, at twice the memory of 1f1b "
        "(Qi et al. 2024).",
        split_backward=True,
    ),
    _fixed(
        "zbv",
        zbv,
        "ZB-V: two chunks a stage in a V, no bubble at the memory of 1f1b (Qi et al. 2024).",
        placement=_vee,
        virtual_stages=2,
        split_backward=True,
    ),
    ScheduleEntry(
        "latency_hiding",
        "The fastest order that the simulator finds within the memory limit.",
        tick_orders=tick_orders.latency_hiding,
        event_order=lambda request: latency_hiding(
            request.microbatches, request.costs, request.memory_limit
        ),
    ),
    ScheduleEntry(
        "latency_hiding_split",
        "The same with split backwards; by events, only where these are faster.",
        tick_orders=tick_orders.latency_hiding_split,
        event_order=lambda request: latency_hiding(
            request.microbatches, request.costs, request.memory_limit, split_backward=True
        ),
        split_backward=True,
    ),
)

SCHEDULES = {entry.name: entry for entry in _ENTRIES}
"""All schedules by name, in the order in which tables show them."""
