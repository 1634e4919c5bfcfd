"""Supervision of workers: when one fails, all end, and the one that failed is named.

`supervise` runs all workers of a run. `supervise_sites` runs each site's by themselves, and starts
a site that has failed again.
"""

import contextlib
import dataclasses
import functools
import os
import selectors
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import IO, Any, Self

from geojax.exit_codes import COMPLETE, FINAL, UNHEALTHY
from geojax.job.exit_messages import blamed_of_site, blamed_process, blames_another
from geojax.launch.output import Output
from geojax.launch.restart_policy import RestartPolicy
from geojax.launch.workers import Worker

_FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# geojax's processes find out which of them ended, which takes up to 9 s (`runtime.liveness`), and
# tell each other within 2 s more.
SETTLE_SECONDS = 12.0
_LONGEST_LINE = 1 << 16


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Result of a run."""

    exit_code: int
    """Exit code of the worker that failed first; without a failure 0, or `UNHEALTHY` if any."""
    blamed: tuple[Worker, ...]
    """Workers that brought the run down: the one that failed first, or several that lost contact
    with each other although none of them failed. Empty if none failed."""
    stuck: bool
    """True if the blamed worker did nothing any more, so that it had to be killed."""
    stopped_by: signal.Signals | None
    """First signal that asked the launcher to stop."""

    @property
    def failed(self) -> bool:
        """True if the command was not completed; `UNHEALTHY` is a result and no failure."""
        return self.exit_code not in COMPLETE


def supervise(
    workers: Sequence[Worker],
    output: Output,
    *,
    grace_seconds: float,
    settle_seconds: float = SETTLE_SECONDS,
) -> Outcome:
    """Start all `workers`, show what they print, and return when none is left.

    SIGINT and SIGTERM are passed on to the workers, which save and end; a second one kills them.
    When one fails, the others have `settle_seconds` to print why they end, then they get SIGTERM,
    and SIGKILL `grace_seconds` later. Call it in the main thread (Python's rule for signals).
    """
    with _Signals() as signals, selectors.DefaultSelector() as selector:
        run = _Supervision(workers, output, selector, grace_seconds, settle_seconds)
        selector.register(signals.pipe, selectors.EVENT_READ)
        try:
            run.start()
            while run.living:
                for key, _ in selector.select(run.seconds_to_wait()):
                    if key.fileobj == signals.pipe:
                        for number in signals.read():
                            run.stop(number)
                    else:
                        key.data(key.fileobj)
                run.poll()
        finally:
            # After an error in the launcher no worker gets time to save.
            run.send_all(signal.SIGKILL)
    return run.outcome()


def supervise_sites(
    sites: Sequence[Sequence[Worker]],
    output: Output,
    *,
    limit: int,
    grace_seconds: float,
    settle_seconds: float = SETTLE_SECONDS,
) -> list[Outcome]:
    """Start the workers of all sites, and a site whose run has failed again, until all have ended.

    A site ends for good when it is done, is stopped, has bad input, or goes beyond the limit. When
    another site is done, a site that has made no step since its restart is ended: it came too late.

    Args:
        sites: the workers of each site.
        output: shows what they print.
        limit: most failures of a site in an hour that make no new step.
        grace_seconds: time between SIGTERM and SIGKILL for the rest of a site that has failed.
        settle_seconds: time that it has before that.

    Returns:
        The last outcome of each site, but for those that came too late.
    """
    with _Signals() as signals, selectors.DefaultSelector() as selector:
        selector.register(signals.pipe, selectors.EVENT_READ)
        runs = [
            _SupervisedSite(
                workers,
                functools.partial(
                    _Supervision, workers, output, selector, grace_seconds, settle_seconds
                ),
                RestartPolicy(limit),
                output,
            )
            for workers in sites
        ]
        try:
            for run in runs:
                run.start()
            while any(run.is_active for run in runs):
                waits = [wait for run in runs if (wait := run.seconds_to_wait()) is not None]
                for key, _ in selector.select(min(waits, default=None)):
                    if key.fileobj == signals.pipe:
                        for number in signals.read():
                            for run in runs:
                                run.stop(number)
                    else:
                        key.data(key.fileobj)
                for run in runs:
                    run.poll()
                if any(run.is_done for run in runs):
                    for run in runs:
                        run.end_if_too_late()
        finally:
            for run in runs:
                run.kill()
    return [run.outcome for run in runs if not run.came_too_late]


class _SupervisedSite:
    """A site whose workers are started again when they have failed.

    Args:
        workers: those of the site.
        supervision: returns that of the next start.
        policy: says when that is.
        output: shows why.
    """

    def __init__(
        self,
        workers: Sequence[Worker],
        supervision: Callable[[], "_Supervision"],
        policy: RestartPolicy,
        output: Output,
    ):
        self._workers, self._supervision = workers, supervision
        self._policy, self._output = policy, output
        self._run: _Supervision | None = None
        self._restart_at: float | None = None
        self._step = 0
        """Newest step of all starts so far."""
        self.outcome: Outcome
        self._has_failed = self.came_too_late = False

    @property
    def is_done(self) -> bool:
        """True if all steps are done."""
        return not self.is_active and not self.outcome.failed

    @property
    def is_active(self) -> bool:
        """True if workers run, or will be started again."""
        return self._run is not None or self._restart_at is not None

    def start(self) -> None:
        self._restart_at, self._run = None, self._supervision()
        for worker in self._workers:
            self._output.begin(worker)
        self._run.start()

    def stop(self, number: signal.Signals) -> None:
        """Pass a signal on; a site that waits for its restart ends."""
        self._restart_at = None
        if self._run is not None:
            self._run.stop(number)

    def end_if_too_late(self) -> None:
        """End the site if it starts again, and has made no step since."""
        first = self._workers[0]
        if not self.is_active or not self._has_failed or self.came_too_late:
            return
        if self._run is None or self._output.newest_step(first) == 0:
            self.came_too_late = True
            self._restart_at = None
            self._output.log(f"the run is done without site {first.site}, which is ended")
            if self._run is not None:
                self._run.send_all(signal.SIGTERM)

    def kill(self) -> None:
        if self._run is not None:
            self._run.send_all(signal.SIGKILL)

    def seconds_to_wait(self) -> float | None:
        if self._run is not None:
            return self._run.seconds_to_wait()
        return None if self._restart_at is None else max(0.0, self._restart_at - time.monotonic())

    def poll(self) -> None:
        """Note what has ended, and start again what is due."""
        if self._run is not None:
            self._run.poll()
            if not self._run.living:
                self._ended(self._run)
        elif self._restart_at is not None and time.monotonic() >= self._restart_at:
            self.start()

    def _ended(self, run: "_Supervision") -> None:
        self.outcome, self._run = run.outcome(), None
        if not self.outcome.failed or self.outcome.exit_code in FINAL or self.outcome.stopped_by:
            return
        self._has_failed = True
        first = self._workers[0]
        step = self._output.newest_step(first)
        delay = self._policy.failed(time.monotonic(), made_step=step > self._step)
        self._step = max(step, self._step)
        failed = f"site {first.site} failed, exit code {self.outcome.exit_code}"
        if delay is None:
            self._output.log(f"{failed}, without a new step, too often; it is not started again")
        else:
            self._output.log(f"{failed}; it starts again in {delay:g} s")
            self._restart_at = time.monotonic() + delay


class _Signals:
    """Context in which signals arrive as bytes in a pipe that a selector can wait for."""

    def __init__(self) -> None:
        self.pipe, self._writing = os.pipe()
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Self:
        os.set_blocking(self._writing, False)
        self._wakeup = signal.set_wakeup_fd(self._writing)
        for number in (*_FORWARDED, signal.SIGCHLD):
            self._previous[number] = signal.signal(number, _do_nothing)
        return self

    def __exit__(self, *exception: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._wakeup)
        os.close(self.pipe)
        os.close(self._writing)

    def read(self) -> list[signal.Signals]:
        """Return the signals since the last call that ask to stop."""
        return [signal.Signals(n) for n in os.read(self.pipe, 4096) if n in _FORWARDED]


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


class _RunningWorker:
    """A started worker, its reaper and its exit code."""

    def __init__(self, worker: Worker):
        self.worker = worker
        # In a session of its own: Ctrl-C at the terminal comes to the launcher alone.
        self.reaper = subprocess.Popen(
            worker.command,
            env={**os.environ, **worker.environment},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self.unread: dict[IO[bytes], bytes] = {}
        self.code: int | None = None
        self.ended_at = 0.0
        self.told_to_end = False
        if worker.secret is not None:
            self._write(worker.secret)

    def send(self, number: int) -> None:
        self._write(str(number))

    def _write(self, line: str) -> None:
        with contextlib.suppress(OSError):
            assert self.reaper.stdin is not None, "the reaper must have a pipe as its input"
            os.write(self.reaper.stdin.fileno(), f"{line}\n".encode())


class _Supervision:
    """State of one call of `supervise`."""

    def __init__(
        self,
        workers: Sequence[Worker],
        output: Output,
        selector: selectors.BaseSelector,
        grace_seconds: float,
        settle_seconds: float,
    ):
        self.workers, self.output, self.selector = workers, output, selector
        self.grace_seconds, self.settle_seconds = grace_seconds, settle_seconds
        self.all: list[_RunningWorker] = []
        self.stopped_by: signal.Signals | None = None
        self.terminate_at: float | None = None
        self.kill_at: float | None = None

    @property
    def living(self) -> list[_RunningWorker]:
        """Workers whose reaper runs or whose output is not read to its end."""
        return [running for running in self.all if running.code is None or running.unread]

    def start(self) -> None:
        for worker in self.workers:
            running = _RunningWorker(worker)
            self.all.append(running)
            for pipe in (running.reaper.stdout, running.reaper.stderr):
                assert pipe is not None, "the reaper's output must go to pipes"
                running.unread[pipe] = b""
                reads = functools.partial(self.read, running)
                self.selector.register(pipe, selectors.EVENT_READ, reads)

    def read(self, running: _RunningWorker, pipe: Any) -> None:
        """Show the lines that have come through `pipe`."""
        piece = os.read(pipe.fileno(), 1 << 16)
        *lines, rest = (running.unread[pipe] + piece).split(b"\n")
        running.unread[pipe] = rest
        if rest and (not piece or len(rest) > _LONGEST_LINE):
            lines.append(rest)
            running.unread[pipe] = b""
        for line in lines:
            text = line.decode("utf-8", "replace")
            self.output.line(running.worker, text, error=pipe is running.reaper.stderr)
        if not piece:
            self.selector.unregister(pipe)
            pipe.close()
            del running.unread[pipe]

    def stop(self, number: signal.Signals) -> None:
        """Pass on a signal that the launcher received."""
        if self.stopped_by is not None:
            self.output.log(f"{number.name} again: ending all processes at once")
            self.send_all(signal.SIGKILL)
            return
        self.stopped_by = number
        self.output.log(f"{number.name}: all processes finish their step and save; again: at once")
        # Losing the terminal is a reason to save; programs other than geojax may not handle SIGHUP.
        self.send_all(signal.SIGTERM if number == signal.SIGHUP else number)

    def send_all(self, number: int) -> None:
        for running in self.all:
            if running.code is None:
                running.told_to_end |= number == signal.SIGKILL
                running.send(number)

    def poll(self) -> None:
        """Note the workers that have ended, and send the signals that are due."""
        now = time.monotonic()
        for running in self.all:
            if running.code is None and (code := running.reaper.poll()) is not None:
                running.code, running.ended_at = code if code >= 0 else 128 - code, now
                if code and self.terminate_at is None:
                    self.terminate_at = now + self.settle_seconds
        if self.output.closed and self.stopped_by is None:
            self.stop(signal.SIGHUP)
        if self.terminate_at is not None and self.kill_at is None and now >= self.terminate_at:
            self.kill_at = now + self.grace_seconds
            for running in self.living:
                running.told_to_end = True
            self.send_all(signal.SIGTERM)
        elif self.kill_at is not None and now >= self.kill_at:
            self.kill_at = float("inf")
            self.send_all(signal.SIGKILL)

    def seconds_to_wait(self) -> float | None:
        """Return the time until the next signal is due; None if none is."""
        due = self.kill_at if self.kill_at is not None else self.terminate_at
        if due is None or due == float("inf"):
            return None
        return max(0.0, due - time.monotonic())

    def outcome(self) -> Outcome:
        failed = [running for running in self.all if running.code not in COMPLETE]
        unhealthy = any(running.code == UNHEALTHY for running in self.all)
        if not failed or (unhealthy and all(running.told_to_end for running in failed)):
            code = UNHEALTHY if unhealthy else 0
            return Outcome(code, (), stuck=False, stopped_by=self.stopped_by)
        blamed = root_cause(self.all, failed, self.output)
        by_themselves = [running for running in failed if not running.told_to_end]
        # One that was stuck, and had to be killed after the others gave up, has no code of its own.
        stuck = blamed[0].told_to_end and bool(by_themselves)
        sources = by_themselves if stuck else blamed
        first_code = min(sources, key=lambda running: running.ended_at).code
        assert first_code is not None, "a failed worker must have an exit code"
        workers = tuple(running.worker for running in blamed)
        return Outcome(first_code, workers, stuck=stuck, stopped_by=self.stopped_by)


def root_cause(
    everyone: list[_RunningWorker], failed: list[_RunningWorker], output: Output
) -> list[_RunningWorker]:
    """Find the worker that brought down the others, or those that lost contact with each other.

    The cause is not always the process that ended first. A process of geojax tells the others of
    its error before it ends, and two that lose a third may notice before its end is seen. If two
    blame each other both were alive, and the link between them failed.
    """

    def named_in(line: str) -> _RunningWorker | None:
        """Return the failed worker that a line blames; of a site that is a job, by its number."""
        among, process = everyone, blamed_process(line)
        if (of_site := blamed_of_site(line)) is not None:
            among = [running for running in everyone if running.worker.site == of_site[0]]
            process = of_site[1]
        if process is None or process >= len(among) or among[process] not in failed:
            return None
        return among[process]

    by_themselves = [running for running in failed if not running.told_to_end]
    by_time = sorted(by_themselves or failed, key=lambda running: running.ended_at)
    told_the_others = by_time[0]
    for first in by_time:
        chain = [first]
        while True:
            lines = output.last_lines(chain[-1].worker)
            blamed = next((each for each in map(named_in, lines) if each is not None), None)
            if blamed is None:
                break
            if blamed in chain:
                parted = chain[chain.index(blamed) :]
                return sorted(parted, key=lambda running: running.worker.process)
            chain.append(blamed)
        if not any(map(blames_another, lines)):
            return [chain[-1]]
        if first is by_time[0]:
            told_the_others = chain[-1]
    return [told_the_others]
