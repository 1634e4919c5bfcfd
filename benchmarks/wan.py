"""Training over a long link: geojax beside `jax.jit` and PyTorch, on real packets.

    python benchmarks/wan.py --quick        # as root, on Linux; --help says more

Two sites, each a network namespace with one process on one core, train the same Llama from the same
weights on the same batch in fp32, over the link that `geojax wan up` emulates. Beside that link is
a plain one without delay or limit, and packets take either while the same processes train on: a
contestant's *efficiency* is its throughput over the long link divided by its own over the plain
one, a few seconds apart, each in the fastest of its rounds. *Islands*, sites with a JAX runtime of
their own, say when their messages leave; from that follows the *bound* of their efficiency, which
the order of their work allows over the link.

Where the kernel cannot shape the link, a relay does, a thread on each of the two cores: what it
takes of them, which a real link would not, stands beside.

Steps are short, one batch without accumulation, so that the link shows. --long-steps is another
table, of steps of several microbatches: of pipelines so many that the round trips that no order can
hide are a fiftieth of a step. Pipelines of four stages a site, which share its core, train a
smaller model. Beside islands as stages stands what the event-driven simulator predicts of their
order of work over the long link, with stage times by which it has their steps over the plain one.

The first three steps of all contestants must have the same losses. Bytes are those that the sites'
interfaces count, both directions together. They see TCP segments of up to 64 KiB, before a network
card would cut them, with one header each; on a wire with an MTU of 1500 headers would be 3.5% more.
The formula is of the payload alone.

Every cell is written when it is measured, and the same command goes on with what is missing. Needs
PyTorch: pip install torch==2.13.0, here or for the interpreter that --torch-python names.
"""

import argparse
import itertools
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from wan_sides.cell import measure
from wan_sides.contestants import (
    Contestant,
    contestants,
    deep_pipelines,
    long_pipelines,
    long_steps,
)
from wan_sides.link import link
from wan_sides.record import Record
from wan_sides.report import draw, show
from wan_sides.team import ContestantFailed, worker_environment
from worker import imports

from geojax.errors import RunError, UserError
from geojax.wan import WanSettings

ROUND_TRIPS = (0.0, 0.021, 0.1)
BITS_PER_SECOND = (200e6, 1e9)
QUICK_ROW = (0.021, 1e9)
LONG_STEPS_ROW = (0.021, 700e6)
ROWS = list(itertools.product(ROUND_TRIPS, BITS_PER_SECOND))
LONG_ROWS = {
    LONG_STEPS_ROW: long_steps(),
    (0.021, 1e9): [*long_steps(), *long_pipelines(2)],
    (0.1, 1e9): [*long_pipelines(6), *deep_pipelines()],
}
"""Who takes part in each row of --long-steps."""


def title_of(round_trip: float, bits_per_second: float) -> str:
    """How the row of such a link is called."""
    return f"{round_trip * 1e3:g} ms, {bits_per_second / 1e6:g} Mbit/s"


def chosen(everyone: list[Contestant], *, quick: bool, only: list[str]) -> list[Contestant]:
    """Those who take part.

    Raises:
        UserError: what `only` names is in nobody's name.
    """
    for part in only:
        if not any(part in str(contestant) for contestant in everyone):
            raise UserError(
                f"--only {part}: nobody's name; there are {'; '.join(map(str, everyone))}"
            )
    if only:
        return [each for each in everyone if any(part in str(each) for part in only)]
    return [each for each in everyone if each.quick or not quick]


def write_weights(folder: Path) -> Path:
    """geojax's initial weights in a file, made by a process of its own."""
    path = folder / "weights.npz"
    command = [sys.executable, "-m", "wan_sides.weights", str(path)]
    subprocess.run(command, env=worker_environment(), check=True)
    return path


def run_row(
    row: tuple[float, float],
    members: list[Contestant],
    record: Record,
    arguments: argparse.Namespace,
    weights: Path,
    console: Console,
) -> int:
    """Measure those whose cell is missing, over one link; how many failed."""
    round_trip, bits_per_second = row
    title = title_of(*row)
    missing = record.missing(title, members)
    if not missing:
        return 0
    failures = 0
    cores = sorted(os.sched_getaffinity(0))[:2]
    settings = WanSettings(round_trip_seconds=round_trip, bytes_per_second=bits_per_second / 8)
    with link(settings) as joined:
        for number, contestant in enumerate(missing, 1):
            console.print(f"{title}: {number}/{len(missing)} {contestant} ...")
            try:
                cell = measure(
                    contestant,
                    joined,
                    cores,
                    weights,
                    arguments.rounds,
                    arguments.steps,
                    arguments.torch_python,
                )
                problem = record.disagreement(contestant, cell["losses"])
            except ContestantFailed as failure:
                problem = str(failure)
            if problem:
                console.print(f"  failed: {problem}")
                failures += 1
                continue
            record.add(title, contestant, cell)
            console.print(f"  efficiency {cell['efficiency']:.2f}, {cell['took_seconds']:.0f} s")
    return failures


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--quick", action="store_true", help=f"only the row {title_of(*QUICK_ROW)}, fewer variants"
    )
    parser.add_argument(
        "--long-steps",
        action="store_true",
        help="steps of several microbatches, over "
        + ", ".join(title_of(*row) for row in LONG_ROWS),
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="contestants with this in their name"
    )
    parser.add_argument("--torch-python", default=sys.executable, help="has torch and NumPy")
    parser.add_argument("--rounds", type=int, default=2, help="changes to the long link")
    parser.add_argument("--steps", type=int, default=2, help="steps between two changes")
    parser.add_argument(
        "--output",
        type=Path,
        default=Path("wan.json"),
        help="JSON file, gone on with where it exists; the chart is put beside it",
    )
    arguments = parser.parse_args()
    if arguments.rounds < 1 or arguments.steps < 1:
        parser.error("--rounds and --steps must be at least 1")
    return arguments


def benchmark(arguments: argparse.Namespace, console: Console) -> int:
    if len(os.sched_getaffinity(0)) < 2:
        raise UserError("two processes on a core each need two cores")
    rows = dict.fromkeys([QUICK_ROW] if arguments.quick else ROWS, contestants())
    if arguments.long_steps:
        rows = LONG_ROWS
    everyone = [each for members in rows.values() for each in members]
    members = chosen(everyone, quick=arguments.quick, only=arguments.only)
    if any(each.is_torch for each in members) and not imports(arguments.torch_python, "torch"):
        raise UserError(
            f"{arguments.torch_python} has no torch, with which this benchmark compares: "
            "pip install torch==2.13.0, or give an interpreter that has it as --torch-python"
        )
    record = Record(arguments.output, {"rounds": arguments.rounds, "steps": arguments.steps})
    failures = 0
    with tempfile.TemporaryDirectory() as folder:
        weights = write_weights(Path(folder))
        for row, takers in rows.items():
            own = [each for each in takers if each in members]
            failures += run_row(row, own, record, arguments, weights, console)
    titles = [title_of(*row) for row in (*ROWS, LONG_STEPS_ROW)]
    long = [each for members in LONG_ROWS.values() for each in members]
    measured = record.ordered(titles, [*contestants(), *long])
    show(console, measured)
    if measured:
        draw(measured, arguments.output.with_suffix(".png"))
    return 1 if failures else 0


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    # On the way out of an exception, processes end and the link is taken down.
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    console = Console(width=170, highlight=False, markup=False)
    try:
        return benchmark(parsed(), console)
    except (UserError, RunError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2 if isinstance(error, UserError) else 1
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
