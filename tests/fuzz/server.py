"""A fork server: every case runs in a child of one process that has imported geojax.

A fork after JAX has started a backend would inherit locks whose threads are gone; so nothing here
touches a device, and each child starts its own backend if its command does.
"""

import gc
import os
import resource
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import NamedTuple

from fuzz import boundary
from fuzz.cases import Case

CPU_SECONDS = 3.0
"""Processor time that a refusal may take beyond the imports."""
WALL_SECONDS = 25.0
"""Time after which a case hangs: far more than it computes, since machines are busy."""
MEMORY_BYTES = 2 * 2**30
"""Memory that a case may take, the imports included."""

_ACCEPTED = 90
_LONGEST_LINE = 4096
_MODULES = (
    "geojax.cli.main",
    "geojax.cli.simulated_pipeline",
    "geojax.cli.probe_tables",
    "geojax.data.prepare",
    "geojax.launch.hosts",
    "geojax.pipeline.drawing.timelines",
    "geojax.pipeline.drawing.trace",
    "geojax.pipeline.simulation.compare",
    "geojax.pipeline.simulation.staged_model",
    "geojax.train.run",
    "geojax.train.traced_run",
)


class Outcome(NamedTuple):
    """The end of a case."""

    case: Case
    code: int | None
    """Exit code; None for a case that reached its boundary."""
    stderr: str
    cpu_seconds: float
    peak_bytes: int
    left_behind: tuple[str, ...]
    """Files that the case added, changed or removed."""
    hung: bool

    @property
    def problem(self) -> str | None:
        """Say what must not be; None for a clear refusal, or input that is accepted."""
        if self.hung:
            return f"hangs for {WALL_SECONDS:g} s"
        if self.peak_bytes > MEMORY_BYTES:
            return f"takes {self.peak_bytes / 2**30:.1f} GiB"
        if self.code in (None, 0):
            return "is accepted" if self.case.must_be_refused else None
        if self.cpu_seconds > CPU_SECONDS:
            return f"computes for {self.cpu_seconds:.1f} s"
        if self.code != 2:
            return f"ends with exit code {self.code}"
        lines = self.stderr.splitlines()
        if len(lines) != 1 or not lines[0].startswith("error: "):
            return f"prints {len(lines)} lines"
        if len(lines[0]) > _LONGEST_LINE:
            return f"prints a line of {len(lines[0])} characters"
        if self.left_behind:
            return f"leaves {', '.join(self.left_behind)}"
        return None


class Server:
    """Runs cases, up to `parallel` at a time, each in a folder of its own below `folder`."""

    def __init__(self, folder: Path, parallel: int = 2) -> None:
        self._folder = folder
        self._parallel = parallel
        self._running: dict[int, tuple[Case, Path, dict[str, object], float]] = {}
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
        self._running[child] = case, place, before, time.monotonic()

    def finish(self) -> list[Outcome]:
        """Wait for the cases that still run, and return all outcomes."""
        while self._running:
            self._collect()
        return self.outcomes

    def _collect(self) -> None:
        """Wait for one case, or kill one that hangs."""
        while True:
            for child, (case, place, before, started) in list(self._running.items()):
                hung = time.monotonic() - started > WALL_SECONDS
                if hung:
                    os.kill(child, signal.SIGKILL)
                ended, status, usage = os.wait4(child, 0 if hung else os.WNOHANG)
                if not ended:
                    continue
                del self._running[child]
                code = os.waitstatus_to_exitcode(status)
                left = _difference(before, _listing(place / "work"))
                stderr = (place / "stderr").read_text(errors="replace")
                self.outcomes.append(
                    Outcome(
                        case,
                        None if code == _ACCEPTED else code,
                        stderr,
                        usage.ru_utime + usage.ru_stime,
                        usage.ru_maxrss * 1024,
                        left,
                        hung,
                    )
                )
                shutil.rmtree(place)
                return
            time.sleep(0.01)


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
