"""The monitor that ends this process, in one line, when another one fails or falls silent.

Without the monitor a process would wait in a collective or a barrier until JAX's own heartbeat
timeout aborts it with a stack trace. A failed process would wait at its exit for a common shutdown
that cannot happen.

From the moment when all processes have connected to the key-value store, which process 0 holds, a
thread of each sends its heartbeat. Process 0 looks for those that stop; the others read whether the
job was aborted, and notice when the store no longer answers. When process 0 dies its connections
break, and JAX's client of the store wants to abort; it is delayed for as long as it takes to print
one line. Time in which this process stood still does not count.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from geojax.job.exit_messages import describe, ending_because, first_line, lost_contact
from geojax.network_names import HostPort
from geojax.runtime.jax_private import (
    calling_when_service_is_lost,
    coordination_client,
    process_index_and_count,
)
from geojax.runtime.liveness import health
from geojax.runtime.liveness.abort_notice import (
    AbortNotice,
    publish_abort_notice,
    read_abort_notice,
)
from geojax.runtime.liveness.awake_clock import AwakeClock
from geojax.runtime.liveness.heartbeat import INTERVAL_SECONDS, send_heartbeat
from geojax.runtime.liveness.lost_contact import HAND_OVER_SECONDS, reporting_lost_contact
from geojax.runtime.liveness.uncaught import before_abort

_HEARTBEATS_PER_TIMEOUT = 8
_CONNECT_SECONDS = 5.0
_COORDINATOR = ", which coordinates the run,"
_ENDED_BY_SERVICE = (
    "JAX's coordination service ended the job: a process of it was started again alone, or a "
    "stranger connected to the coordinator's port under its number (process 0 logs which number); "
    "start all processes again, and keep others from that port"
)
_stopped = threading.Event()
_threads: list[threading.Thread] = []


def abort_job(message: str, exit_code: int) -> None:
    """End this process with `exit_code`, and the others too; they print `message` as the reason.

    For an error after `start`, while the other processes go on. Print the message before: in a job
    of several processes this does not return, and ends the process without Python's clean-up. In a
    job of one process it does nothing.
    """
    if coordination_client() is None:
        return
    _stopped.set()
    publishing = threading.Thread(target=_publish_abort, args=(message, exit_code), daemon=True)
    publishing.start()
    publishing.join(INTERVAL_SECONDS)  # the store may not answer any more
    if process_index_and_count()[0] == 0:
        time.sleep(2 * INTERVAL_SECONDS)  # the others read the message from this process
    _exit(exit_code)


def start_peer_monitor(timeout_seconds: float) -> None:
    """Send heartbeats from now on, and end this process when another one aborts or falls silent.

    `geojax.runtime.start` calls it. JAX's own heartbeat timeout has to be longer.

    Args:
        timeout_seconds: how long a process may send no heartbeat.
    """
    _stopped.clear()
    monitor = _PeerMonitor(timeout_seconds)
    monitor.start_thread(monitor.exchange_heartbeats)
    if process_index_and_count()[0] == 0:
        monitor.start_thread(monitor.keep_health)
    else:
        # A thread of its own: over a link that was cut, a question to the store never returns.
        monitor.start_thread(monitor.check_coordinator)


def stop_peer_monitor() -> None:
    """Stop watching the other processes, at the orderly end of the job."""
    _stopped.set()
    while _threads:  # one that still asks the store while Python ends would abort the process
        _threads.pop().join(INTERVAL_SECONDS)


def reporting_service_errors(
    coordinator: str, process_id: int
) -> contextlib.AbstractContextManager[None]:
    """Let a client that JAX connects inside report errors of JAX's service in one line.

    When process 0 is gone later, or its service ends the job, this process prints that line and
    ends, in place of JAX's stack trace and abort.

    Args:
        coordinator: host:port of process 0.
        process_id: index of this process.
    """
    host, port = HostPort.parse(coordinator)

    def report(_: object = None) -> None:
        if _stopped.is_set():
            return
        if process_id != 0 and not _answers(host, port):
            _end_without([0], f"{_COORDINATOR} does not answer any more")
        # JAX does not let its reason through, but logs it.
        _print_error(f"error: {_ENDED_BY_SERVICE}")
        _exit(1)

    if not before_abort(report):
        return contextlib.nullcontext()
    return calling_when_service_is_lost(report)


class _PeerMonitor:
    """Threads beside the program that send this process's heartbeat and watch the others'."""

    def __init__(self, timeout_seconds: float):
        self.timeout_seconds = timeout_seconds
        self.interval_seconds = min(INTERVAL_SECONDS, timeout_seconds / _HEARTBEATS_PER_TIMEOUT)
        # A heartbeat of another process comes within the half that is left.
        self.clock = AwakeClock(timeout_seconds / 2)
        self.latest_answer = self.clock.seconds()
        """Time of the store's latest answer, by the clock."""

    def start_thread(self, target: Callable[[], None]) -> None:
        thread = threading.Thread(target=target, name=f"geojax {target.__name__}", daemon=True)
        _threads.append(thread)
        thread.start()

    def exchange_heartbeats(self) -> None:
        """Send heartbeats, and end the process when the store says that another one is gone."""
        own, _ = process_index_and_count()
        while True:
            try:
                send_heartbeat()
                notice = read_abort_notice()
            except Exception as error:
                if _stopped.is_set():
                    return
                if own != 0:
                    _end_without([0], f"{_COORDINATOR} does not answer ({first_line(error)})")
                time.sleep(self.interval_seconds)  # `keep_health` judges
                continue
            self.latest_answer = self.clock.seconds()
            if _stopped.is_set():
                return
            if notice is not None and notice.process != own:
                _print_error(ending_because(describe([notice.process]), notice.message))
                if own == 0:
                    time.sleep(2 * INTERVAL_SECONDS)  # the others read the reason here
                _exit(notice.exit_code)
            if _stopped.wait(self.interval_seconds):
                return

    def keep_health(self) -> None:
        """Report on the heartbeats of all, in process 0, and end it when one stays away."""
        _, count = process_index_and_count()
        keeper = health.HealthKeeper(count, self.timeout_seconds, self.clock.seconds())
        pause = min(health.INTERVAL_SECONDS, self.interval_seconds)
        latest = self.clock.seconds()
        while not _stopped.wait(pause):
            try:
                silent = health.keep_health(keeper, self.clock.seconds())
            except Exception as error:
                # At the end of a program that does not call `finish` the store is gone as well.
                if self.clock.seconds() - latest > self.timeout_seconds:
                    _end_without_store(error)
                continue
            latest = self.clock.seconds()
            if silent and not _stopped.is_set():
                _end_without(silent, f" sent no heartbeat for {self.timeout_seconds:g} seconds")

    def check_coordinator(self) -> None:
        """End the process when the store has not answered for too long."""
        while not _stopped.wait(self.interval_seconds):
            if self.clock.seconds() - self.latest_answer > self.timeout_seconds:
                _end_without(
                    [0], f"{_COORDINATOR} did not answer for {self.timeout_seconds:g} seconds"
                )


