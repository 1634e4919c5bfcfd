"""A worker's side of the talk with the harness: one JSON object a line, over pipes.

A worker computes only while it is asked to. It ends when its input does, even in the middle of a
collective that will never be over.
"""

import json
import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any


def own_work() -> dict[str, Any]:
    """What the harness told this process: its place, and its contestant's settings."""
    work: dict[str, Any] = json.loads(sys.argv[1])
    return work


def serve(handlers: dict[str, Callable[..., Any]]) -> None:
    """Answer requests `{"do": name, ...arguments}` on stdin with `{"answer": ...}` on stdout.

    What libraries print to stdout goes to stderr instead.
    """
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    requests: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(requests,), daemon=True).start()
    while True:
        request = requests.get()
        answer = handlers[request.pop("do")](**request)
        answers.write(json.dumps({"answer": answer}) + "\n")


def _listen(requests: "queue.SimpleQueue[dict[str, Any]]") -> None:
    for line in sys.stdin:
        requests.put(json.loads(line))
    os._exit(0)


def take_steps(step: Callable[[], float], count: int) -> dict[str, Any]:
    """Seconds and processor seconds that `count` steps take together, and the loss of each.

    `step` returns when its work is done.
    """
    start, processor_start = time.perf_counter(), time.process_time()
    losses = [step() for _ in range(count)]
    return {
        "seconds": time.perf_counter() - start,
        "processor_seconds": time.process_time() - processor_start,
        "losses": losses,
    }
