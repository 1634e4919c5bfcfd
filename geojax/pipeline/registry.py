"""Every schedule by name: its placement, what it needs, and one sentence about it.

A new schedule is an entry here, its generator, and its makers in `geojax.pipeline.orders`. The
config's validation, the executor and the commands read this registry.
"""

import dataclasses
from collections.abc import Callable, Sequence

from geojax.pipeline.schedule import Placement
from geojax.suggestions import entry_called


@dataclasses.dataclass(frozen=True)
class ScheduleEntry:
    """One schedule."""

    name: str
    description: str
    """One sentence for help texts."""

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


_ENTRIES = (
    ScheduleEntry(
        "branch_free",
        "Forwards, then both, then backwards: idle stages compute on unused data, in a "
        "program without branches, at twice the memory of 1f1b.",
        branch_free=True,
    ),
    ScheduleEntry("gpipe", "All forwards, then all backwards (Huang et al. 2019)."),
    ScheduleEntry(
        "1f1b",
        "One forward, one backward in turn: a stage holds at most as many microbatches as there "
        "are stages (Narayanan et al. 2021).",
    ),
    ScheduleEntry(
        "geopipe",
        "1F1B after as many more forwards as the round trip over a slow cut takes (GeoPipe).",
    ),
    ScheduleEntry(
        "interleaved",
        "Interleaved 1F1B with any number of virtual stages, which stay inside their site "
        "(Narayanan et al. 2021).",
        virtual_stages=None,
    ),
    ScheduleEntry(
        "zero_bubble_h1",
        "ZB-H1: a third of the bubble of 1f1b in the same memory (Qi et al. 2024).",
        split_backward=True,
    ),
    ScheduleEntry(
        "zero_bubble_h2",
        "ZB-H2: no bubble between a stage's first and last action, at twice the memory of 1f1b "
        "(Qi et al. 2024).",
        split_backward=True,
    ),
    ScheduleEntry(
        "zbv",
        "ZB-V: two chunks a stage in a V, no bubble at the memory of 1f1b (Qi et al. 2024).",
        placement=_vee,
        virtual_stages=2,
        split_backward=True,
    ),
    ScheduleEntry(
        "latency_hiding",
        "The fastest order that the simulator finds within the memory limit.",
    ),
    ScheduleEntry(
        "latency_hiding_split",
        "The same with split backwards; by events, only where these are faster.",
        split_backward=True,
    ),
)

SCHEDULES = {entry.name: entry for entry in _ENTRIES}
"""All schedules by name, in the order in which tables show them."""
