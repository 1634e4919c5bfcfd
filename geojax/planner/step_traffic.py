"""The bytes that a training step sends over each mesh axis, counted in its traced program.

A program with branches shows the most that it can send (`geojax.planner.program_traffic`). Two
kinds of branches hold collectives:

    ticks     a stage without work skips the chunk's; the first stage alone embeds, and the last
              alone runs the head unless stages share them (`stage_bytes` counts what a stage runs)
    experts   further exchanges, for tokens of experts that are busier than others
              (`evenly_sent` leaves them out)
"""

import dataclasses
import itertools
from collections.abc import Sequence
from fractions import Fraction

import jax

from geojax.hlo import Collective, Traffic
from geojax.pipeline.execution.tick_program import (
    FULL_TICKS,
    NOTHING,
    SCOPE_OF,
    TickForm,
    TickProgram,
)
from geojax.pipeline.schedule import Kind
from geojax.planner.passes import longest_loop
from geojax.planner.program_traffic import program_traffic
from geojax.planner.traffic.by_axes import Axes
from geojax.step.plan import StepPlan

_LAYERS = frozenset(("forward_layers", "backward_layers"))
"""Scopes of all layers of a chunk."""


def step_traffic(program: jax.stages.Traced, plan: StepPlan) -> Traffic:
    """List the collectives of a step, from `geojax.step.program.trace_step`."""
    return program_traffic(program, plan.mesh, longest_loop=longest_loop(plan))


def evenly_sent(traffic: Traffic) -> dict[Axes, Fraction]:
    """Return the bytes of a device whose tokens go to equally busy experts, by axes."""
    kept = (each for each in traffic.collectives if "cond" not in _scopes(each)[1])
    none = dict.fromkeys(traffic.by_axes, Fraction(0))
    return none | Traffic(traffic.mesh, tuple(kept)).by_axes


def stage_bytes(traffic: Traffic, plan: StepPlan) -> tuple[dict[Axes, Fraction], ...]:
    """Return the bytes of a device of each stage by the table of ticks, by axes.

    Messages between stages travel in every tick; of hops a sender's count.
    """
    program = plan.program

    def of_stage(stage: int) -> dict[Axes, Fraction]:
        sent: dict[Axes, Fraction] = {}
        for each in traffic.collectives:
            share = _share(each, stage, program)
            sent[each.axes] = sent.get(each.axes, Fraction(0)) + share * each.bytes_sent
        return {axes: count for axes, count in sent.items() if count}

    return tuple(map(of_stage, range(program.ticks.schedule.placement.stages)))


def by_ticks(traffic: Traffic, plan: StepPlan) -> Traffic:
    """Return the collectives of a pipeline's program with the share that stages run, in the mean.

    `traffic` may be that of the compiled program: compilers keep the scopes.
    """
    program = plan.tick_program
    if program is None:
        return traffic
    stages = program.ticks.schedule.placement.stages

    def weighed(each: Collective) -> Collective:
        shares = [_share(each, stage, program) for stage in range(stages)]
        return dataclasses.replace(each, share=sum(shares, Fraction(0)) / stages)

    return Traffic(traffic.mesh, tuple(map(weighed, traffic.collectives)))


def _share(collective: Collective, stage: int, program: TickProgram) -> Fraction:
    """Return the part of a collective's executions that `stage` runs."""
    scopes, _ = _scopes(collective)
    if "cond" not in scopes:
        return Fraction(1)
    schedule, columns = program.ticks.schedule, program.columns
    kind = next((each for each in schedule.kinds if SCOPE_OF[each] in scopes), Kind.BACKWARD)
    full, shared_head = FULL_TICKS in scopes, "head" in scopes and program.shares_head
    runs = columns[f"{kind.value}.microbatch"][:, stage] != NOTHING
    shared_embedding = "embedding" in scopes and program.shares_embedding
    if shared_head:
        runs = columns["head.microbatch"][:, stage] != NOTHING
    elif shared_embedding:
        runs = columns[f"embedding.{kind.value}"][:, stage] != NOTHING
    elif "head" in scopes:
        runs = columns[f"{kind.value}.last"][:, stage] == 1
    elif "embedding" in scopes:
        runs = columns[f"{kind.value}.first"][:, stage] == 1

    def has(form: TickForm) -> bool:
        if shared_head:
            return form.head
        return kind in (form.embeds if shared_embedding else form.kinds)

    held = [
        tick
        for segment in program.segments
        for tick, form in segment.ticks()
        if form.full == full and has(form)
    ]
    # A compiler may put into a branch what was traced in none.
    return Fraction(int(runs[held].sum()), len(held)) if held else Fraction(1)


def _scopes(collective: Collective) -> tuple[Sequence[str], Sequence[str]]:
    """Return the scopes of a collective before those of all layers, and from there on."""
    scopes = collective.scopes
    before = list(itertools.takewhile(lambda scope: scope not in _LAYERS, scopes))
    return before, scopes[len(before) :]
