"""All schedules on one pipeline, timed with stages on their own and with stages in lock-step."""

import dataclasses
import functools
from collections.abc import Callable
from fractions import Fraction

from geojax.errors import UserError
from geojax.pipeline.generators.interleaved import interleaved
from geojax.pipeline.generators.latency_hiding import latency_hiding
from geojax.pipeline.generators.tick_tables import best_tick_table, tick_table
from geojax.pipeline.generators.warmup import geopipe, gpipe, one_forward_one_backward
from geojax.pipeline.generators.zero_bubble import zero_bubble_h1, zero_bubble_h2
from geojax.pipeline.generators.zero_bubble_v import zbv
from geojax.pipeline.schedule import Placement, Schedule, TickTable
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step
from geojax.pipeline.simulation.simulator import simulate
from geojax.pipeline.simulation.staged_model import StagedModel
from geojax.pipeline.simulation.timeline import Timeline

_SPLIT = "split"


@dataclasses.dataclass(frozen=True)
class Entry:
    """One schedule."""

    event_driven: Timeline
    """Each stage begins what it can begin."""
    lock_step: Timeline | None
    """All stages wait for each other at every tick; None: it would hold more then."""

    @property
    def name(self) -> str:
        """What the table calls it."""
        return self.event_driven.schedule.name

    @property
    def held(self) -> Fraction:
        """The most that a stage has in flight, in microbatches of the whole stage."""
        placement = self.event_driven.schedule.placement
        return max(
            Fraction(pairs, len(placement.chunks_of(stage)))
            for stage, pairs in enumerate(self.event_driven.in_flight)
        )


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What all schedules make of one pipeline."""

    entries: tuple[Entry, ...]
    left_out: dict[str, str]
    """Schedules that this pipeline cannot have, and why."""

    def best(self, memory_limit: int, *, in_lock_step: bool) -> tuple[str, float] | None:
        """The name and the seconds of the fastest that holds at most so many microbatches; None:
        all hold more."""
        found = [
            (timeline.seconds, entry.name)
            for entry in self.entries
            for timeline in [entry.lock_step if in_lock_step else entry.event_driven]
            if timeline is not None and entry.held <= memory_limit
        ]
        return min(found)[::-1] if found else None


def compare(
    staged: StagedModel,
    microbatches: int,
    memory_limit: int,
    chunks_per_stage: int,
    hop_ticks: int | None = None,
) -> Comparison:
    """Generate and time all schedules.

    Args:
        staged: the pipeline.
        microbatches: of an iteration.
        memory_limit: the most microbatches that `latency_hiding` may keep on a stage; the others
            keep what they keep.
        chunks_per_stage: of the interleaved schedule.
        hop_ticks: of messages between sites in lock-step; None: what suits each schedule.

    Raises:
        UserError: the pipeline cannot be had at all (`StagedModel.costs`), or the limit is none.
    """
    stages, sites = staged.stages, [staged.stages_per_site] * len(staged.topology.sites)
    linear = staged.costs(Placement.linear(stages))
    hide = functools.partial(latency_hiding, microbatches, linear, memory_limit)
    makers: dict[str, Callable[[], Schedule]] = {
        "branch_free": lambda: (
            _table(
                "branch_free", Placement.linear(stages), microbatches, linear, None, hop_ticks
            ).schedule
        ),
        "gpipe": lambda: gpipe(stages, microbatches),
        "1f1b": lambda: one_forward_one_backward(stages, microbatches),
        "interleaved": lambda: interleaved(sites, chunks_per_stage, microbatches),
        "zero_bubble_h1": lambda: zero_bubble_h1(stages, microbatches),
        "zero_bubble_h2": lambda: zero_bubble_h2(stages, microbatches),
        "zbv": lambda: zbv(stages, microbatches),
        "geopipe": lambda: geopipe(microbatches, linear),
        "latency_hiding": hide,
        f"latency_hiding, {_SPLIT}": lambda: hide(split_backward=True),
    }
    entries, left_out = [], {}
    for name, make in makers.items():
        try:
            schedule = dataclasses.replace(make(), name=name)
            costs = staged.costs(schedule.placement)
            in_step = in_lock_step(schedule, costs, hop_ticks)
            entries.append(Entry(simulate(schedule, costs), in_step))
        except UserError as reason:  # of this schedule alone: the linear placement has its costs
            left_out[name] = str(reason)
    return Comparison(tuple(entries), left_out)


def in_lock_step(schedule: Schedule, costs: Costs, hop_ticks: int | None) -> Timeline | None:
    """What the executor of one program makes of a schedule's name, in the schedule's memory.

    None: in ticks the schedule holds more.
    """
    name, _, split = schedule.name.partition(", ")
    limit = max(schedule.in_flight)
    placement, microbatches = schedule.placement, schedule.microbatches
    try:
        table = _table(
            name, placement, microbatches, costs, limit, hop_ticks, split_backward=split == _SPLIT
        )
    except UserError:  # over the limit
        return None
    timeline = lock_step(table, costs)
    titled = dataclasses.replace(timeline.schedule, name=f"{schedule.name}, lock-step")
    return dataclasses.replace(timeline, schedule=titled)


def _table(
    name: str,
    placement: Placement,
    microbatches: int,
    costs: Costs,
    limit: int | None,
    hop_ticks: int | None,
    *,
    split_backward: bool = False,
) -> TickTable:
    if hop_ticks is None:
        return best_tick_table(
            name, placement, microbatches, costs, limit, split_backward=split_backward
        )
    of_hops = [1 if hop.link is None else hop_ticks for hop in costs.hops]
    return tick_table(
        name, placement, microbatches, of_hops, limit, costs=costs, split_backward=split_backward
    )
