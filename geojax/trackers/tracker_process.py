"""The process of a tracker, as the run sees it: a call may fail or hang, and then it is ended.

A library in a process of its own cannot hold Python's lock while a step is dispatched, end the run,
take its signals, or print between its lines.
"""

import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from geojax.trackers import tracker_child

_ANSWER_SECONDS = 300.0
"""Time for a call; wandb takes up to 90 s to begin."""
_RESTART_SECONDS = 60.0
_CHECK_SECONDS = 120.0
_READ_BYTES = 4096


class TrackerError(Exception):
    """A tracker that did not do what it was asked; the message is the reason."""


class TrackerProcess:
    """A tracker in a process of its own, for one thread.

    A process that ends or hangs is started again by a later call, and so is one that could not
    begin, after a pause.

    Args:
        tracker: class of the tracker, as `module:Class`.
        arguments: the class is called with them.
        output: file for what the library prints.
        answer_seconds: time for a call.
        restart_seconds: pause before a process is started again.
    """

    def __init__(
        self,
        tracker: str,
        arguments: Mapping[str, Any],
        output: Path,
        *,
        answer_seconds: float = _ANSWER_SECONDS,
        restart_seconds: float = _RESTART_SECONDS,
    ):
        made = {"class": tracker, "arguments": dict(arguments), "log": str(output)}
        self._made = json.dumps(made).encode()
        self._answer_seconds, self._restart_seconds = answer_seconds, restart_seconds
        self._facts: Mapping[str, Any] = {}
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()
        self._is_closed = False
        self._may_start = 0.0
        self._failure = ""

    def start(self, facts: Mapping[str, Any]) -> None:
        """Start the process, and its tracker with the fields of a `TrackedRun`.

        Raises:
            TrackerError: it cannot be done now.
        """
        self._facts = facts
        self._started()

    def log(self, line: bytes) -> None:
        """Hand over the numbers of a step.

        Args:
            line: those of `log_line`.

        Raises:
            TrackerError: they are lost.
        """
        self._ask(self._started(), line)

    def finish(self, exit_code: int) -> None:
        """End the record and the process.

        Raises:
            TrackerError: the tracker could not end its record.
        """
        process = self._process
        if process is None:
            return
        self._ask(process, json.dumps(["finish", exit_code]).encode())
        assert process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError):
            process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(self._answer_seconds)

    def kill(self) -> None:
        """End the process at once, from any thread, and start no other."""
        self._is_closed = True
        # The thread holds the lock while it starts a process, which a dead file system may delay.
        if self._lock.acquire(timeout=1.0):
            try:
                if self._process is not None:
                    _kill(self._process)
            finally:
                self._lock.release()

    def _started(self) -> subprocess.Popen[bytes]:
        """Return the process; start it if need be."""
        if self._process is not None:
            return self._process
        if time.monotonic() < self._may_start:
            raise TrackerError(self._failure)
        with self._lock:
            if self._is_closed:
                raise TrackerError("the run has ended")
            self._process = process = _begun()
        try:
            self._ask(process, self._made)
            self._ask(process, json.dumps(["start", self._facts]).encode())
        except TrackerError as error:
            self._give_up(process, str(error))
            raise
        return process

    def _ask(self, process: subprocess.Popen[bytes], line: bytes) -> None:
        assert process.stdin is not None, "it is a pipe"
        try:
            process.stdin.write(line + b"\n")
            process.stdin.flush()
            answer = _answer(process, time.monotonic() + self._answer_seconds)
        except OSError:  # a broken pipe
            answer = b""
        if answer is None:
            reason = f"no answer for {self._answer_seconds:.0f} s, and its process is ended"
            self._give_up(process, reason)
            raise TrackerError(reason)
        if not answer:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(1.0)
            reason = f"its process has ended (exit code {process.returncode})"
            self._give_up(process, reason)
            raise TrackerError(reason)
        if (failure := json.loads(answer)) is not None:
            raise TrackerError(failure)

    def _give_up(self, process: subprocess.Popen[bytes], reason: str) -> None:
        self._may_start, self._failure = time.monotonic() + self._restart_seconds, reason
        with self._lock:
            self._process = None
        _kill(process)
        for pipe in (process.stdin, process.stdout):
            assert pipe is not None, "it is a pipe"
            with contextlib.suppress(OSError):
                pipe.close()


def log_line(step: int, values: Mapping[str, float]) -> bytes:
    """Return the line that hands over the numbers of a step."""
    return json.dumps(["log", step, dict(values)]).encode()


def check_class(name: str) -> str | None:
    """Import `module:Class` in a process of its own.

    Returns:
        Why it is no tracker; None: it is one.
    """
    program = (
        f"import sys; from {tracker_child.__name__} import find_class; find_class(sys.argv[1])"
    )
    try:
        done = subprocess.run(
            [sys.executable, "-c", program, name],
            env=_environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=_CHECK_SECONDS,
            check=False,
            start_new_session=True,
        )
    except subprocess.TimeoutExpired:
        return f"its import takes more than {_CHECK_SECONDS:.0f} s"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").strip().splitlines()
    return lines[-1] if lines else f"its import ends Python with exit code {done.returncode}"


def _begun() -> subprocess.Popen[bytes]:
    """Start a process that no signal of the terminal reaches."""
    try:
        return subprocess.Popen(
            [sys.executable, "-m", tracker_child.__name__],
            env=_environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError as error:
        raise TrackerError(f"its process cannot be started ({error.strerror})") from None


def _environment() -> dict[str, str]:
    """Return the environment of the process, which finds the modules of this one and no device."""
    path = os.pathsep.join(dict.fromkeys([str(Path.cwd()), *filter(None, sys.path)]))
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def _answer(process: subprocess.Popen[bytes], deadline: float) -> bytes | None:
    """Return a line of the process; b"": it has ended; None: there is none until `deadline`."""
    assert process.stdout is not None, "it is a pipe"
    descriptor, line = process.stdout.fileno(), b""
    poll = select.poll()
    poll.register(descriptor, select.POLLIN)
    while not line.endswith(b"\n"):
        if not poll.poll(max(0.0, deadline - time.monotonic()) * 1000):
            return None
        read = os.read(descriptor, _READ_BYTES)
        if not read:
            return b""
        line += read
    return line


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and those of its group."""
    if process.poll() is None:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
