"""Trackers whose servers fall silent, or whose disk is full: does the run keep its pace and memory?

    pip install 'geojax-trainer[trackers,test]'
    python benchmarks/tracker_faults.py --seconds 300    # the full disk is for root, on Linux

A small model trains on two simulated sites, for so long in each case. In all of them a class of the
user's records the time of each step:

- *alone*: that class, jsonl and tensorboard; at the beginning and again at the end;
- *silent servers*: wandb and OTLP too. A server on this host answers wandb's first requests, and
  then neither; each connection is taken, and nothing is said. OTLP's server never answers;
- *full disk*: wandb offline too. The run directory lies on a small disk that is full.

Memory is the sum over the processes of resident memory that no file backs, at its most in the
first and in the last third.
"""

import argparse
import contextlib
import http.server
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.full_disk import small_disk
from support.processes import family
from support.small_runs import command, environment, prepare_corpus, write_config

OUTPUT = Path(__file__).parent / "results" / "tracker_faults.json"
WARM_STEPS = 20
PATIENCE_SECONDS = 400.0


@contextlib.contextmanager
def silent_server(falls_silent: threading.Event) -> Iterator[str]:
    """A server of wandb's requests, as far as they begin a run, until it falls silent."""

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            if falls_silent.is_set():
                ended.wait()
                return
            content = json.dumps(_ANSWER if self.path == "/graphql" else {}).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *arguments: Any) -> None:
            pass

    ended = threading.Event()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    ended.set()
    server.shutdown()


_ANSWER = {
    "data": {
        "viewer": {"id": "1", "entity": "e", "username": "u", "flags": "{}"},
        "upsertBucket": {
            "bucket": {
                "id": "1",
                "name": "run",
                "displayName": "run",
                "project": {"name": "p", "entity": {"name": "e"}},
            },
            "inserted": True,
        },
        "model": {"bucket": None},
        "createRunFiles": {"runID": "1", "uploadHeaders": [], "files": []},
    }
}


def memory_of(process: int) -> dict[str, int]:
    """Bytes of resident memory without files of the run and of all processes of its trackers."""
    of_each = {}
    for number in family(process):
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{number}/status").read_text().splitlines():
                if line.startswith("RssAnon:"):
                    of_each[number] = int(line.split()[1]) * 1024
    run = of_each.pop(process, 0)
    return {"run": run, "trackers": sum(of_each.values())}


def most_of(samples: list[dict[str, int]]) -> dict[str, int]:
    return {name: max(sample[name] for sample in samples) for name in ("run", "trackers")}


def train_for(
    seconds: float, folder: Path, trackers: list[Any], disturb: Any, mend: Any
) -> dict[str, Any]:
    """Train for `seconds` after `disturb`, then `mend` and stop; return times and memory."""
    folder.mkdir(parents=True, exist_ok=True)
    times = Path(tempfile.mkdtemp()) / "times"
    (times.parent / "corpus").mkdir()
    corpus = prepare_corpus(times.parent / "corpus")
    own = {"module": "support.observers:Recording", "path": str(times)}
    config = write_config(
        times.parent / "run.yaml",
        corpus,
        run_directory=str(folder / "run"),
        steps=10**8,
        trackers=["jsonl", "tensorboard", own, *trackers],
        checkpoint={"interval": 10**8, "interval_minutes": 1e5},
        evaluation={"interval": 10**8},
        optimizer={"peak_learning_rate": 1e-4, "warmup_steps": 5, "decay_steps": 100},
    )
    output = (times.parent / "output").open("wb")
    variables = environment(WANDB_API_KEY="a" * 40)
    process = subprocess.Popen(command(config), env=variables, stdout=output, stderr=output)
    try:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(steps_of(times)) < WARM_STEPS:
            assert process.poll() is None, (times.parent / "output").read_text()
            assert time.monotonic() < deadline, "the run does not begin"
            time.sleep(0.5)
        time.sleep(10)  # wandb begins
        disturb()
        first, samples = len(steps_of(times)), []
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            samples.append(memory_of(process.pid))
            time.sleep(1.0)
        last = len(steps_of(times))
        mend()
        before = time.monotonic()
        process.send_signal(signal.SIGINT)
        process.wait(PATIENCE_SECONDS)
        closing = time.monotonic() - before
    finally:
        if process.poll() is None:
            process.kill()
    found = sorted(steps_of(times)[first:last])
    third = max(1, len(samples) // 3)
    lines = (times.parent / "output").read_text().splitlines()
    return {
        "steps": len(found),
        "median_step_seconds": statistics.median(found),
        "step_seconds_of_99_percent": found[int(len(found) * 0.99)],
        "longest_step_seconds": found[-1],
        "memory_first_third": most_of(samples[:third]),
        "memory_last_third": most_of(samples[-third:]),
        "exit_code": process.returncode,
        "seconds_from_signal_to_end": closing,
        "warnings": sum(line.startswith("warning") for line in lines),
    }


def steps_of(times: Path) -> list[float]:
    """Seconds of the steps that were recorded."""
    with contextlib.suppress(FileNotFoundError):
        lines = times.read_text().splitlines()
        parts = [line.partition("'seconds': ")[2].partition(",")[0] for line in lines]
        return [float(part) for part in parts if part]
    return []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--output", type=Path, default=OUTPUT)
    arguments = parser.parse_args()
    results: dict[str, Any] = {
        "command": f"python benchmarks/tracker_faults.py --seconds {arguments.seconds:.0f}",
        "seconds": arguments.seconds,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores",
        "load_average": os.getloadavg(),
    }
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def note(case: str, *details: Any) -> None:
            results[case] = train_for(arguments.seconds, *details)
            print(case, json.dumps(results[case], indent=1), flush=True)
            arguments.output.write_text(json.dumps(results, indent=1) + "\n")

        def nothing() -> None:
            pass

        note("alone", folder / "alone", [], nothing, nothing)
        silent, from_start = threading.Event(), threading.Event()
        from_start.set()
        with silent_server(silent) as wandb, silent_server(from_start) as collector:
            trackers = [
                {"name": "wandb", "url": wandb},
                {"name": "otlp", "endpoint": f"{collector}/v1/metrics"},
            ]
            note("silent servers", folder / "silent", trackers, silent.set, nothing)
        with small_disk(folder / "disk") as disk:
            if disk is not None:
                trackers = [{"name": "wandb", "mode": "offline"}]
                note("full disk", disk.folder, trackers, disk.fill, disk.empty)
        note("alone again", folder / "again", [], nothing, nothing)


if __name__ == "__main__":
    main()
