"""What FP8 costs a matrix product and its two gradients, recipe by recipe, and what it should.

    python benchmarks/recipe_errors.py --output benchmarks/results/recipe_errors.json

Relative errors of the reference backend against float32, in percent: y = x w, dx = dy w^T and
dw = x^T dy. What is expected is computed from the formats; `tests/support/recipe_errors.py` says
how, and from which publications. With outliers in x also of the rows that have none.
"""

import argparse
import dataclasses
import importlib.metadata
import json
import platform
import shlex
import sys
from pathlib import Path

import rich.box
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.recipe_errors import OUTLIER, SOURCES, Finding, with_outliers, without_outliers


def show(console: Console, title: str, findings: list[Finding], *, sources: bool) -> None:
    by_case: dict[str, list[Finding]] = {}
    for finding in findings:
        by_case.setdefault(finding.case, []).append(finding)
    table = Table(title=title, title_justify="left", box=rich.box.HORIZONTALS)
    table.add_column("recipe", no_wrap=True)
    for finding in next(iter(by_case.values())):
        table.add_column(finding.measure.replace(", ", "\n"), justify="right", no_wrap=True)
    if sources:
        table.add_column("formats from", no_wrap=True)
    for case, row in by_case.items():
        table.add_row(case, *map(_cell, row), *([SOURCES[row[0].recipe]] if sources else []))
    console.print(table)


def _cell(finding: Finding) -> str:
    low, high = (100 * bound for bound in finding.expected)
    mark = "" if finding.fits else "  NOT expected"
    return f"{100 * finding.error:.2f}{mark}\n({low:.2f} to {high:.2f})"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, help="JSON to write")
    arguments = parser.parse_args()
    console = Console(width=120, highlight=False)
    plain, outlying = without_outliers(), with_outliers()
    show(console, "Relative errors in %, and what is expected", plain, sources=True)
    show(console, f"With outliers of {OUTLIER:,.0f} times the rest in x", outlying, sources=False)
    fit = sum(finding.fits for finding in (*plain, *outlying))
    console.print(f"{fit} of {len(plain) + len(outlying)} are in the range that is expected")
    if arguments.output:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "python": platform.python_version(),
            "jax": importlib.metadata.version("jax"),
            "sources": SOURCES,
            "without_outliers": [dataclasses.asdict(finding) for finding in plain],
            "with_outliers": [dataclasses.asdict(finding) for finding in outlying],
        }
        arguments.output.parent.mkdir(parents=True, exist_ok=True)
        arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if fit == len(plain) + len(outlying) else 1


if __name__ == "__main__":
    sys.exit(main())
