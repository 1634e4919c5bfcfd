"""How much of strict 1F1B's bubble goes away when a pipeline crosses a slow cut.

    python benchmarks/geopipe.py --output benchmarks/results/geopipe.json

GeoPipe reports a computation bubble ratio that is up to 78.91% lower than that of 1F1B, by more
forwards in the warm-up; latencies, transfers, microbatches and memory of that figure are not
published. So they are swept here, on the simulator: a pipeline of `--stages` stages over two sites,
half in each. Times are in units of f + b, a stage's forward and backward of a microbatch (b = 2 f).
The bubble ratio is the share of the iteration in which a stage is idle, and a reduction is
1 - its ratio / 1F1B's. A row of the table is a hop, latency + transfer, with the memory that
extended warm-up needs; in each of its cells are, in percent:

    extended warm-up                 p + ceil(2 (latency + transfer) / (f + b)) microbatches on the
                                     first stage, where 1F1B has p
    latency hiding                   within the same memory
    latency hiding, split            the same, with the gradients of weights as work of their own
    latency hiding, 1F1B's memory    within p, split

The JSON has all schedules at both limits and at one halfway between them.
"""

import argparse
import functools
import itertools
import json
import platform
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import track
from rich.table import Table

from geojax.pipeline.generators.latency_hiding import latency_hiding
from geojax.pipeline.generators.warmup import geopipe, one_forward_one_backward
from geojax.pipeline.simulation.costs import Costs, Hop
from geojax.pipeline.simulation.simulator import simulate

PUBLISHED = 0.7891
MICROBATCHES = (16, 32, 64, 128, 256)
LATENCIES = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
TRANSFERS = (0.0, 0.25, 0.75)
COLUMNS = {  # whose memory is the limit, and which schedule
    "extended warm-up": ("geopipe", "geopipe"),
    "latency hiding": ("geopipe", "latency_hiding"),
    "latency hiding, split": ("geopipe", "latency_hiding_split"),
    "latency hiding, 1F1B's memory": ("1f1b", "latency_hiding_split"),
}


