"""A fork server: every case runs in a child of one process that has imported geojax.

A fork after JAX has started a backend would inherit locks whose threads are gone; so nothing here
touches a device, and each child starts its own backend if its command does.
"""

import dataclasses
import fcntl
import gc
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from fuzz import boundary
from fuzz.case import Case

CPU_SECONDS = 3.0
"""Processor time that a refusal may take beyond the imports."""
SILENT_SECONDS = 30.0
"""Time that a case may go on without a sign."""
WALL_SECONDS = 120.0
"""Time after which a case hangs, whatever it says."""
MEMORY_BYTES = 2 * 2**30
"""Memory that a case may take, the imports included."""

_ACCEPTED = 90
_LONGEST_LINE = 500
_MODULES = (
    "geojax.cli.main",
    "geojax.cli.config_commands",
    "geojax.cli.help_pages",
    "geojax.cli.plan_page",
    "geojax.cli.probe_tables",
    "geojax.data.preparation.preparation",
    "geojax.data.preview",
    "geojax.launch.hosts",
    "geojax.pipeline.drawing.timelines",
    "geojax.pipeline.drawing.trace",
    "geojax.pipeline.simulation.compare",
    "geojax.planner.staged_pipeline",
    "geojax.inference",
    "geojax.train.run",
    "geojax.saved_runs.export",
    "geojax.saved_runs.held_out",
    "geojax.planner.resolve.traced_run",
)


class Outcome(NamedTuple):
    """The end of a case."""

    case: Case
    code: int | None
    """Exit code; None for a case that reached its boundary."""
    stdout: str
    stderr: str
    cpu_seconds: float
    peak_bytes: int
    left_behind: tuple[str, ...]
    """Files that the case added, changed or removed."""
    killed: str | None
    """Why the server ended it, if it did."""

    @property
    def problem(self) -> str | None:
        """Say what must not be; None for a clear refusal, or input that is accepted."""
        if self.killed is not None:
            return self.killed
        if self.peak_bytes > MEMORY_BYTES:
            return f"takes {self.peak_bytes / 2**30:.1f} GiB"
        lines = self.stderr.splitlines()
        longest = max(map(len, [*lines, *self.stdout.splitlines()]), default=0)
        if longest > _LONGEST_LINE:
            return f"prints a line of {longest} characters"
        if self.code in (None, 0):
            return "is accepted" if self.case.must_be_refused else None
        if self.cpu_seconds > CPU_SECONDS:
            return f"computes for {self.cpu_seconds:.1f} s"
        if self.code != 2:
            return f"ends with exit code {self.code}"
        errors = [line for line in lines if line.startswith("error: ")]
        noted = len(lines) - len(errors)
        if not errors or lines[noted:] != errors or (noted and not self.case.notes):
            return f"prints {len(lines)} lines, {len(errors)} of them errors"
        if "Traceback (most recent call last)" in self.stderr:
            return "prints a traceback"
        if self.left_behind:
            return f"leaves {', '.join(self.left_behind)}"
        return None


@dataclasses.dataclass
class _Running:
    """A case that runs in a child."""

    case: Case
    place: Path
    before: dict[str, object]
    started: float
    said_at: float
    """When its output was last seen to grow."""
    said_bytes: int = 0

    def fault(self, child: int) -> str | None:
        """Say why the child is to be ended now, if it is."""
        now = time.monotonic()
        outputs = [self.place / "stdout", self.place / "stderr"]
        said = sum(path.stat().st_size for path in outputs if path.exists())
        if said > self.said_bytes:
            self.said_at, self.said_bytes = now, said
        if now - self.said_at > SILENT_SECONDS:
            return f"says nothing for {SILENT_SECONDS:g} s"
        if now - self.started > WALL_SECONDS:
            return f"hangs for {WALL_SECONDS:g} s"
        try:
            pages = int(Path(f"/proc/{child}/statm").read_text().split()[1])
        except (OSError, IndexError):  # it ends
            return None
        taken = pages * os.sysconf("SC_PAGE_SIZE")
        return f"takes {taken / 2**30:.1f} GiB" if taken > MEMORY_BYTES else None


