"""Schedules for ticks of a forward and a backward: what each stage holds decides, tick by tick."""

import itertools
from collections.abc import Sequence

from geojax.errors import UserError
from geojax.pipeline.generators.interleaved import warmups_in_ticks, with_groups
from geojax.pipeline.schedule import Action, Kind, Placement, Schedule


def paired_greedy(
    microbatches: int, hop_ticks: Sequence[int], return_ticks: Sequence[int], limits: Sequence[int]
) -> Schedule:
    """In each tick a forward if one is there and memory allows, and a backward if one is there.

    One chunk a stage. `limits` has for each stage the most microbatches that it may hold; a forward
    comes before the backward of its tick, so that it must fit beside it.
    """
    stages = len(limits)
    forwards, backwards = [0] * stages, [0] * stages
    forward_tick: list[list[int]] = [[] for _ in range(stages)]
    backward_tick: list[list[int]] = [[] for _ in range(stages)]
    orders: list[list[Action]] = [[] for _ in range(stages)]
    tick = 0
    while backwards[0] < microbatches:
        for stage in range(stages):
            i = forwards[stage]
            there = i < microbatches and (
                stage == 0
                or (
                    i < len(forward_tick[stage - 1])
                    and forward_tick[stage - 1][i] + hop_ticks[stage - 1] <= tick
                )
            )
            if there and i - backwards[stage] < limits[stage]:
                orders[stage].append(Action(Kind.FORWARD, i, stage))
                forward_tick[stage].append(tick)
                forwards[stage] += 1
        for stage in reversed(range(stages)):
            i = backwards[stage]
            if stage == stages - 1:
                there = i < forwards[stage]
            else:
                there = (
                    i < len(backward_tick[stage + 1])
                    and backward_tick[stage + 1][i] + return_ticks[stage] <= tick
                )
            if there:
                orders[stage].append(Action(Kind.BACKWARD, i, stage))
                backward_tick[stage].append(tick)
                backwards[stage] += 1
        tick += 1
    return Schedule(
        "greedy", Placement.linear(stages), microbatches, False, tuple(map(tuple, orders))
    )


def paired_interleaved(
    placement: Placement, microbatches: int, hop_ticks: Sequence[int], *, turn: int = 0
) -> Schedule:
    """Interleaved, one forward and one backward of a chunk a tick, at full speed.

    A group is as large as a microbatch needs ticks to come round to its stage's next chunk, so that
    no stage waits for it; larger where the microbatches do not divide so. A stage begins its
    backwards in the tick in which the first one reaches it. At the last chunk a microbatch turns
    `turn` ticks after its forward.

    Raises:
        UserError: the placement is not that of `Placement.interleaved`, or a group would have to
            be larger than there are microbatches.
    """
    sites = sites_of(placement)
    chunks_per_stage = placement.chunks_per_stage
    first_chunk = [chunks_per_stage * count for count in itertools.accumulate([0, *sites[:-1]])]
    rounds = [
        sum(hop_ticks[chunk : chunk + count])
        for chunk, count in zip(first_chunk, sites, strict=True)
        if chunks_per_stage > 1
    ]
    least = max([*rounds, 1])
    groups = [size for size in range(least, microbatches + 1) if microbatches % size == 0]
    if not groups:
        raise UserError(
            f"{microbatches} microbatches are too few to interleave stages whose messages take "
            f"{least} ticks to come round: take {least} at least"
        )
    warmups = warmups_in_ticks(sites, chunks_per_stage, groups[0], hop_ticks)
    later = [warmup + turn for warmup in warmups]
    return with_groups(placement, microbatches, groups[0], later)


def sites_of(placement: Placement) -> tuple[int, ...]:
    """Return the stages per site of an interleaved placement.

    Raises:
        UserError: it is not that of `Placement.interleaved`.
    """
    chunks_per_stage = placement.chunks_per_stage
    sites: list[int] = []
    chunk = 0
    while chunk < placement.chunks:
        first = placement.stage_of[chunk]
        ring = itertools.takewhile(
            lambda entry: entry[1] == entry[0], enumerate(placement.stage_of[chunk:], first)
        )
        sites.append(len(list(ring)))
        chunk += sites[-1] * chunks_per_stage
    if placement != Placement.interleaved(sites, chunks_per_stage):
        raise UserError(
            f"chunks on the stages {', '.join(map(str, placement.stage_of))} are not interleaved: "
            "inside a site they are dealt out to its stages in turn, site after site"
        )
    return tuple(sites)
