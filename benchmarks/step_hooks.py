"""Time what a run does besides its steps: a clock of the CPU around every hook of the loop.

    python benchmarks/step_hooks.py

Two processes train one small program on this machine. Over 500 steps the CPU time of the loop's
thread is summed in each call of a hook, and that of each other thread as a whole. What stands as
"record: ..." is a part of "record". The product on a device runs in XLA's threads and is not
counted: 20 ms of a device in 100 steps.
"""

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))
RESULT = Path(__file__).parent / "results" / "step_hooks.json"
STEPS, PROCESSES = 500, 2
WARM_STEPS = 20
BAR_MILLISECONDS = 3.0
HOOKS = {
    "end of a step, asked for": ("training_loop", "StepEnds.of"),
    "profile, before": ("step_profiler", "StepProfiler.begin_step"),
    "profile, behind": ("step_profiler", "StepProfiler.end_step"),
    "slowest process, dispatch": ("slowest", "SlowestWatch.dispatched"),
    "slowest process, end": ("slowest", "SlowestWatch.ended"),
    "record": ("training_loop", "TrainingLoop._record"),
}
"""Hooks in the loop's thread, by module of `geojax.train` and name."""
PARTS = {
    "record: metrics, trackers": ("metrics", "MetricsWriter.write"),
    "record: goodput": ("goodput", "GoodputLedger.step"),
    "record: progress": ("report", "Progress.update"),
    "record: spikes": ("training_loop", "TrainingLoop._note_spikes"),
    "record: plan": ("adapt.comparison", "PlanComparison.record"),
}
"""Parts of `record`."""
THREADS = {
    "thread: ends of steps": ("training_loop", "StepEnds._note"),
    "thread: slowest process": ("slowest", "SlowestWatch._work"),
    "thread: files": ("writing.background_writer", "BackgroundWriter._work"),
}
"""Functions of threads that live as long as the run; there may be several of one."""


