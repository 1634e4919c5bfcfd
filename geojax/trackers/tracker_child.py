"""The process of one tracker: it does what its standard input says, line by line.

    {"class": "module:Class", "arguments": {...}, "log": path}
    ["start", {...}]
    ["log", step, {...}]
    ["finish", exit_code]

Each line is answered by one on standard output: null, or the reason why it could not be done. What
the library prints goes to a file of limited size. When the run's process is gone, the input ends,
and with it this process.
"""

import contextlib
import importlib
import io
import json
import os
import resource
import signal
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

from geojax.trackers.tracker import TrackedRun, Tracker

_MOST_MEMORY = 4 << 30
"""Bytes of data of this process, and of each that a library starts."""
_MOST_OUTPUT = 1 << 20
_ENDING_SECONDS = 30.0
_LONGEST_REASON = 300
_NICENESS = 10
METHODS = ("start", "log", "finish")
"""Methods of a tracker."""


class _Output(io.TextIOBase):
    """A text file of limited size, whose failures nobody is told."""

    def __init__(self, path: Path) -> None:
        self._left = _MOST_OUTPUT
        self._file: BinaryIO | None = None
        with contextlib.suppress(OSError):
            path.parent.mkdir(exist_ok=True)
            self._file = path.open("wb", buffering=0)

    def write(self, text: str) -> int:
        content = text.encode(errors="replace")[: self._left]
        if self._file is not None and content:
            self._left -= len(content)
            with contextlib.suppress(OSError):
                self._file.write(content)
        return len(text)

    def writable(self) -> bool:
        return True


class _Served:
    """A tracker that is made and called by lines."""

    def __init__(self) -> None:
        self._tracker: Tracker | None = None
        self.is_finished = False

    def do(self, order: Any) -> None:
        """Do what a line says."""
        if isinstance(order, Mapping):
            self._tracker = find_class(order["class"])(**order["arguments"])
            return
        assert self._tracker is not None, "the first line makes the tracker"
        name, *arguments = order
        if name == "start":
            (facts,) = arguments
            run = TrackedRun(**facts | {"directory": Path(facts["directory"])})
            self._tracker.start(run)
        elif name == "log":
            self._tracker.log(*arguments)
        else:
            self.finish(*arguments)

    def finish(self, exit_code: int) -> None:
        """End the record, once."""
        if self._tracker is not None and not self.is_finished:
            self.is_finished = True
            self._tracker.finish(exit_code)


def find_class(name: str) -> Any:
    """Import a class by `module:Class`, and check that it has the methods of a tracker."""
    module_name, _, class_name = name.partition(":")
    found = getattr(importlib.import_module(module_name), class_name, None)
    if not isinstance(found, type):
        raise LookupError(f"{module_name} has no class {class_name}")
    for method in METHODS:
        if not callable(getattr(found, method, None)):
            raise LookupError(f"{class_name} has no method {method}")
    return found


def main() -> None:
    """Serve one tracker until its input ends."""
    commands, answers = os.fdopen(os.dup(0), "rb"), os.dup(1)
    _seclude()
    served = _Served()
    for line in commands:
        reason = None
        try:
            order = json.loads(line)
            if isinstance(order, Mapping):
                sys.stdout = sys.stderr = _Output(Path(order["log"]))
            served.do(order)
        except BaseException as error:  # also SystemExit: libraries call sys.exit
            reason = _reason(error)
        try:
            os.write(answers, json.dumps(reason).encode() + b"\n")
        except OSError:  # the run's process is gone
            break
    end = threading.Timer(_ENDING_SECONDS, os._exit, [1])
    end.daemon = True
    end.start()
    with contextlib.suppress(BaseException):
        served.finish(1)


def _seclude() -> None:
    """Part with the terminal, and let the run have the processor and the memory."""
    nothing = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(nothing, descriptor)
    # A scheduler that stops a run signals all its processes, and the run ends its trackers itself.
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        os.nice(_NICENESS)
    with contextlib.suppress(OSError, ValueError):
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        least = _MOST_MEMORY if most == resource.RLIM_INFINITY else min(_MOST_MEMORY, most)
        resource.setrlimit(resource.RLIMIT_DATA, (least, least))


def _reason(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [""]
    text = f"{type(error).__name__}: {lines[0]}" if lines[0] else type(error).__name__
    return text[:_LONGEST_REASON]


if __name__ == "__main__":
    main()
