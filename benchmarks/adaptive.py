"""A link falls to a fifth of its rate under a run, which plans anew for it; and a run planned so.

    python benchmarks/adaptive.py        # as root, on Linux; --help says more

Two processes of `geojax train`, a site each, train over the link that `geojax wan up` emulates.
After some steps its rate falls to a fifth. The run sees that in three windows, plans anew at the
next checkpoint (`adapt.replan`, with compression allowed) and goes on. A second run has that link,
and the plan for it, from its start. Steps per minute are of the median step: before the fall,
between the fall and the new plan, after it, and of the second run without its first steps.
"""

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from island_endurance import write_run
from rich.console import Console

from geojax.config.run_config import RunConfig
from geojax.planner.resolve.changed_links import planned_for
from geojax.topology import Topology
from geojax.wan import EmulatedWan, WanSettings, bring_up, reshape, take_down

ROOT = Path(__file__).resolve().parents[1]
NAME = "adaptive"
SITES = ("east", "west")
ROUND_TRIP_SECONDS = 0.021
BYTES_PER_SECOND = 50e6
FALL = 5
FALL_AFTER_STEP = 7
STEPS_AFTER = 18
"""Steps after the new plan, and of the second run."""
WARM_UP = 3
INTERVAL = 3
SILENCE_SECONDS = 120.0