class Server:
    """Runs cases, up to `parallel` at a time, each in a folder of its own below `folder`."""

    def __init__(
        self, folder: Path, parallel: int = 2, ended: Callable[[Outcome], None] | None = None
    ) -> None:
        """Import the command and put the boundary in place.

        Args:
            folder: an empty folder.
            parallel: cases that run at a time.
            ended: called with each outcome.
        """
        self._folder = folder
        self._parallel = parallel
        self._ended = ended
        self._running: dict[int, _Running] = {}
        self.outcomes: list[Outcome] = []
        for module in _MODULES:
            __import__(module)
        boundary.close()
        gc.freeze()

    def submit(self, number: int, case: Case) -> None:
        """Start a case as soon as there is room for it."""
        while len(self._running) >= self._parallel:
            self._collect()
        place = self._folder / str(number)
        work = place / "work"
        work.mkdir(parents=True)
        case.write(work)
        before = _listing(work)
        sys.stdout.flush()
        sys.stderr.flush()
        child = os.fork()
        if child == 0:
            _run(case, place, work)
        now = time.monotonic()
        self._running[child] = _Running(case, place, before, now, now)

    def finish(self) -> list[Outcome]:
        """Wait for the cases that still run, and return all outcomes."""
        while self._running:
            self._collect()
        return self.outcomes

    def _collect(self) -> None:
        """Wait for one case, or kill one that hangs or takes too much."""
        while True:
            for child, running in list(self._running.items()):
                fault = running.fault(child)
                if fault is not None:
                    os.kill(child, signal.SIGKILL)
                ended, status, usage = os.wait4(child, os.WNOHANG if fault is None else 0)
                if ended:
                    del self._running[child]
                    self._add(running, os.waitstatus_to_exitcode(status), usage, fault)
                    return
            time.sleep(0.01)

    def _add(
        self, running: _Running, code: int, usage: resource.struct_rusage, fault: str | None
    ) -> None:
        """Note the outcome of a case that has ended."""
        left = _difference(running.before, _listing(running.place / "work"))
        stdout, stderr = (
            (running.place / name).read_text(errors="replace") for name in ("stdout", "stderr")
        )
        outcome = Outcome(
            running.case,
            None if code == _ACCEPTED else code,
            stdout,
            stderr,
            usage.ru_utime + usage.ru_stime,
            usage.ru_maxrss * 1024,
            tuple(name for name in left if Path(name).parts[0] not in running.case.writes),
            fault,
        )
        shutil.rmtree(running.place)
        self.outcomes.append(outcome)
        if self._ended is not None:
            self._ended(outcome)


def _run(case: Case, place: Path, work: Path) -> None:
    """Run the case in this forked child, which never returns."""
    code = 1
    try:
        os.chdir(work)
        for name in [name for name in os.environ if name.startswith(("GEOJAX_", "XLA_", "JAX_"))]:
            del os.environ[name]
        os.environ.update({"XDG_CACHE_HOME": str(place / "cache"), **case.environment})
        for number, path in enumerate(("/dev/null", place / "stdout", place / "stderr")):
            os.dup2(os.open(path, os.O_RDWR | os.O_CREAT), number)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        for name in case.held:
            fcntl.flock(os.open(name, os.O_RDWR), fcntl.LOCK_EX)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**30, 2**30))
        from geojax.cli.main import run

        code = run([argument.replace("{work}", str(work)) for argument in case.arguments])
    except boundary.Accepted:
        code = _ACCEPTED
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _listing(folder: Path) -> dict[str, object]:
    """Return what lies below `folder`, with sizes and kinds."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        status = path.lstat()
        found[str(path.relative_to(folder))] = (status.st_mode, status.st_size)
    return found


def _difference(before: dict[str, object], after: dict[str, object]) -> tuple[str, ...]:
    names = sorted(before.keys() | after.keys())
    return tuple(
        name
        for name in names
        if before.get(name) != after.get(name) and before.get(name, after.get(name)) is not None
    )
