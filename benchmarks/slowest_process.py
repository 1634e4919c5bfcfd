"""Name the slow process of four: one on a quota, one that is stopped half of the time, and none.

    python benchmarks/slowest_process.py

A quota slows a process that would use more: of four processes that share two cores each has half a
core anyway. It needs a cgroup (version 1 or 2) in which this user may write.
The stopped process gets SIGSTOP and SIGCONT in turn, every 20 ms, and has no quota that counts it.
"""

import argparse
import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parent.parent
RESULT = Path(__file__).parent / "results" / "slowest_process.json"
GROUPS = Path("/sys/fs/cgroup")
SLOW, PERIOD = 2, 100_000
"""The slow process, and microseconds of a period of its quota."""
STOPPED_SECONDS = 0.02
WINDOW_STEPS, READ_AFTER_STEPS = 100, 10


@contextlib.contextmanager
def quota_of(cores: float) -> Iterator[Path]:
    """Make a cgroup with a quota of so many cores."""
    quota = round(cores * PERIOD)
    first = (GROUPS / "cpu").is_dir()
    folder = (GROUPS / "cpu" if first else GROUPS) / f"geojax-slowest-{os.getpid()}"
    folder.mkdir()
    try:
        if first:
            (folder / "cpu.cfs_period_us").write_text(str(PERIOD))
            (folder / "cpu.cfs_quota_us").write_text(str(quota))
        else:
            (folder / "cpu.max").write_text(f"{quota} {PERIOD}")
        yield folder
    finally:
        for _ in range(100):
            with contextlib.suppress(OSError):
                folder.rmdir()
                break
            time.sleep(0.1)


def process_of_run(parent: int, index: int) -> int | None:
    """Return the process of a run by its index, among those that a launcher started."""
    wanted = f"GEOJAX_PROCESS_ID={index}".encode()
    found = None
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            variables = (folder / "environ").read_bytes().split(b"\0")
            if wanted in variables and f"BENCHMARK_SLOWEST={parent}".encode() in variables:
                found = max(found or 0, int(folder.name))  # the reaper's child
    return found


def in_group(process: int, ended: Callable[[], bool], group: Path) -> None:
    """Put a process into a cgroup."""
    (group / "cgroup.procs").write_text(str(process))


def stopped_half(process: int, ended: Callable[[], bool]) -> None:
    """Stop a process and let it go on, in turn, until the run has ended."""
    with contextlib.suppress(ProcessLookupError):
        while not ended():
            os.kill(process, signal.SIGSTOP)
            time.sleep(STOPPED_SECONDS)
            os.kill(process, signal.SIGCONT)
            time.sleep(STOPPED_SECONDS)


def train(
    folder: Path, name: str, steps: int, slow: Callable[[int, Callable[[], bool]], None] | None
) -> dict[str, Any]:
    """Train on four processes, one of them slowed; return what the run says of them."""
    run = folder / name
    config = yaml.safe_load((ROOT / "configs/quickstart.yaml").read_text())
    config |= {"run_directory": str(run), "steps": steps, "topology": None, "simulate_devices": 1}
    config["mesh"] = {"dc": 2, "data": 2}
    config["model"] |= {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}
    config["batch"] = {"global_batch_size": 4, "sequence_length": 64}
    config["evaluation"], config["sample"] = {"interval": 10 * steps, "sequences": 4}, {}
    config["checkpoint"] = {"interval": 10 * steps}
    file = folder / f"{run.name}.yaml"
    file.write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "geojax", "launch", "--sites", "2"]
    command += ["--processes-per-site", "2", "--devices-per-process", "1", "--", "train", str(file)]
    environment = os.environ | {"BENCHMARK_SLOWEST": str(os.getpid())}
    environment.pop("GEOJAX_PROCESS_ID", None)
    log = folder / f"{run.name}.log"
    with (
        log.open("w") as output,
        subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, cwd=ROOT
        ) as launched,
    ):
        while slow is not None and launched.poll() is None:
            lines = (run / "metrics.jsonl").exists() and (run / "metrics.jsonl").read_text()
            process = process_of_run(os.getpid(), SLOW) if lines else None
            if process is not None:
                slow(process, lambda: launched.poll() is not None)
                break
            time.sleep(0.2)
    if launched.returncode:
        raise SystemExit(log.read_text()[-3000:])
    events = [json.loads(line) for line in (run / "events.jsonl").read_text().splitlines()]
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    seconds = sorted(line["seconds"] for line in lines if "seconds" in line)
    named = [event["text"] for event in events if event["kind"] == "late"]
    return {
        "windows": (steps - READ_AFTER_STEPS) // WINDOW_STEPS,
        "named": named,
        "named_rightly": sum(text.startswith(f"process {SLOW} ") for text in named),
        "median_step_seconds": seconds[len(seconds) // 2],
    }


def main() -> None:
    """Measure both, and write the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cores", type=float, nargs="+", default=[0.5, 0.25])
    parser.add_argument("--steps", type=int, default=1050)
    parser.add_argument("--even-steps", type=int, default=2050)
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        runs = {"stopped": train(Path(folder), "stopped", chosen.steps, stopped_half)}
        for cores in chosen.cores:
            name = f"{cores} cores"
            with quota_of(cores) as group:
                slow = functools.partial(in_group, group=group)
                runs[name] = train(Path(folder), name.replace(" ", "-"), chosen.steps, slow)
        runs["even"] = train(Path(folder), "even", chosen.even_steps, None)
    result = {
        "command": " ".join(["python benchmarks/slowest_process.py", *sys.argv[1:]]),
        "machine_cores": os.cpu_count(),
        "load_average": os.getloadavg(),
        **runs,
    }
    chosen.output.write_text(json.dumps(result, indent=1) + "\n")
    for name, run in runs.items():
        print(
            f"{name}: of {run['windows']} windows {run['named_rightly']} name process {SLOW}, "
            f"{len(run['named'])} any"
        )


if __name__ == "__main__":
    main()