def _publish_abort(message: str, exit_code: int) -> None:
    with contextlib.suppress(Exception):
        publish_abort_notice(AbortNotice(process_index_and_count()[0], exit_code, message))


def _answers(host: str, port: int) -> bool:
    """Return whether a gRPC server answers; it sends first (HTTP/2, RFC 9113, section 3.4)."""
    with (
        contextlib.suppress(OSError),
        socket.create_connection((host, port), _CONNECT_SECONDS) as connection,
    ):
        return connection.recv(1) != b""
    return False


def _end_without(processes: list[int], problem: str) -> None:
    """Report that contact to `processes` is lost, tell the others, and end this process."""
    if not reporting_lost_contact.acquire(blocking=False) and _stopped.wait(HAND_OVER_SECONDS):
        time.sleep(HAND_OVER_SECONDS)  # the thread that reported tells the others
    message = lost_contact(f": {describe(processes)}{problem}")
    _print_error(f"error: {message}")
    own, count = process_index_and_count()
    if processes == [0] or set(range(count)) == {own, *processes}:
        _exit(1)  # no process is left to report to
    abort_job(message, exit_code=1)


def _end_without_store(error: Exception) -> None:
    """End the job because process 0, which holds the key-value store, cannot read it."""
    message = f"process 0 cannot read the key-value store of the job ({first_line(error)})"
    _print_error(f"error: {message}")
    abort_job(message, exit_code=1)


def _print_error(message: str) -> None:
    with contextlib.suppress(OSError):
        print(f"geojax: {message}", file=sys.stderr, flush=True)


def _exit(code: int) -> NoReturn:
    with contextlib.suppress(OSError):  # nobody may be reading the output any more
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)
