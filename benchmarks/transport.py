"""Messages between separate JAX runtimes over an emulated long link, beside a plain TCP socket.

    python benchmarks/transport.py        # as root, on Linux

Two sites, each a network namespace pinned to a core, exchange fp32 arrays both ways at once:

- *rate*: payload each way, messages of 8 MiB, four in flight, all processes of a site together;
- *tick*: computation of 25 ms beside a message of 1 MB both ways, with 1, 2 and 4 in flight: time
  of a tick beyond that of the computation alone a moment before, and the part of it that was waited
  for a message, medians of five rounds. The rest is processor time: computation, transfers and, in
  one site, the emulation of the link share a core here;
- *endurance*: 2,000 messages of 1 MB; memory, threads and open files at a tenth and at the end,
  and processor time per GB, of the process and of its children.

The baseline is one TCP connection a process with a thread that sends and one that receives.
It neither authenticates nor bounds anything, and its bytes never become a JAX array.

With `--beside` another checkout of geojax exchanges the same messages, with one process a site, in
alternation with this one.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jaxlib
from rich.console import Console
from rich.table import Table

from geojax.wan import EmulatedWan, WanSettings, bring_up, take_down

NAME = "transport"
ROOT = Path(__file__).resolve().parents[1]
OUTPUT = ROOT / "benchmarks" / "results" / "transport.json"
WINDOWS = [1, 2, 4]
SIDES = [("socket", 1), ("transport", 1), ("transport", 2)]
TIMEOUT_SECONDS = 280


def measure(wan: EmulatedWan, work: dict[str, Any], port: int, root: Path) -> list[dict[str, Any]]:
    """Return the figures of each process of both sites, of the checkout at `root`."""
    cores = sorted(os.sched_getaffinity(0))
    started = []
    for site, namespace in enumerate(wan.sites):
        for process in range(work["processes"]):
            facts = {
                "site": site,
                "process": process,
                "coordinator": f"{wan.sites[0].address}:{port}",
                "site_coordinator": f"127.0.0.1:{port + 5}",
            }
            worker = root / "benchmarks" / "transport_worker.py"
            command = [sys.executable, str(worker), json.dumps(work | facts)]
            core = str(cores[site % len(cores)])
            started.append(
                subprocess.Popen(
                    [*namespace.command_prefix, "taskset", "-c", core, *command],
                    stdout=subprocess.PIPE,
                    text=True,
                    env=os.environ | {"PYTHONPATH": str(root)},
                )
            )
    try:
        outputs = [process.communicate(timeout=TIMEOUT_SECONDS)[0] for process in started]
    finally:
        for process in started:
            process.kill()
    return [json.loads(output.splitlines()[-1]) for output in outputs]


def row(name: str, processes: int, figures: list[dict[str, Any]]) -> list[str]:
    """Return the row of one contestant in the table."""
    here = figures[:processes]
    rate = sum(each["rate"]["bits_per_second"] for each in here) / 1e6
    ticks = []
    for place in range(len(WINDOWS)):
        rounds = [each for process in figures for each in process["ticks"][place]["rounds"]]
        longer = statistics.median(
            each["tick_seconds"] - each["compute_seconds"] for each in rounds
        )
        waited = statistics.median(each["waited_seconds"] for each in rounds)
        ticks.append(f"+{longer * 1e3:.1f}, {waited * 1e3:.1f}")
    series = [each["endurance"]["resources"] for each in figures]
    growth = max(
        samples[-1]["resident_megabytes"] - samples[1]["resident_megabytes"] for samples in series
    )
    flat = all(
        samples[-1][kind] == samples[1][kind]
        for samples in series
        for kind in ("threads", "open_files")
    )
    processor = max(each["endurance"]["processor_seconds_per_gigabyte"] for each in figures)
    return [
        name,
        str(processes),
        f"{rate:.0f}",
        *ticks,
        f"{growth:+.1f}",
        "yes" if flat else "no",
        f"{processor:.1f}",
    ]


def main() -> None:
    """Measure all contestants, print the table, write the record."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=2000, help="messages of the endurance test")
    parser.add_argument("--round-trip", type=float, default=0.021, help="seconds")
    parser.add_argument("--gigabits", type=float, default=1.0, help="rate of the link a second")
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--beside", type=Path, help="another checkout of geojax")
    parser.add_argument("--alternations", type=int, default=5, help="with --beside")
    options = parser.parse_args()
    bytes_per_second = options.gigabits * 1e9 / 8
    work = {
        "round_trip": options.round_trip,
        "bytes_per_second": bytes_per_second,
        "rate_messages": 40,
        "ticks": 20,
        "rounds": 5,
        "tick_seconds": 0.025,
        "windows": WINDOWS,
        "steps": options.steps,
    }
    settings = WanSettings(round_trip_seconds=options.round_trip, bytes_per_second=bytes_per_second)
    table = Table(
        "",
        "processes a site",
        "rate, Mbit/s",
        *(f"tick +ms, waited, {each} in flight" for each in WINDOWS),
        "memory, MB",
        "threads, files flat",
        "processor s/GB",
    )
    console, record = Console(width=140), []
    wan = bring_up(settings, NAME)
    try:
        for number, (name, side, processes, root) in enumerate(contestants(options)):
            facts = {"side": side, "processes": processes}
            figures = measure(wan, work | facts, 7300 + 10 * number, root)
            record.append({"name": name} | facts | {"figures": figures})
            table.add_row(*row(name, processes, figures))
            console.print(table)
    finally:
        take_down(NAME)
    options.output.write_text(
        json.dumps(
            {
                "command": shlex.join(["python", *sys.argv]),
                "machine": {"processor": processor_name(), "cores": len(os.sched_getaffinity(0))},
                "versions": {
                    "python": platform.python_version(),
                    "jax": jax.__version__,
                    "jaxlib": jaxlib.__version__,
                },
                "link": [each.measured.model_dump() for each in wan.links if each.measured],
                "work": work,
                "contestants": record,
            },
            indent=1,
        )
        + "\n"
    )


def contestants(options: argparse.Namespace) -> list[tuple[str, str, int, Path]]:
    """Return name, side, processes a site and checkout of each measurement, in order."""
    if options.beside is None:
        return [(side, side, processes, ROOT) for side, processes in SIDES]
    both = [("this", ROOT), (options.beside.name, options.beside.resolve())]
    return [
        (name, "transport", 1, root)
        for turn in range(options.alternations)
        for name, root in (both if turn % 2 else both[::-1])
    ]


def processor_name() -> str:
    """Return the processor's name."""
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor()


if __name__ == "__main__":
    main()
