"""One model in every precision: fp32, bf16, fp16 and the FP8 recipes.

    python benchmarks/precision.py --output benchmarks/results/precision.json

`geojax train` repeats the run of benchmarks/precision.yaml in each, in a process of its own: the
same weights at the start, the same sequences in the same order, the same steps. FP8 products are
made by the reference backend. Every final validation loss should be within 1% of that in bf16.

A finished run below `--runs` is not run again, and one that was stopped goes on from its
checkpoint; the table and the picture show all that are finished. Seconds are those of training
steps on CPUs, which emulate what GPUs have in hardware: they say nothing about speed elsewhere.
"""

import argparse
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import rich.box
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.precision import RECIPES
from geojax.train.metrics import read_metrics
from geojax.train.resume import with_saved_schedule

REPOSITORY = Path(__file__).resolve().parents[1]
YARDSTICK = "bf16"
PRECISIONS = (YARDSTICK, "fp32", "fp16", *(f"fp8-{name}" for name in RECIPES))
TOLERANCE = 0.01
VALIDATIONS, CHECKPOINTS = 12, 3
"""Of a run."""
SMOOTHED = 15
"""Steps that a point of a training curve is the mean of."""
COLORS = ("#222222", "#8c8c8c", "#1f77b4", "#d1495b", "#e08e1b", "#2a9d63", "#7b4ea3")
PERCENT_SHOWN = (-10, -5, -2, -1, -0.5, 0, 0.5, 1, 2, 5, 10)


