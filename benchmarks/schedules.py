"""Schedules and their simulator beside published figures and formulas.

    python benchmarks/schedules.py --output benchmarks/results/schedules.json

zero bubble       bubble rates of Zero Bubble's Table 5 (A100, profiled stage times), in percent:
                  simulated / printed
crosspipe         seconds per microbatch of CrossPipe's Table 5 (70B on GH200, two data centers,
                  injected latency and bandwidth), simulated / measured. One cell is fitted, 1F1B
                  without latency; half of the backward is taken to be the gradients of weights.
                  1F1B and ZB-H1 are timed with late receives: frameworks whose receives block pay
                  a hop when the receiving stage is free; ZB-H1 with the simulator's surcharge of a
                  split backward. The summary has both without: 1F1B whose receives are there in
                  time, ZB-H1 whose split backward is free. `hiding` is latency_hiding with split
                  backwards at the same memory, beside the schedule of CrossPipe's solver.
                  Simulated seconds have no overheads, measured ones do: the column says where the
                  schedule stands, not what a cluster will take.
littles law       latency_hiding's iteration time over (m - 1) max(f + b, (p (f + b) + 2 sum H) / M)
                  + p (f + b) + 2 sum H, for 300 random pipelines with a memory limit M
lock-step         time in lock-step over the event-driven time of the same schedule (what can run)
                  and over the lower bound (m + p - 1)(f + b) + 2 sum H, for random pipelines, by
                  microbatches per stage: geopipe in the best packing, and the program
                  without branches; and where memory binds, at 1F1B's limit
"""

import argparse
import dataclasses
import functools
import itertools
import json
import platform
import random
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from geojax.pipeline import (
    Placement,
    best_tick_table,
    interleaved,
    latency_hiding,
    lock_step,
    one_forward_one_backward,
    simulate,
    zero_bubble_h1,
    zero_bubble_h2,
)
from geojax.pipeline.simulation.simulator import iteration_seconds
from geojax.planner.cost.chunks import SPLIT_SURCHARGE

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.drawn_pipelines import drawn_costs, drawn_under_a_limit, littles_law, lower_bound
from support.published import (
    CROSSPIPE_LIMITS,
    CROSSPIPE_MICROBATCHES,
    CROSSPIPE_STAGES,
    crosspipe_backward,
    crosspipe_costs,
    crosspipe_rows,
    crosspipe_seconds,
    zero_bubble_costs,
    zero_bubble_rate,
    zero_bubble_rows,
)

CASES = 300
ERRORS = {
    "1F1B": "1f1b",
    "1F1B with receives in time": "1f1b, receives in time",
    "ZB-H1": "zb_h1",
    "ZB-H1 with a free split": "zb_h1, free split",
}
"""Columns of CrossPipe whose errors are summed up, by their title."""


def zero_bubble() -> list[dict[str, Any]]:
    results = []
    for row in zero_bubble_rows():
        stages, microbatches = row["p"], row["m"]
        result = {"model": row["model"], "stages": stages, "microbatches": microbatches}
        for column, schedule in {
            "1f1b": one_forward_one_backward(stages, microbatches),
            "interleaved_1f1b": interleaved([stages], row["interleaved_v"], microbatches),
            "zb_h1": zero_bubble_h1(stages, microbatches),
            "zb_h2": zero_bubble_h2(stages, microbatches),
        }.items():
            timeline = simulate(schedule, zero_bubble_costs(row, schedule.placement))
            rate = round(zero_bubble_rate(timeline, row), 4)
            result[column] = {"simulated": rate, "published": row[f"bubble_{column}"]}
        results.append(result)
    return results


def crosspipe() -> list[dict[str, Any]]:
    rows = crosspipe_rows()
    backward = crosspipe_backward(rows)
    results = []
    for row in rows:
        microbatches, limit = CROSSPIPE_MICROBATCHES[row["case"]], CROSSPIPE_LIMITS[row["case"]]
        costs = crosspipe_costs(row, backward)
        result: dict[str, Any] = {
            key: row[key] for key in ("latency_over_tf", "transfer_over_tf", "case")
        }
        strict = one_forward_one_backward(CROSSPIPE_STAGES, microbatches)
        split = zero_bubble_h1(CROSSPIPE_STAGES, microbatches)
        paying = dataclasses.replace(costs, split_surcharge=SPLIT_SURCHARGE)
        for name, seconds, column in (
            ("1f1b", crosspipe_seconds(strict, costs), "s_1f1b"),
            ("1f1b, receives in time", simulate(strict, costs).seconds / microbatches, "s_1f1b"),
            ("zb_h1", crosspipe_seconds(split, paying), "s_zb_h1"),
            ("zb_h1, free split", crosspipe_seconds(split, costs), "s_zb_h1"),
        ):
            result[name] = {"simulated": round(seconds, 6), "published": row[column]}
        hide = functools.partial(latency_hiding, microbatches, costs, limit)
        seconds = iteration_seconds(hide(), costs) / microbatches
        result["hiding, whole backward"] = {"simulated": round(seconds, 6)}
        seconds = iteration_seconds(hide(split_backward=True), costs) / microbatches
        result["hiding"] = {"simulated": round(seconds, 6), "published": row["s_cross_solver"]}
        results.append(result)
    return results


