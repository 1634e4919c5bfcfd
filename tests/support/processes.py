"""Processes that a test watches: any of them may end between two looks."""

import contextlib
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PATIENCE_SECONDS = 120
"""Upper bound of a wait that ends at once on an idle machine."""


def end_by_exceptions() -> None:
    """Let SIGTERM and SIGHUP end this process by an exception, on whose way out all is undone."""

    def end(number: int, frame: Any) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, end)


def wait_until(condition: Callable[[], object], what: str = "it did not come") -> None:
    """Wait for a condition; fail with `what` when it does not hold after a long time."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def is_running(process: int) -> bool:
    """Return whether a process lives; one that has ended and waits to be reaped does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def family(process: int) -> list[int]:
    """Return a process and those that it has started, by their numbers."""
    found = [process]
    for one in found:
        with contextlib.suppress(OSError):
            for thread in os.listdir(f"/proc/{one}/task"):
                with contextlib.suppress(OSError):
                    children = Path(f"/proc/{one}/task/{thread}/children").read_text()
                    found += map(int, children.split())
    return found


def open_sockets(process: int) -> set[str]:
    """Return the inodes of the sockets that a process holds open."""
    found: set[str] = set()
    with contextlib.suppress(OSError):
        for file in os.listdir(f"/proc/{process}/fd"):
            with contextlib.suppress(OSError):
                target = os.readlink(f"/proc/{process}/fd/{file}")
                if target.startswith("socket:["):
                    found.add(target[len("socket:[") : -1])
    return found
