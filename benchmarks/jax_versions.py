"""One training step of geojax under several versions of JAX, and with options of XLA for CPUs.

    python benchmarks/jax_versions.py --python .venv-3.11/bin/python --python .venv/bin/python \\
        --options=--xla_cpu_use_new_xtile_lowering=true --output jax_versions.json

The step is that of `step_time.py`, with the same models, on one device in fp32. Each interpreter
runs without options and with each of the options. All sides live side by side, take turns and are
pinned to the same cores. The first side is the baseline. Losses differ by rounding alone.
"""

import argparse
import contextlib
import json
import os
import shlex
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.table import Table
from step_time import CONFIGURATIONS, ROWS, SEQUENCE, WORKERS, model_of, write_batch
from step_time import OPTIMIZER as OPTIMIZER_SETTINGS
from worker import Worker, processor

REQUESTS = ("versions", "losses", "steps", "memory")
LOSS_TOLERANCE = 1e-5


class Side(NamedTuple):
    """An interpreter, and the options that XLA gets there."""

    python: str
    options: str

    def start(self, work: dict[str, Any]) -> Worker:
        flags = " ".join(filter(None, (os.environ.get("XLA_FLAGS"), self.options)))
        return Worker(
            f"{self.python} {self.options}".strip(),
            WORKERS / "geojax_worker.py",
            json.dumps(work | {"requests": REQUESTS}),
            self.python,
            os.environ | {"XLA_FLAGS": flags},
        )


def measure(
    sides: list[Side], configuration: dict[str, int], arguments: argparse.Namespace, folder: Path
) -> list[dict[str, Any]]:
    work = {
        "threads": arguments.threads,
        "rows": ROWS,
        "sequence": SEQUENCE,
        "model": model_of(configuration),
        "optimizer": OPTIMIZER_SETTINGS,
        "remat": "none",
        "weights": str(folder / "weights.npz"),
        "batch": str(folder / "batch.npz"),
    }
    write_batch(folder / "batch.npz")
    with contextlib.ExitStack() as stack:
        workers = []
        for side in sides:
            workers.append(side.start(work))
            stack.callback(workers[-1].close)
        versions = [worker.ask("versions") for worker in workers]
        losses = [worker.ask("losses", count=3)[-1] for worker in workers]
        for side, loss in zip(sides, losses, strict=True):
            if not abs(loss / losses[0] - 1) < LOSS_TOLERANCE:
                raise SystemExit(f"the loss of {side} is {loss}, not {losses[0]}")
        seconds: list[list[float]] = [[] for _ in sides]
        for turn in range(arguments.rounds):
            for number in range(len(sides)):
                number = (number + turn) % len(sides)
                seconds[number] += workers[number].ask("steps", count=arguments.steps)
        memory = [worker.ask("memory", count=2)["peak"] for worker in workers]
    return [
        {
            "options": side.options,
            "jax": version["jax"],
            "jaxlib": version["jaxlib"],
            "loss": loss,
            "seconds": steps,
            "fastest_step_seconds": min(steps),
            "median_step_seconds": statistics.median(steps),
            "peak_bytes": peak,
        }
        for side, version, loss, steps, peak in zip(
            sides, versions, losses, seconds, memory, strict=True
        )
    ]


def show(console: Console, name: str, results: list[dict[str, Any]]) -> None:
    table = Table(title=f"{name}, sequence {SEQUENCE}, batch {ROWS}, fp32")
    for heading in ("JAX", "options of XLA"):
        table.add_column(heading)
    for heading in ("tokens/s", "fastest, ms", "median, ms", "of the first", "peak memory, MB"):
        table.add_column(heading, justify="right")
    for result in results:
        fastest = result["fastest_step_seconds"]
        table.add_row(
            result["jax"],
            result["options"] or "none",
            f"{ROWS * SEQUENCE / fastest:,.0f}",
            f"{1e3 * fastest:.1f}",
            f"{1e3 * result['median_step_seconds']:.1f}",
            f"{fastest / results[0]['fastest_step_seconds']:.2f}",
            f"{1e-6 * result['peak_bytes']:,.0f}",
        )
    console.print(table)


def main() -> None:
    cores = len(os.sched_getaffinity(0))
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--python", action="append", required=True, help="an interpreter")
    parser.add_argument("--options", action="append", default=[], help="options of XLA, one set")
    parser.add_argument("--threads", type=int, default=cores, help="threads and cores of each side")
    parser.add_argument("--rounds", type=int, default=5, help="turns that each side gets")
    parser.add_argument("--steps", type=int, default=4, help="steps of one turn")
    parser.add_argument("--only", choices=CONFIGURATIONS, help="just this model")
    parser.add_argument("--output", type=Path, help="write everything measured to this JSON file")
    arguments = parser.parse_args()
    sides = [
        Side(python, options) for python in arguments.python for options in ("", *arguments.options)
    ]
    console = Console(width=120)
    results = {}
    for name, configuration in CONFIGURATIONS.items():
        if arguments.only in (None, name):
            with tempfile.TemporaryDirectory() as folder:
                results[name] = measure(sides, configuration, arguments, Path(folder))
            show(console, name, results[name])
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "machine": {"processor": processor(), "cores": cores, "threads": arguments.threads},
            "results": results,
        }
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
