"""How the benchmark's parent and its workers talk: one JSON object a line, over pipes.

A worker computes only while it is asked to, so workers that live side by side take turns.
"""

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Handler = Callable[..., Any]


def pin_to_cores(threads: int) -> None:
    """Keep this process on `threads` of its cores; call it before JAX or PyTorch is imported."""
    os.environ["OMP_NUM_THREADS"] = str(threads)
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:threads])


def serve(handlers: dict[str, Handler]) -> None:
    """Answer requests `{"do": name, ...arguments}` on stdin with `{"answer": ...}` on stdout.

    What libraries print to stdout goes to stderr instead.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        answer = handlers[request.pop("do")](**request)
        answers.write(json.dumps({"answer": answer}) + "\n")


def time_calls(call: Callable[[], Any], count: int) -> list[float]:
    """Seconds of each of `count` calls; `call` returns when its work is done."""
    seconds = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return seconds


def reset_peak_memory() -> None:
    """Let the process's peak memory begin again at what it holds now."""
    Path("/proc/self/clear_refs").write_text("5")


def memory_bytes() -> dict[str, int]:
    """Resident memory of this process, now and at its peak."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    kibibytes = {"now": status["VmRSS"], "peak": status["VmHWM"]}
    return {name: int(value.split()[0]) * 1024 for name, value in kibibytes.items()}