def write_config(folder: Path, join: str, bytes_per_second: float, steps: int) -> RunConfig:
    """Write a run's corpus, topology and config; return the config."""
    content = yaml.safe_load(write_run(folder, steps).read_text())
    site = {
        "hosts": 1,
        "accelerators_per_host": 1,
        "accelerator": {"name": "core", "peak_flops_per_second": {"float32": 130e9}},
    }
    link = {"round_trip_seconds": ROUND_TRIP_SECONDS, "bytes_per_second": bytes_per_second}
    topology = {
        "sites": [{"name": name, **site} for name in SITES],
        "links": [{"sites": list(SITES), **link}],
    }
    (folder / "topology.yaml").write_text(yaml.safe_dump(topology))
    content |= {
        "topology": str(folder / "topology.yaml"),
        "steps": steps,
        "simulate_devices": 1,
        "mesh": {"dc": 2},
        "dc": {"join": join},
        "batch": {"global_batch_size": 8, "sequence_length": 32},
        "evaluation": {"interval": 10**6, "sequences": 1},
        "checkpoint": {"interval": INTERVAL},
        "adapt": {"interval": INTERVAL, "replan": True, "compression": True},
    }
    content["model"] |= {"num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 704}
    (folder / "run.yaml").write_text(yaml.safe_dump(content))
    return RunConfig.model_validate(content)


@contextmanager
def trained(folder: Path, *overrides: str) -> Iterator[subprocess.Popen[bytes]]:
    """Start the run of a folder in the sites of the emulated network; it ends with the context."""
    config = yaml.safe_load((folder / "run.yaml").read_text())
    islands = ["--islands"] if config["dc"]["join"] == "islands" else []
    command = [
        *(sys.executable, "-m", "geojax", "launch", "--wan", "--wan-name", NAME, *islands),
        *("--", "train", str(folder / "run.yaml"), *overrides),
    ]
    variables = {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | variables)
    try:
        yield job
    finally:
        if job.poll() is None:
            job.send_signal(signal.SIGTERM)
            job.wait(60)


def steps_of(folder: Path) -> dict[int, dict[str, Any]]:
    """Return the metrics of the run's steps so far."""
    for metrics in (folder / "run" / "metrics.jsonl", folder / "run" / SITES[0] / "metrics.jsonl"):
        if metrics.exists():
            whole = metrics.read_bytes().rpartition(b"\n")[0].splitlines()
            lines = [json.loads(line) for line in whole]
            return {line["step"]: line for line in lines if "loss" in line}
    return {}


def wait_for_step(folder: Path, job: subprocess.Popen[bytes], step: int) -> None:
    """Wait until a step is done.

    Raises:
        SystemExit: the run ended before, or stands still.
    """
    moved, newest = time.monotonic(), 0
    while newest < step:
        done = max(steps_of(folder), default=0)
        if done > newest:
            moved, newest = time.monotonic(), done
        elif job.poll() is not None or time.monotonic() - moved > SILENCE_SECONDS:
            raise SystemExit(f"no step after {newest}:\n{(folder / 'log').read_text()[-4000:]}")
        time.sleep(0.1)


def replanned_after(folder: Path) -> int:
    """Return the step after which the run went on with a new plan; 0: it has not."""
    for line in (folder / "log").read_text().splitlines():
        if "compiled anew" in line:
            return int(line.partition("step ")[2].partition(":")[0])
    return 0


def steps_per_minute(steps: dict[int, dict[str, Any]], first: int, last: int) -> float:
    """Return the pace of the median of some steps, both ends included."""
    return 60 / statistics.median(steps[step]["seconds"] for step in range(first, last + 1))


def fallen_run(folder: Path, join: str, wan: EmulatedWan, slow: WanSettings) -> dict[str, Any]:
    """Train while the link falls; return the paces, and what the log says of the new plan."""
    write_config(folder, join, BYTES_PER_SECOND, steps=1000)
    with trained(folder) as job:
        wait_for_step(folder, job, FALL_AFTER_STEP)
        reshape(wan, slow)
        fell = max(steps_of(folder))
        while not (replanned := replanned_after(folder)):
            wait_for_step(folder, job, max(steps_of(folder)) + 1)
        wait_for_step(folder, job, replanned + WARM_UP + STEPS_AFTER)
        steps = steps_of(folder)
    lines = (folder / "log").read_text().splitlines()
    words = ("link to", "planning anew", "compiled anew", "expected")
    return {
        "fell_after_step": fell,
        "replanned_after_step": replanned,
        "steps_per_minute_before": steps_per_minute(steps, WARM_UP, fell),
        "steps_per_minute_fallen": steps_per_minute(steps, fell + 2, replanned),
        "steps_per_minute_replanned": steps_per_minute(
            steps, replanned + WARM_UP, replanned + WARM_UP + STEPS_AFTER
        ),
        "log": [line for line in lines if any(word in line for word in words)],
    }


def planned_run(folder: Path, join: str, slow: WanSettings) -> dict[str, Any]:
    """Train over the fallen link with the plan for it; return its pace."""
    assert slow.bytes_per_second is not None, "the link has a rate"
    steps = 2 * WARM_UP + STEPS_AFTER
    config = write_config(folder, join, slow.bytes_per_second, steps)
    topology = Topology.load(folder / "topology.yaml")
    compression = planned_for(config, topology).communication.gradient_compression
    with trained(folder, "--communication.gradient_compression", compression) as job:
        wait_for_step(folder, job, steps)
        done = steps_of(folder)
    pace = steps_per_minute(done, 2 * WARM_UP, steps)
    return {"steps_per_minute_planned": pace, "gradient_compression": compression}


def main() -> int:
    """Train both runs of each kind, print the paces, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--joins", nargs="+", default=["one_program", "islands"])
    parser.add_argument("--output", type=Path, help="JSON to write, gone on with where it exists")
    options = parser.parse_args()
    console = Console(width=120, highlight=False, markup=False)
    fast = WanSettings(round_trip_seconds=ROUND_TRIP_SECONDS, bytes_per_second=BYTES_PER_SECOND)
    slow = fast.model_copy(update={"bytes_per_second": BYTES_PER_SECOND / FALL})
    record: dict[str, Any] = {}
    if options.output is not None and options.output.exists():
        record = json.loads(options.output.read_text())
    for join in options.joins:
        wan = bring_up(fast, NAME)
        try:
            with tempfile.TemporaryDirectory(prefix="geojax-adaptive-") as name:
                fallen, planned = Path(name, "fallen"), Path(name, "planned")
                fallen.mkdir()
                planned.mkdir()
                found = fallen_run(fallen, join, wan, slow)
                found |= planned_run(planned, join, slow)
        finally:
            take_down(NAME)
        ratio = found["steps_per_minute_replanned"] / found["steps_per_minute_planned"]
        record[join] = found | {"replanned_over_planned": ratio}
        for line in found["log"]:
            console.print(line)
        console.print(
            f"{join}: steps per minute {found['steps_per_minute_before']:.1f} before the fall, "
            f"{found['steps_per_minute_fallen']:.1f} after it, "
            f"{found['steps_per_minute_replanned']:.1f} planned anew, "
            f"{found['steps_per_minute_planned']:.1f} planned so from the start: {ratio:.3f}"
        )
        if options.output is not None:
            record["command"] = shlex.join(["python", *sys.argv])
            record["cores"] = len(os.sched_getaffinity(0))
            options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _end)  # on the way out the run ends and the link is taken down
    raise SystemExit(main())