def costs_of(stages: int, latency: float, transfer: float) -> Costs:
    cut = Hop(latency, transfer, "east-west")
    hops = [Hop()] * (stages - 1)
    hops[stages // 2 - 1] = cut
    return Costs((1 / 3,) * stages, (1 / 3,) * stages, (1 / 3,) * stages, tuple(hops))


def cell(stages: int, microbatches: int, latency: float, transfer: float) -> dict[str, Any]:
    """What each schedule makes of one point of the sweep, by memory limit."""
    costs = costs_of(stages, latency, transfer)
    strict = one_forward_one_backward(stages, microbatches)
    least, most = max(strict.in_flight), max(geopipe(microbatches, costs).in_flight)
    reference = simulate(strict, costs).bubble_ratio
    by_limit: dict[int, dict[str, float]] = {}
    for limit in sorted({least, (least + most) // 2, most}):
        hide = functools.partial(latency_hiding, microbatches, costs, limit)
        contestants = {
            "geopipe": geopipe(microbatches, costs, limit),
            "latency_hiding": hide(),
            "latency_hiding_split": hide(split_backward=True),
        }
        by_limit[limit] = {}
        for name, schedule in contestants.items():
            assert max(schedule.in_flight) <= limit, f"{name} holds more than {limit}"
            reduced = 1 - simulate(schedule, costs).bubble_ratio / reference
            by_limit[limit][name] = round(reduced, 6)
    return {
        "microbatches": microbatches,
        "latency": latency,
        "transfer": transfer,
        "bubble_of_1f1b": round(reference, 6),
        "memory_of_1f1b": least,
        "memory_of_geopipe": most,
        "reduction_by_memory_limit": by_limit,
    }


def reduction(found: dict[str, Any], column: str) -> float:
    """The number of a cell in a column of the table."""
    memory, name = COLUMNS[column]
    by_limit: dict[int, dict[str, float]] = found["reduction_by_memory_limit"]
    return by_limit[found[f"memory_of_{memory}"]][name]


def show(console: Console, cells: list[dict[str, Any]]) -> None:
    table = Table(
        box=None, pad_edge=False, title="Bubble reduced, % of strict 1F1B's", padding=(0, 1, 0, 0)
    )
    table.add_column("hop", no_wrap=True, min_width=9)
    table.add_column("memory", justify="right", no_wrap=True)
    for microbatches in MICROBATCHES:
        table.add_column(f"m = {microbatches}", justify="right", no_wrap=True)
    for (latency, transfer), group in itertools.groupby(
        cells, key=lambda each: (each["latency"], each["transfer"])
    ):
        row = list(group)
        table.add_row(
            f"{latency:g}+{transfer:g}",
            str(max(each["memory_of_geopipe"] for each in row)),
            *("/".join(_percent(reduction(each, column)) for column in COLUMNS) for each in row),
        )
    console.print(table)
    for column in COLUMNS:
        reductions = [reduction(each, column) for each in cells]
        reached = sum(each >= PUBLISHED for each in reductions)
        console.print(
            f"{column}: {PUBLISHED:.2%} and more in {reached} of {len(cells)} cells; "
            f"the most is {max(reductions):.2%}"
        )


def _percent(reduction: float) -> str:
    return f"{100 * reduction:.0f}"


def draw(cells: list[dict[str, Any]], stages: int) -> Figure:
    """Maps of the reduction over m and latency; outlined where it is the published one or more."""
    figure = Figure(figsize=(13, 8.4), dpi=120, layout="constrained")
    panels = figure.subplots(len(TRANSFERS), len(COLUMNS), sharex=True, sharey=True)
    by_point = {(each["transfer"], each["latency"], each["microbatches"]): each for each in cells}
    for row, transfer in zip(panels, TRANSFERS, strict=True):
        for axes, column in zip(row, COLUMNS, strict=True):
            values = np.array(
                [
                    [reduction(by_point[transfer, latency, m], column) for m in MICROBATCHES]
                    for latency in LATENCIES
                ]
            )
            shades = axes.imshow(values, vmin=0, vmax=1, cmap="Blues", aspect="auto")
            axes.invert_yaxis()
            for (y, x), value in np.ndenumerate(values):
                reached = value >= PUBLISHED
                axes.text(
                    x,
                    y,
                    _percent(value),
                    ha="center",
                    va="center",
                    color="white" if value > 0.6 else "black",
                    weight="bold" if reached else "normal",
                )
                if reached:
                    _outline(axes, values, x, y)
            axes.set_xticks(range(len(MICROBATCHES)), [str(m) for m in MICROBATCHES])
            axes.set_yticks(range(len(LATENCIES)), [f"{latency:g}" for latency in LATENCIES])
            if transfer == TRANSFERS[0]:
                axes.set_title(column, fontsize=10)
            if transfer == TRANSFERS[-1]:
                axes.set_xlabel("microbatches")
            if column == next(iter(COLUMNS)):
                axes.set_ylabel(f"latency / (f + b)\ntransfer {transfer:g} (f + b)")
    figure.colorbar(shades, ax=panels, shrink=0.6, label="bubble reduced, share of strict 1F1B's")
    figure.suptitle(
        f"{stages} stages over two sites; outlined: {PUBLISHED:.2%} and more", fontsize=11
    )
    return figure


def _outline(axes: Any, values: np.ndarray, x: int, y: int) -> None:
    """The sides of a cell beyond which the published reduction is not reached."""
    height, width = values.shape
    sides = (
        (0, -1, [x - 0.5, x + 0.5], [y - 0.5, y - 0.5]),
        (0, 1, [x - 0.5, x + 0.5], [y + 0.5, y + 0.5]),
        (-1, 0, [x - 0.5, x - 0.5], [y - 0.5, y + 0.5]),
        (1, 0, [x + 0.5, x + 0.5], [y - 0.5, y + 0.5]),
    )
    for right, up, xs, ys in sides:
        inside = 0 <= x + right < width and 0 <= y + up < height
        if not inside or values[y + up, x + right] < PUBLISHED:
            axes.plot(xs, ys, color="#d1495b", linewidth=2.5, solid_capstyle="round")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--stages", type=int, default=8, help="of the whole pipeline, even")
    parser.add_argument("--output", type=Path, help="JSON to write, and the picture beside it")
    arguments = parser.parse_args()
    if arguments.stages < 2 or arguments.stages % 2:
        parser.error("--stages: two sites with half of the stages each need an even number")
    console = Console(highlight=False)
    points = list(itertools.product(TRANSFERS, LATENCIES, MICROBATCHES))
    cells = [
        cell(arguments.stages, microbatches, latency, transfer)
        for transfer, latency, microbatches in track(points, "simulating", console=console)
    ]
    show(console, cells)
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "python": platform.python_version(),
            "stages": arguments.stages,
            "published_reduction": PUBLISHED,
            "cells": cells,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
        draw(cells, arguments.stages).savefig(arguments.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
