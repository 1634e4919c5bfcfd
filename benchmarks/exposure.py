"""The exposed part of the sum over sites in the published layout, by bandwidth and format.

    python benchmarks/exposure.py

Nemotron-4 340B on two sites of 1,536 H100: PP 12, TP 8, DP 16 in each, 21 ms round trip, 8 chunks
a stage, as NVIDIA ran it. Predicted by `geojax.planner.buckets`, a step by its FLOPs:

    exposed   the seconds of messages beyond the backwards that they travel beside
    causal    the least that any order of messages exposes: no part leaves before it is whole. From
              any part on all that is whole no earlier must cross in what is left of the pipeline,
              or follows it, and the last message takes a round trip besides
    bound     max(0, bytes / bandwidth - window): the causal bound of the first part alone, as if
              all others were whole with it, at no latency

A goal that is missed is named, and the exit code is 1: bf16 exposes less than 4% of a step at
3.2 Tbit/s, and whatever the bandwidth and the format at most a tenth more than the causal bound.
"""

import dataclasses
import itertools
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

from geojax.collectives.wire_format import wire_format
from geojax.config.run_config import RunConfig
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.buckets import ComputeTimes, LinkShare, choose_buckets
from geojax.planner.resolve.choices import resolved_plan
from geojax.planner.resolve.run_prediction import compute_times_of_run
from geojax.planner.traffic.gradients import GradientMessages
from geojax.step.plan import StepPlan

CONFIG = Path(__file__).parents[1] / "configs" / "nemotron4-340b-2x1536.yaml"
TERABITS = (0.4, 0.8, 1.6, 3.2, 6.4)
FORMATS = {"fp32": "none", "bf16": "bf16", "int8": "int8"}
H100_PEAK = 989e12
GOAL = "bf16", 3.2
"""The format and the Tbit/s of which the exposed share is limited."""
SHARE_LIMIT, CAUSAL_FACTOR = 0.04, 1.1


@dataclasses.dataclass(frozen=True)
class Exposed:
    """Seconds of a step that nothing hides, and what they are compared with."""

    seconds: float
    causal: float
    bound: float


def bounds(messages: GradientMessages, link: LinkShare, tick_seconds: float) -> tuple[float, float]:
    """Return the causal bound and that of the bytes and the window alone."""
    sizes = [*(each.bytes for each in messages.early), sum(messages.after_backward)]
    ticks = [*(each.ticks for each in messages.early), 0]
    to_send = list(itertools.accumulate(reversed(sizes)))
    left = list(itertools.accumulate(reversed(ticks)))
    late = [
        size / link.bytes_per_second - count * tick_seconds
        for size, count in zip(to_send, left, strict=True)
    ]
    return max(late) + link.seconds(0), max(0.0, late[-1])


def exposed(config: RunConfig, plan: StepPlan, times: ComputeTimes, link: LinkShare) -> Exposed:
    choice = choose_buckets(config.model, plan, link, times, 80 * 10**9, ["bucket_bytes"])
    assert plan.staged_layers is not None
    tick_seconds = plan.staged_layers.max_layers_per_chunk * times.layer_backward
    return Exposed(choice.exposure.seconds, *bounds(choice.exposure.messages, link, tick_seconds))


def main() -> int:
    config = RunConfig.load(CONFIG)
    plan = resolved_plan(config, abstract_mesh(config.mesh.model_dump(), platform="gpu"))
    times = compute_times_of_run(config)
    table = Table("Tbit/s", *(f"{name}: s, share; causal, bound" for name in FORMATS))
    missed = []
    for terabits in TERABITS:
        link = LinkShare("a-b", 0.021, terabits * 1e12 / 8, plan.mesh.size // 2)
        cells = []
        for name, wire in FORMATS.items():
            of_format = dataclasses.replace(plan, wire_format=wire_format(wire))
            made = exposed(config, of_format, times, link)
            share = made.seconds / times.compute_seconds
            cells.append(f"{made.seconds:.2f}, {share:.1%}; {made.causal:.2f}, {made.bound:.2f}")
            where, above = f"{name} at {terabits} Tbit/s", made.seconds / made.causal
            if above > CAUSAL_FACTOR:
                missed.append(f"{where} exposes {above:.2f} times the causal bound")
            if (name, terabits) == GOAL and share >= SHARE_LIMIT:
                missed.append(f"{where} exposes {share:.1%} of a step")
        table.add_row(f"{terabits:g}", *cells)
    console = Console(width=120)
    console.print(table, f"a step takes {times.compute_seconds:.1f} s")
    for each in missed:
        console.print(f"missed: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
