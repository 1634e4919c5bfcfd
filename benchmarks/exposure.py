"""The exposed part of the sum over sites in the published layout, by bandwidth and format.

    python benchmarks/exposure.py

Nemotron-4 340B on two sites of 1,536 H100: PP 12, TP 8, DP 16 in each, 21 ms round trip, 8 chunks
a stage, as NVIDIA ran it. Predicted by `geojax.planner.buckets`, a step by its FLOPs:

    exposed     the seconds of messages beyond the backwards that they travel beside
    causal      the least that any messages expose that leave one after the other. No part leaves
                before it is whole, and each message takes a round trip besides its bytes
    overlapped  the causal bound if round trips of other messages cost nothing, as with two messages
                in flight. XLA for GPUs has one sum over the sites in flight
    of bytes    max(0, bytes / bandwidth - window): the overlapped bound of the first part alone, as
                if all others were whole with it, at no latency

Sums in the site take no time, and none is beside ticks (`overlap_scatter: false`): a part would
leave later.

A second table has longer round trips: a message for each chunk, and as many chunks in a message as
the planner chooses.

A goal that is missed is named, and the exit code is 1: whatever the bandwidth and the format, at
most a tenth more than the causal bound is exposed. The bound is seconds, and no share of a step: it
is a larger share of a shorter step.
"""

import dataclasses
import itertools
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from geojax.collectives.wire_format import wire_format
from geojax.config.run_config import RunConfig
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.buckets import ComputeTimes, LinkShare, choose_buckets, predict_exposure
from geojax.planner.resolve.choices import resolved_plan
from geojax.planner.resolve.run_prediction import compute_times_of_run
from geojax.planner.traffic.gradients import EarlyMessage, GradientMessages
from geojax.step.plan import StepPlan

CONFIG = Path(__file__).parents[1] / "configs" / "nemotron4-340b-2x1536.yaml"
TERABITS = (0.4, 0.8, 1.6, 3.2, 6.4)
FORMATS = {"fp32": "none", "bf16": "bf16", "int8": "int8"}
H100_PEAK = 989e12
USUAL = "bf16", 3.2
"""The format and the Tbit/s of the second table."""
ROUND_TRIPS = 0.021, 0.07, 0.15
CAUSAL_FACTOR = 1.1


class Bounds(NamedTuple):
    """Seconds of a step that nothing can hide, by three sets of assumptions."""

    causal: float
    overlapped: float
    of_bytes: float


class Exposed(NamedTuple):
    """Seconds of a step that nothing hides, and what they are compared with."""

    seconds: float
    bounds: Bounds
    chunks: int
    """Chunks of a stage that leave together."""


def causal_bound(parts: Sequence[EarlyMessage], link: LinkShare, tick_seconds: float) -> float:
    """Return the least time after the last backward in which all parts can have crossed.

    Messages leave one after the other, and each takes a round trip. Any message may carry any whole
    parts, or pieces of them, and may wait. Some best plan sends neighboring parts together, each
    message as soon as its last part is whole and the link is free:

    - A message that waits loses nothing by taking all that is whole by then: it saves its followers
      as many seconds as it takes longer, and adds no message.
    - An earlier end of some parts never makes the end of later ones later.

    So the earliest end of the first n parts is the best over all last messages, each of which
    leaves at the earliest end of the parts before.

    Args:
        parts: the smallest parts, in the order in which they are whole; the last one with 0 ticks.
        link: a device's share of the link.
        tick_seconds: the time of a tick.
    """
    left = list(itertools.accumulate(part.ticks for part in reversed(parts)))[::-1]
    ends = [-math.inf]
    for last, ticks in enumerate(left):
        whole, size, end = -ticks * tick_seconds, 0.0, math.inf
        for first in range(last, -1, -1):
            size += parts[first].bytes
            end = min(end, max(ends[first], whole) + link.seconds(size))
        ends.append(end)
    return ends[-1]


