"""Every pipeline of the grid against one device, in float64: the largest error of each.

    python benchmarks/pipeline_grid.py --processes 4 --output benchmarks/results/pipeline_grid.json

The cells are cases of `tests/equality/case.py`: schedule x {through two sites, through three, in
each of two} x ticks of a hop x {alone, tensor, sequence parallel, context, data, expert} x
rematerialization x branches. A cell's error is the largest of its loss and its gradients' leaves,
each relative to the leaf's largest number. What the output has already is not run again.
"""

import argparse
import collections
import importlib.metadata
import itertools
import json
import math
import multiprocessing
import platform
import shlex
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from equality.case import DEVICES, Case
from equality.results import errors

from geojax.pipeline import SCHEDULES
from geojax.runtime import simulate_devices

TOLERANCE = 1e-10
CELLS_OF_A_PROCESS = 40
"""Then another one takes its place: compiled programs stay in memory."""


def largest_error(case: Case) -> tuple[str, str, float]:
    """The case; the leaf, or the loss, that is farthest from one device's; how far it is."""
    found = errors(case)
    worst = max(found, key=lambda name: math.inf if math.isnan(found[name]) else found[name])
    return str(case), worst, found[worst]


def grid() -> list[Case]:
    """Every cell, whether it exists or not; families, and how even layers are, take turns."""
    companies = [
        {},
        {"tensor": "tensor"},
        {"tensor": "sequence"},
        {"context": "all_gather"},
        {"rows": "data"},
        {"rows": "expert"},
    ]
    cells = itertools.product(
        SCHEDULES,
        ("2 stages", "3 stages", "2 replicas"),
        (1, 2, 3),
        companies,
        (False, True),
        ("", "branches"),
    )
    families = itertools.cycle(("gpt3", "gemma", "capacity"))
    evenness = itertools.cycle(("", "", "", "uneven", "uneven"))
    remats = itertools.cycle(("full", "selective"))
    return [
        Case(
            next(families),
            schedule,
            sites,
            hop_ticks=hop_ticks,
            **company,
            remat=next(remats) if remat else "none",
            branches=branches,
            layers=next(evenness),
        )
        for schedule, sites, hop_ticks, company, remat, branches in cells
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("pipeline_grid.json"),
        help="JSON file, gone on with where it exists",
    )
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