class Clocks:
    """Sums of CPU seconds by hook, from the first step after the warm ones on."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()
        self.calls: Counter[str] = Counter()
        self.is_on = False
        self.process = 0.0
        self.threads: list[tuple[str, int]] = []
        """Hooks and clocks of threads."""

    def begin(self) -> None:
        """Count from now on."""
        self.is_on, self.process = True, time.process_time()
        for name, clock in self.threads:
            self.seconds[name] -= time.clock_gettime(clock)

    def end(self) -> None:
        """Count no longer."""
        self.is_on, self.process = False, time.process_time() - self.process
        for name, clock in self.threads:
            self.seconds[name] += time.clock_gettime(clock)
            self.calls[name] += 1

    def around(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the call with a clock of its thread around it."""

        @functools.wraps(call)
        def clocked(*arguments: Any, **named: Any) -> Any:
            began = time.thread_time()
            try:
                return call(*arguments, **named)
            finally:
                if self.is_on:
                    self.seconds[name] += time.thread_time() - began
                    self.calls[name] += 1

        return clocked

    def of_thread(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function of a thread, whose clock is read at the first and the last step."""

        @functools.wraps(call)
        def clocked(*arguments: Any, **named: Any) -> Any:
            clock = time.pthread_getcpuclockid(threading.get_ident())
            self.threads.append((name, clock))
            return call(*arguments, **named)

        return clocked


def put_around(hooks: dict[str, tuple[str, str]], wrap: Callable[..., Any]) -> None:
    """Replace each function of `hooks` by what `wrap` makes of its name and itself."""
    import importlib

    for name, (module, path) in hooks.items():
        owner: Any = importlib.import_module(f"geojax.train.{module}")
        *outer, last = path.split(".")
        for part in outer:
            owner = getattr(owner, part)
        if hasattr(owner, last):
            setattr(owner, last, wrap(name, getattr(owner, last)))


def work(config: str, folder: Path) -> int:
    """Train in this process with clocks, and write the sums."""
    from geojax.cli.main import run
    from geojax.train.training_loop import TrainingLoop

    clocks = Clocks()
    put_around(HOOKS | PARTS, clocks.around)
    put_around(THREADS, clocks.of_thread)
    record = TrainingLoop._record

    def counted(loop: Any, step: int, *rest: Any) -> None:
        record(loop, step, *rest)
        if step == WARM_STEPS:
            clocks.begin()
        elif step == WARM_STEPS + STEPS:
            clocks.end()

    # Users need no hook there, so that the loop has none.
    TrainingLoop._record = counted  # type: ignore[method-assign]
    code = run(["train", config])
    content = {"seconds": clocks.seconds, "calls": clocks.calls, "process_seconds": clocks.process}
    number = os.environ["GEOJAX_PROCESS_ID"]
    (folder / f"{number}.json").write_text(json.dumps(content))
    return code


def measure() -> list[dict[str, Any]]:
    """Train with two processes; return the milliseconds of CPU a step of each, by hook."""
    from support.small_runs import environment, prepare_corpus, write_config

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "corpus").mkdir()
        total = WARM_STEPS + STEPS
        config = write_config(
            folder / "run.yaml",
            prepare_corpus(folder / "corpus"),
            steps=total,
            mesh={"dc": 2},
            simulate_devices=1,
            evaluation={"interval": 10 * total},
            checkpoint={"interval": 10 * total},
        )
        command = [sys.executable, "-m", "geojax", "launch", "--sites", str(PROCESSES), "--"]
        command += [sys.executable, str(Path(__file__).resolve()), "--work", str(config), name]
        done = subprocess.run(
            command, env=environment(), capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
        processes = []
        for number in range(PROCESSES):
            content = json.loads((folder / f"{number}.json").read_text())
            hooks = {
                hook: 1e3 * content["seconds"][hook] / STEPS
                for hook in (*HOOKS, *PARTS, *THREADS)
                if content["calls"].get(hook)
            }
            whole = sum(value for hook, value in hooks.items() if hook not in PARTS)
            processes.append(
                {
                    "hooks": {hook: round(value, 4) for hook, value in hooks.items()},
                    "all": round(whole, 3),
                    "process": round(1e3 * content["process_seconds"] / STEPS, 1),
                }
            )
        lines = (folder / "run" / "metrics.jsonl").read_text().splitlines()
        seconds = sorted(json.loads(line)["seconds"] for line in lines if '"seconds"' in line)
        for process in processes:
            process["median_step_seconds"] = round(seconds[len(seconds) // 2], 4)
        return processes


def main() -> None:
    """Measure, print the table and write the result; exit with 1 above the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", nargs=2, metavar=("CONFIG", "FOLDER"))
    parser.add_argument("--output", type=Path, default=RESULT)
    chosen = parser.parse_args()
    if chosen.work:
        raise SystemExit(work(chosen.work[0], Path(chosen.work[1])))
    processes = measure()
    names = list(dict.fromkeys(hook for process in processes for hook in process["hooks"]))
    print(f"{'CPU of a step, ms':28}" + "".join(f"process {n:<4}" for n in range(PROCESSES)))
    for hook in names:
        values = [process["hooks"].get(hook, 0.0) for process in processes]
        print(f"{hook:28}" + "".join(f"{value:<12.3f}" for value in values))
    print(f"{'all':28}" + "".join(f"{process['all']:<12.3f}" for process in processes))
    content = {
        "command": " ".join(["python benchmarks/step_hooks.py", *sys.argv[1:]]),
        "steps": STEPS,
        "bar_milliseconds": BAR_MILLISECONDS,
        "load_average": os.getloadavg(),
        "milliseconds_of_cpu_a_step": processes,
    }
    chosen.output.write_text(json.dumps(content, indent=1) + "\n")
    raise SystemExit(int(max(process["all"] for process in processes) > BAR_MILLISECONDS))


if __name__ == "__main__":
    main()
