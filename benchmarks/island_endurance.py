"""A long run of two islands: its memory, threads and sockets from beginning to end.

    python benchmarks/island_endurance.py        # on Linux, without root; --help says more

Two jobs of `geojax train` on this machine, `dc.join: islands`, train a small model for 2,000 steps,
with validation and checkpoints on the way. All processes of each job are watched
from outside. A figure is *flat* if it does not grow from a tenth of the steps to
their end: threads and sockets not at all, memory by no more than a tenth.
"""

import argparse
import json
import os
import secrets
import shlex
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table

from geojax.data import PrepareSettings, prepare

ROOT = Path(__file__).resolve().parents[1]
SITES = ("east", "west")
FIGURES = {"resident_megabytes": 1.1, "threads": 1.0, "open_files": 1.0, "sockets": 1.0}
"""Figures of a job, and the factor by which each may grow."""
SAMPLE_SECONDS = 1.0
SILENCE_SECONDS = 300.0
SHARES = (0.1, 0.5, 1.0)
"""Parts of the steps after which figures are shown."""
WINDOW = 0.05
"""Part of the steps before and after each of those, of whose samples the medians count."""


def write_run(folder: Path, steps: int) -> Path:
    """Write a corpus and the config of a run on it; return the config's path."""
    lines = [
        json.dumps({"text": " ".join(f"{word} is {number * word % 17}" for word in range(30))})
        for number in range(300)
    ]
    text = folder / "text.jsonl"
    text.write_text("\n".join(lines))
    sources = ({"name": "sums", "files": (str(text),), "validation_fraction": 0.1},)
    prepared = prepare(PrepareSettings(output=folder, sources=sources, vocab_size=300))
    config = {
        "run_directory": str(folder / "run"),
        "steps": steps,
        "simulate_devices": 2,
        "mesh": {"dc": len(SITES), "data": 2},
        "dc": {"join": "islands"},
        "model": {
            "num_hidden_layers": 4,
            "hidden_size": 64,
            "num_attention_heads": 4,
            "intermediate_size": 128,
            "vocab_size": 301,
            "max_position_embeddings": 32,
        },
        "data": {"sources": [{"name": "sums", "prepared": str(prepared[0].folder)}]},
        "batch": {"global_batch_size": 8, "sequence_length": 32, "microbatches": 2},
        "precision": "fp32",
        "evaluation": {"interval": max(1, steps // 20), "sequences": 8},
        "checkpoint": {"interval": max(1, steps // 20)},
    }
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def start_site(config: Path, site: str, port: int, key: str, log: Path) -> subprocess.Popen[bytes]:
    """Start the job of one site."""
    variables = {
        "GEOJAX_SITE": site,
        "GEOJAX_ISLANDS": ",".join(SITES),
        "GEOJAX_ISLANDS_COORDINATORS": f"127.0.0.1:{port}",
        "GEOJAX_KEY": key,
        "GEOJAX_ISLANDS_ADDRESS": "127.0.0.1",
        "PYTHONPATH": str(ROOT),
    }
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "geojax", "train", str(config)],
            stdout=output,
            stderr=subprocess.STDOUT,
            env=os.environ | variables,
        )


def descendants(process: int) -> Iterator[int]:
    """Yield a process and all that it started and that still run."""
    yield process
    for thread in Path(f"/proc/{process}/task").iterdir():
        for child in (thread / "children").read_text().split():
            yield from descendants(int(child))


def figures_of(process: int) -> dict[str, float]:
    """Sum the figures of a job's processes."""
    total = dict.fromkeys(FIGURES, 0.0)
    for each in descendants(process):
        folder = Path(f"/proc/{each}")
        pages = int((folder / "statm").read_text().split()[1])
        files = [os.readlink(file) for file in (folder / "fd").iterdir() if file.is_symlink()]
        total["resident_megabytes"] += pages * os.sysconf("SC_PAGE_SIZE") / 1e6
        total["threads"] += len(os.listdir(folder / "task"))
        total["open_files"] += len(files)
        total["sockets"] += sum(file.startswith("socket:") for file in files)
    return total


def last_step(metrics: Path) -> int:
    """Return the last step that a run has written down; 0 before the first."""
    if not metrics.exists():
        return 0
    whole = metrics.read_bytes().rpartition(b"\n")[0]
    return int(json.loads(whole.rpartition(b"\n")[2])["step"]) if whole else 0


def watch(jobs: dict[str, subprocess.Popen[bytes]], run: Path) -> dict[str, list[dict[str, Any]]]:
    """Sample the figures of all jobs until they end."""
    samples: dict[str, list[dict[str, Any]]] = {site: [] for site in jobs}
    moved, newest = time.monotonic(), 0
    while all(job.poll() is None for job in jobs.values()):
        for site, job in jobs.items():
            step = last_step(run / site / "metrics.jsonl")
            try:
                samples[site].append({"step": step} | figures_of(job.pid))
            except (FileNotFoundError, ProcessLookupError):
                continue  # a process has ended meanwhile
            if step > newest:
                moved, newest = time.monotonic(), step
        if time.monotonic() - moved > SILENCE_SECONDS:
            raise SystemExit(f"no step for {SILENCE_SECONDS:.0f} s after step {newest}")
        time.sleep(SAMPLE_SECONDS)
    for job in jobs.values():
        job.wait(SILENCE_SECONDS)
    return samples


def at_shares(samples: list[dict[str, Any]], steps: int) -> list[dict[str, float]]:
    """Return the medians of the figures around each of `SHARES` of the steps.

    Checkpoints have threads and files of their own for a moment.
    """
    trained = [each for each in samples if 0 < each["step"] < steps]
    assert trained, "the run must last longer than a sample"
    made = []
    for share in SHARES:
        near = [each for each in trained if abs(each["step"] / steps - share) < WINDOW]
        near = near or [min(trained, key=lambda each: abs(each["step"] / steps - share))]
        made.append({name: statistics.median(each[name] for each in near) for name in FIGURES})
    return made


def main() -> int:
    """Train, watch, print the table, write the record."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--output", type=Path, help="JSON to write")
    options = parser.parse_args()
    console = Console(width=120, highlight=False, markup=False)
    with tempfile.TemporaryDirectory(prefix="geojax-islands-") as name:
        folder = Path(name)
        config = write_run(folder, options.steps)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        key = secrets.token_hex(16)
        logs = {site: folder / f"{site}.log" for site in SITES}
        started = time.monotonic()
        jobs = {site: start_site(config, site, port, key, log) for site, log in logs.items()}
        try:
            samples = watch(jobs, folder / "run")
        finally:
            for job in jobs.values():
                job.send_signal(signal.SIGKILL)
        seconds = time.monotonic() - started
        for site, job in jobs.items():
            if job.returncode:
                console.print(logs[site].read_text(errors="replace"))
                return 1
    table = Table("site", "figure", *(f"at {share:.0%}" for share in SHARES), "flat")
    flat = True
    for site, series in samples.items():
        chosen = at_shares(series, options.steps)
        for figure, factor in FIGURES.items():
            values = [each[figure] for each in chosen]
            held = values[-1] <= factor * values[0]
            flat &= held
            table.add_row(
                site, figure, *(f"{value:.0f}" for value in values), "yes" if held else "NO"
            )
    console.print(table)
    console.print(f"{options.steps} steps in {seconds:.0f} s")
    if options.output is not None:
        record = {
            "command": shlex.join(["python", *sys.argv]),
            "cores": len(os.sched_getaffinity(0)),
            "steps": options.steps,
            "seconds": seconds,
            "figures": {site: at_shares(series, options.steps) for site, series in samples.items()},
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if flat else 1


if __name__ == "__main__":
    raise SystemExit(main())
