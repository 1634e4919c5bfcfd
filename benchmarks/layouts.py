"""Ten layouts of one model: geojax, and plain `jax.jit` with automatic sharding, side by side.

    taskset -c 0,1 python benchmarks/layouts.py --output benchmarks/results/layouts.json

Both sides train the same Llama from the same weights on the same batch, in fp32 with AdamW and
clipping, on 8 simulated devices; the same parts of the state lie on the same devices. The automatic
side is written as one would for speed: constraints on activations, weights and gradients, keys and
values gathered (or exchanged for heads) where a row is cut, softmax over a cut vocabulary without
gathering the logits. `benchmarks/layout_sides/` has both.

Before any timing the two sides train three steps and must agree on the losses. Then they take
turns, a step each, the first of a pair being the second of the next, and a layout's ratio is the
median over the pairs. Bytes are what one device sends in one step in collectives that cross an
axis, read from the compiled programs (`geojax.hlo.conventions` says how they are counted).
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import rich.box
from layout_sides.automatic_side import automatic_side
from layout_sides.geojax_side import geojax_side
from layout_sides.work import DEVICES, LAYOUTS, MODEL, ROWS, SEQUENCE, Layout
from rich.console import Console
from rich.table import Table

from geojax.hlo import collective_traffic
from geojax.models import parameter_count
from geojax.runtime import simulate_devices

SIDES = {"geojax": geojax_side, "jit": automatic_side}
AXES = ("dc", "data", "context", "tensor")
MEAN_GOAL, LARGEST_GOAL = 1.05, 1.20
CHECKED_STEPS, LOSS_TOLERANCE = 3, 1e-4


class Runner:
    """One side's program and its state."""

    def __init__(self, program: jax.stages.Compiled, state: Any, step: Callable[[Any], Any]):
        self.program, self._state, self._step = program, state, step

    def run(self) -> tuple[float, float]:
        """Seconds of a step, and its loss."""
        start = time.perf_counter()
        self._state, loss = jax.block_until_ready(self._step(self._state))
        return time.perf_counter() - start, float(loss)


def measure(layout: Layout, microbatches: int, rounds: int) -> dict[str, Any]:
    plan = layout.plan(microbatches)
    runners = {side: Runner(*build(plan)) for side, build in SIDES.items()}
    losses = {
        side: [runner.run()[1] for _ in range(CHECKED_STEPS)] for side, runner in runners.items()
    }
    if not np.ptp(list(losses.values()), axis=0).max() <= LOSS_TOLERANCE:
        raise SystemExit(f"{layout}: the sides do not train the same model, losses are {losses}")
    seconds: dict[str, list[float]] = {side: [] for side in SIDES}
    for turn in range(rounds):
        for side in list(SIDES)[:: 1 if turn % 2 == 0 else -1]:
            seconds[side].append(runners[side].run()[0])
    traffic = {
        side: collective_traffic(runner.program, plan.mesh) for side, runner in runners.items()
    }
    return {
        "layout": str(layout),
        "mesh": layout.axes,
        "options": layout.options,
        "losses": losses,
        "median_seconds": {side: statistics.median(values) for side, values in seconds.items()},
        "ratio": statistics.median(map(_quotient, *seconds.values())),
        "ratio_of_fastest": _quotient(*map(min, seconds.values())),
        "megabytes_over_axis": {
            side: {axis: float(own.bytes_over(axis)) / 1e6 for axis in AXES}
            for side, own in traffic.items()
        },
        "seconds": seconds,
        "traffic": {side: own.to_json()["axes"] for side, own in traffic.items()},
    }


def _quotient(own: float, other: float) -> float:
    return own / other


def show(console: Console, results: list[dict[str, Any]], mean: float) -> None:
    parameters = parameter_count(MODEL) / 1e6
    table = Table(
        title=f"{parameters:.1f}M parameters, {ROWS} rows of {SEQUENCE} tokens, fp32, {DEVICES} "
        f"simulated devices on {len(os.sched_getaffinity(0))} cores",
        title_justify="left",
        caption="MB that a device sends in a step: geojax, jit",
        caption_justify="right",
        box=rich.box.HORIZONTALS,
    )
    table.add_column("layout", no_wrap=True)
    for heading in ("geojax\nms", "jit\nms", "\nratio", *(f"over\n{axis}" for axis in AXES)):
        table.add_column(heading, justify="right", no_wrap=True)
    for result in results:
        milliseconds = (f"{1e3 * value:.0f}" for value in result["median_seconds"].values())
        sent = result["megabytes_over_axis"].values()
        table.add_row(
            result["layout"],
            *milliseconds,
            f"{result['ratio']:.2f}",
            *("  ".join(_megabytes(of_side[axis]) for of_side in sent) for axis in AXES),
        )
    console.print(table)
    largest = max(result["ratio"] for result in results)
    console.print(
        f"geometric mean of the ratios {mean:.3f} (goal: at most {MEAN_GOAL}), "
        f"largest {largest:.2f} (goal: at most {LARGEST_GOAL:.2f})"
    )


def _megabytes(value: float) -> str:
    return "-" if value < 0.01 else f"{value:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=15, help="steps that each side is timed for")
    parser.add_argument("--microbatches", type=int, default=1, help="of a step")
    parser.add_argument(
        "--only",
        type=int,
        nargs="+",
        choices=range(1, len(LAYOUTS) + 1),
        metavar="N",
        help="just these rows of the table, counted from 1",
    )
    parser.add_argument("--output", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.microbatches < 1:
        parser.error("--rounds and --microbatches must be at least 1")

    simulate_devices(DEVICES)
    console = Console(width=120)
    results = []
    with console.status("compiling ...") as status:
        for number, layout in enumerate(LAYOUTS, start=1):
            if arguments.only and number not in arguments.only:
                continue
            status.update(f"{layout} ...")
            results.append(measure(layout, arguments.microbatches, arguments.rounds))
    mean = statistics.geometric_mean(result["ratio"] for result in results)
    show(console, results, mean)
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "versions": {
                name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")
            },
            "model": MODEL.model_dump(exclude_unset=True),
            "rows": ROWS,
            "sequence": SEQUENCE,
            "microbatches": arguments.microbatches,
            "geometric_mean": mean,
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