def under_a_limit() -> dict[str, Any]:
    generator = random.Random(4)
    ratios = []
    for _ in range(CASES):
        microbatches, costs, limit = drawn_under_a_limit(generator)
        seconds = simulate(latency_hiding(microbatches, costs, limit), costs).seconds
        ratios.append(seconds / littles_law(microbatches, costs, limit))
    return spread(ratios)


def in_lock_step() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for name, per_stage in itertools.product(("geopipe", "branch_free"), (4, 8, 16)):
        generator = random.Random(5)
        over_events, over_bound = [], []
        for _ in range(CASES):
            stages = generator.randint(2, 10)
            microbatches = per_stage * stages
            costs = drawn_costs(generator, stages, cuts=2, periods=4)
            placement = Placement.linear(stages)
            table = best_tick_table(name, placement, microbatches, costs)
            seconds = lock_step(table, costs).seconds
            over_events.append(seconds / simulate(table.schedule, costs).seconds)
            over_bound.append(seconds / lower_bound(microbatches, costs))
        results[f"{name}, {per_stage} microbatches a stage"] = {
            "over event-driven": spread(over_events),
            "over the lower bound": spread(over_bound),
        }
    generator = random.Random(6)
    bound = []
    for _ in range(CASES // 3):
        stages = generator.randint(2, 10)
        costs = drawn_costs(generator, stages, cuts=2, periods=4)
        placement, microbatches = Placement.linear(stages), 8 * stages
        table = best_tick_table("latency_hiding", placement, microbatches, costs, stages)
        events = simulate(latency_hiding(microbatches, costs, stages), costs).seconds
        bound.append(lock_step(table, costs).seconds / events)
    results["8 microbatches a stage, limit p"] = {"over latency_hiding by events": spread(bound)}
    return results


def spread(ratios: list[float]) -> dict[str, float]:
    ordered = sorted(ratios)
    return {
        "cases": len(ordered),
        "median": round(statistics.median(ordered), 4),
        "95%": round(ordered[int(0.95 * len(ordered))], 4),
        "worst": round(ordered[-1], 4),
    }


def show(console: Console, results: dict[str, Any]) -> None:
    pairs = Table(title="Bubble rates of Zero Bubble's Table 5, simulated / printed", box=None)
    for column in ("model", "p", "m", "1F1B", "interleaved", "ZB-H1", "ZB-H2"):
        pairs.add_column(column, justify="left" if column == "model" else "right")
    for row in results["zero_bubble"]:
        pairs.add_row(
            row["model"],
            str(row["stages"]),
            str(row["microbatches"]),
            *(beside(row[key]) for key in ("1f1b", "interleaved_1f1b", "zb_h1", "zb_h2")),
        )
    console.print(pairs)
    cells = Table(title="Seconds per microbatch of CrossPipe's Table 5", box=None)
    for column in ("latency", "transfer", "case", "1F1B", "ZB-H1", "hiding / solver", "unsplit"):
        cells.add_column(column, justify="right")
    for row in results["crosspipe"]:
        cells.add_row(
            f"{row['latency_over_tf']:g} f",
            f"{row['transfer_over_tf']:g} f",
            str(row["case"]),
            *(beside(row[key]) for key in ("1f1b", "zb_h1", "hiding")),
            f"{row['hiding, whole backward']['simulated']:.3f}",
        )
    console.print(cells)
    for name, summary in results["crosspipe_summary"].items():
        console.print(f"{name}: {summary}")
    console.print("latency_hiding over Little's law:", results["littles_law"])
    for name, groups in results["lock_step"].items():
        for what, summary in groups.items():
            console.print(f"lock-step, {name}, {what}: {summary}")


def beside(cell: dict[str, Any]) -> str:
    published = cell["published"]
    return f"{cell['simulated']:.4f} / " + ("-" if published is None else f"{published:g}")


def deviations(cells: list[dict[str, Any]], name: str) -> list[float]:
    """Simulated over published, less one; without the cell that was fitted."""
    return [
        cell[name]["simulated"] / cell[name]["published"] - 1
        for cell in cells
        if cell[name]["published"] is not None
        and not (name.startswith("1f1b") and cell["latency_over_tf"] == 0 and cell["case"] == 1)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    cells = crosspipe()
    results = {
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "zero_bubble": zero_bubble(),
        "crosspipe": cells,
        "crosspipe_summary": {
            **{
                f"{title}, absolute error": spread([abs(each) for each in deviations(cells, name)])
                for title, name in ERRORS.items()
            },
            "latency_hiding / solver - 1": spread(deviations(cells, "hiding")),
        },
        "littles_law": under_a_limit(),
        "lock_step": in_lock_step(),
    }
    show(Console(highlight=False, width=110), results)
    if arguments.output:
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