def bounds(messages: GradientMessages, link: LinkShare, tick_seconds: float) -> Bounds:
    """Return what no order of the messages' bytes can beat.

    Args:
        messages: each the smallest part that can leave.
        link: a device's share of the link.
        tick_seconds: the time of a tick.
    """
    parts = [*messages.early, EarlyMessage(sum(messages.after_backward), 0)]
    to_send = list(itertools.accumulate(part.bytes for part in reversed(parts)))
    left = list(itertools.accumulate(part.ticks for part in reversed(parts)))
    late = [
        size / link.bytes_per_second - count * tick_seconds
        for size, count in zip(to_send, left, strict=True)
    ]
    causal = causal_bound(parts, link, tick_seconds)
    return Bounds(causal, max(late) + link.seconds(0), max(0.0, late[-1]))


def exposed(
    config: RunConfig,
    plan: StepPlan,
    times: ComputeTimes,
    link: LinkShare,
    auto: Sequence[str] = ("bucket_bytes", "bucket_layers"),
) -> Exposed:
    choice = choose_buckets(config.model, plan, link, times, 80 * 10**9, auto)
    smallest = dataclasses.replace(choice.plan, bucket_layers=1)
    parts = predict_exposure(config.model, smallest, link, times).messages
    assert plan.staged_layers is not None
    layers = plan.staged_layers.max_layers_per_chunk
    limits = bounds(parts, link, layers * times.layer_backward)
    return Exposed(choice.exposure.seconds, limits, choice.plan.bucket_layers // layers)


def by_round_trip(config: RunConfig, plan: StepPlan, times: ComputeTimes) -> Table:
    """Return what chunks expose that leave alone or together, for the usual format and link."""
    table = Table("round trip", "a chunk a message", "chosen", "chunks a message", "causal")
    name, terabits = USUAL
    plan = dataclasses.replace(plan, wire_format=wire_format(FORMATS[name]))
    for seconds in ROUND_TRIPS:
        link = LinkShare("a-b", seconds, terabits * 1e12 / 8, plan.mesh.size // 2)
        chosen = exposed(config, plan, times, link)
        alone = exposed(config, plan, times, link, auto=["bucket_bytes"])
        figures = (alone.seconds, chosen.seconds, chosen.bounds.causal)
        before, after, causal = (f"{figure:.2f}" for figure in figures)
        table.add_row(f"{seconds * 1e3:g} ms", before, after, str(chosen.chunks), causal)
    return table


def main() -> int:
    config = RunConfig.load(CONFIG).changed(communication={"overlap_scatter": False})
    plan = resolved_plan(config, abstract_mesh(config.mesh.model_dump(), platform="gpu"))
    times = compute_times_of_run(config)
    table = Table("Tbit/s", *FORMATS)
    missed = []
    for terabits in TERABITS:
        link = LinkShare("a-b", 0.021, terabits * 1e12 / 8, plan.mesh.size // 2)
        cells = []
        for name, wire in FORMATS.items():
            of_format = dataclasses.replace(plan, wire_format=wire_format(wire))
            made = exposed(config, of_format, times, link)
            share = made.seconds / times.compute_seconds
            limits = ", ".join(f"{seconds:.2f}" for seconds in made.bounds)
            cells.append(f"{made.seconds:.2f}, {share:.1%}; {limits}")
            where, above = f"{name} at {terabits} Tbit/s", made.seconds / made.bounds.causal
            if above > CAUSAL_FACTOR:
                missed.append(f"{where} exposes {above:.2f} times the causal bound")
        table.add_row(f"{terabits:g}", *cells)
    console = Console(width=120)
    console.print("exposed seconds, share of a step; bounds: causal, overlapped, of bytes", table)
    console.print(f"a step takes {times.compute_seconds:.1f} s")
    console.print("exposed seconds of {} at {} Tbit/s".format(*USUAL))
    console.print(by_round_trip(config, plan, times))
    for each in missed:
        console.print(f"missed: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
