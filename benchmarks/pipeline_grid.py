"""Every pipeline of the grid against one device, in float64: the largest error of each.

    python benchmarks/pipeline_grid.py --processes 4 --output benchmarks/results/pipeline_grid.json

The cells are those of `tests/support/pipelines.py`: schedule x {through two sites, through three,
in each} x ticks of a hop x {alone, tensor, sequence parallel, context, data, expert} x
rematerialization x branches. A cell's error is the largest of its loss and its gradients' leaves,
each relative to the leaf's largest number. What the output has already is not run again.
"""

import argparse
import collections
import importlib.metadata
import json
import math
import multiprocessing
import platform
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.pipelines import DEVICES, Case, grid

from geojax.runtime import simulate_devices

TOLERANCE = 1e-10
CELLS_OF_A_PROCESS = 40
"""Then another one takes its place: compiled programs stay in memory."""


def largest_error(case: Case) -> tuple[str, str, float]:
    """The case; the leaf, or the loss, that is farthest from one device's; how far it is."""
    errors = case.errors()
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    return str(case), worst, errors[worst]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--processes", type=int, default=1)
    arguments = parser.parse_args()
    cells = grid()
    existing = [case for case in cells if case.missing is None]
    found = {}
    if arguments.output.exists():
        found = json.loads(arguments.output.read_text())["cells"]
    todo = [case for case in existing if str(case) not in found]
    # Not concurrent.futures: its pool stops for good when it replaces processes (CPython 115634).
    pool = multiprocessing.get_context("spawn").Pool(
        arguments.processes, simulate_devices, (DEVICES,), maxtasksperchild=CELLS_OF_A_PROCESS
    )
    with pool:
        for name, leaf, error in pool.imap_unordered(largest_error, todo):
            found[name] = {"error": error, "of": leaf, "passed": error <= TOLERANCE}
            print(f"{len(found)} of {len(existing)}: {name}: {error:.1e} ({leaf})", flush=True)
            arguments.output.write_text(json.dumps(result(found, cells), indent=1) + "\n")
    failed = [name for name, cell in found.items() if not cell["passed"]]
    print(f"{len(found) - len(failed)} passed, {len(failed)} failed: {failed}")
    return 1 if failed else 0


def result(found: dict[str, dict], cells: list[Case]) -> dict:
    left_out = collections.Counter(case.missing for case in cells if case.missing is not None)
    return {
        "command": shlex.join(["python", *sys.argv]),
        "python": platform.python_version(),
        "jax": importlib.metadata.version("jax"),
        "precision": "float64",
        "tolerance": TOLERANCE,
        "passed": sum(cell["passed"] for cell in found.values()),
        "failed": sum(not cell["passed"] for cell in found.values()),
        "largest_error": max(cell["error"] for cell in found.values()),
        "left_out": dict(left_out),
        "cells": dict(sorted(found.items())),
    }


if __name__ == "__main__":
    sys.exit(main())