def settings(precision: str, steps: int, directory: Path) -> list[str]:
    """What a run changes in the config."""
    changes = {
        "run_directory": directory,
        "steps": steps,
        "precision": precision,
        "evaluation.interval": max(1, steps // VALIDATIONS),
        "checkpoint.interval": max(1, steps // CHECKPOINTS),
        "sample.prompts": [],
    }
    if precision.startswith("fp8-"):
        changes["fp8.backend"] = "reference"
    return [text for name, value in changes.items() for text in (f"--{name}", str(value))]


def finished(directory: Path, wanted: RunConfig) -> dict[str, Any] | None:
    """What the run in `directory` measured; None where it is not at its end."""
    if (directory / "config.yaml").exists():
        kept = RunConfig.load(directory / "config.yaml")
        if kept != with_saved_schedule(wanted, None):
            raise UserError(
                f"{directory} holds a run of other settings; remove it, or give other --runs"
            )
    lines = list(read_metrics(directory / "metrics.jsonl"))
    training = [line for line in lines if "loss" in line]
    validation = [
        (line["step"], value)
        for line in lines
        for name, value in line.items()
        if name.startswith("validation/")
    ]
    if not validation or validation[-1][0] < wanted.steps:
        return None
    return {
        "final_validation_loss": validation[-1][1],
        "skipped": int(training[-1]["skipped"]),
        "seconds": sum(line["seconds"] for line in training),
        "validation": validation,
        "training": [line["loss"] for line in training],
    }


def collect(config: Path, steps: int, runs: Path) -> dict[str, dict[str, Any]]:
    """The finished runs, by precision."""
    found = {}
    for precision in PRECISIONS:
        directory = runs / precision
        wanted = RunConfig.load(config, settings(precision, steps, directory))
        if result := finished(directory, wanted):
            found[precision] = result
    if YARDSTICK in found:
        for result in found.values():
            of_yardstick = found[YARDSTICK]["final_validation_loss"]
            result["ratio"] = result["final_validation_loss"] / of_yardstick
    return found


def show(console: Console, results: dict[str, dict[str, Any]]) -> bool:
    """Print the table; whether every recipe is as near as it should be."""
    table = Table(box=rich.box.HORIZONTALS)
    table.add_column("precision", no_wrap=True)
    for heading in ("final validation loss", f"ratio to {YARDSTICK}", "steps skipped", "seconds"):
        table.add_column(heading, justify="right", no_wrap=True)
    for precision, result in results.items():
        table.add_row(
            precision,
            f"{result['final_validation_loss']:.4f}",
            f"{result['ratio']:.4f}" if "ratio" in result else "-",
            str(result["skipped"]),
            f"{result['seconds']:.0f}",
        )
    console.print(table)
    distances = [abs(result["ratio"] - 1) for result in results.values() if "ratio" in result]
    if not distances:
        return True
    near = max(distances) <= TOLERANCE
    console.print(
        f"at most {max(distances):.2%} from {YARDSTICK}, goal {TOLERANCE:.0%}: "
        f"{'reached' if near else 'NOT reached'}"
    )
    return near


def smooth(values: Any) -> tuple[np.ndarray, np.ndarray]:
    """Steps, and means around each of as many values as there are, `SMOOTHED` at most."""
    width = min(SMOOTHED, len(values))
    means = np.convolve(values, np.ones(width) / width, mode="valid")
    return np.arange(len(means)) + (width + 1) / 2, means


def draw(results: dict[str, dict[str, Any]]) -> Figure:
    """The curves, and how far they are from the yardstick's, on which they lie."""
    figure = Figure(figsize=(13, 5.2), dpi=120, layout="constrained")
    curves, distances = figure.subplots(1, 2)
    yardstick = results[YARDSTICK]
    distances.axhspan(-100 * TOLERANCE, 100 * TOLERANCE, color="#e8f1e4", zorder=0)
    for precision, color in zip(PRECISIONS, COLORS, strict=True):
        if precision not in results:
            continue
        result = results[precision]
        steps, losses = np.transpose(result["validation"])
        curves.plot(*smooth(result["training"]), color=color, linewidth=1, alpha=0.6)
        curves.plot(
            steps,
            losses,
            "o-",
            color=color,
            markersize=4,
            linewidth=1,
            label=f"{precision}, at last {losses[-1]:.3f}",
        )
        if precision == YARDSTICK:
            distances.axhline(0, color=color, linewidth=1.5)
            continue
        apart = 100 * (losses / np.transpose(yardstick["validation"])[1] - 1)
        distances.plot(steps, apart, "o-", color=color, markersize=4, linewidth=1.5)
        middles, means = smooth(result["training"])
        apart = 100 * (means / smooth(yardstick["training"])[1] - 1)
        distances.plot(middles, apart, color=color, linewidth=0.8, alpha=0.5)
    curves.set(xlabel="step", ylabel="cross-entropy (nats per token)")
    curves.set_title("Validation (dots) and training (lines without dots, smoothed)", fontsize=10)
    distances.set(xlabel="step", ylabel=f"difference from {YARDSTICK}, % of its loss")
    # Linear where precisions should be, so that a spike early on leaves the rest to be seen.
    lowest, highest = distances.get_ylim()
    distances.set_yscale("symlog", linthresh=100 * TOLERANCE, linscale=2)
    shown = [value for value in PERCENT_SHOWN if 1.1 * lowest <= value <= 1.1 * highest]
    distances.set_yticks(shown, [f"{value:g}" for value in shown], minor=False)
    distances.set_ylim(1.1 * lowest, 1.1 * highest)
    distances.set_title(
        f"The same beside {YARDSTICK}; shaded: within {TOLERANCE:.0%} (logarithmic beyond)",
        fontsize=10,
    )
    curves.legend(frameon=False)
    for axes in (curves, distances):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    return figure


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--config", type=Path, default=Path(__file__).with_suffix(".yaml"))
    parser.add_argument("--steps", type=int, default=300, help="of each run")
    parser.add_argument(
        "--only", nargs="+", choices=PRECISIONS, default=PRECISIONS, help="train just these"
    )
    parser.add_argument(
        "--runs", type=Path, default=REPOSITORY / "runs" / "precision", help="where they train"
    )
    parser.add_argument("--output", type=Path, help="JSON to write, and the picture beside it")
    arguments = parser.parse_args()
    if arguments.steps < 1:
        parser.error("--steps must be at least 1")
    config, steps, runs = arguments.config, arguments.steps, arguments.runs.resolve()
    console = Console(width=100, highlight=False)
    # As launch/quickstart does: large memory pages for what XLA allocates anew in each step.
    environment = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"} | os.environ
    for number, precision in enumerate(arguments.only, start=1):
        console.rule(f"{precision}, {number} of {len(arguments.only)}")
        if precision in collect(config, steps, runs):
            console.print(f"is finished, in {runs / precision}", soft_wrap=True)
            continue
        changes = settings(precision, steps, runs / precision)
        train = [sys.executable, "-m", "geojax", "train", config, *changes]
        process = subprocess.run(train, env=environment, check=False)
        if process.returncode:
            return process.returncode
    results = collect(config, steps, runs)
    console.rule()
    near = show(console, results)
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "cores": len(os.sched_getaffinity(0)),
            "python": platform.python_version(),
            "versions": {
                name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax")
            },
            "steps": steps,
            "results": results,
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
        if YARDSTICK in results:
            draw(results).savefig(arguments.output.with_suffix(".png"))
    return 0 if near else 1


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
