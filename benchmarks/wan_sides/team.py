"""The harness's side of a contestant: its processes, one in each site, asked in unison."""

import contextlib
import json
import os
import selectors
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from wan_sides.contestants import Contestant
from wan_sides.link import Link

BENCHMARKS = Path(__file__).resolve().parent.parent
_LINES_SHOWN = 15
# The allocator keeps what is freed, in one arena and on large pages, on all sides: what
# geojax.runtime.host_memory asks of it comes too late in a worker, whose listening thread has made
# a second arena by then. On a virtual machine a new page can cost more than the work on it.
KEPT_MEMORY = {
    "GLIBC_TUNABLES": "glibc.malloc.arena_max=1:glibc.malloc.mmap_max=0"
    ":glibc.malloc.trim_threshold=2147483647:glibc.malloc.hugetlb=1"
}


class ContestantFailed(Exception):
    """A process of a contestant ended or did not answer in time; in one line."""


def worker_environment() -> dict[str, str]:
    """Variables of a process that imports `geojax` and `wan_sides` from here."""
    folders = (str(BENCHMARKS.parent), str(BENCHMARKS), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(filter(None, folders))
    return os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"} | KEPT_MEMORY


class Team:
    """The processes of one contestant."""

    def __init__(
        self,
        contestant: Contestant,
        link: Link,
        cores: list[int],
        weights: Path,
        folder: Path,
        torch_python: str,
    ):
        self._sites = [site.name for site in link.wan.sites]
        self._logs = [folder / f"{site}.log" for site in self._sites]
        self._unread = [b"" for _ in self._sites]
        self._processes = []
        # What the processes write for themselves goes when they do.
        environment = worker_environment() | {"OMP_NUM_THREADS": "1", "TMPDIR": str(folder)}
        for process, site in enumerate(link.wan.sites):
            work = {
                "process": process,
                "site": site.name,
                "coordinator": link.wan.sites[0].address,
                "weights": str(weights),
                "settings": contestant.settings,
                "repeats": contestant.repeats,
                "devices": contestant.devices,
                "blocking": contestant.blocking,
                "link": link.wan.settings.model_dump(),
            }
            worker = [
                torch_python if contestant.is_torch else sys.executable,
                "-m",
                f"wan_sides.{contestant.side}",
                json.dumps(work),
            ]
            with self._logs[process].open("wb") as log:
                started = subprocess.Popen(
                    [*site.command_prefix, *worker],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment,
                    start_new_session=True,  # Ctrl-C is for the harness, which ends them
                )
            self._processes.append(started)
            os.sched_setaffinity(started.pid, {cores[process]})  # and all threads to come

    def ask(self, request: str, timeout: float, **arguments: Any) -> list[Any]:
        """The answers of all processes to the same request.

        Raises:
            ContestantFailed: it names the process that ended, or those that did not answer.
        """
        line = json.dumps({"do": request, **arguments}).encode() + b"\n"
        for process in self._processes:
            assert process.stdin is not None, "a pipe"
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(line)
                process.stdin.flush()
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + timeout
        with selectors.DefaultSelector() as selector:
            for number, process in enumerate(self._processes):
                assert process.stdout is not None, "a pipe"
                selector.register(process.stdout, selectors.EVENT_READ, number)
            while len(answers) < len(self._processes):
                ready = selector.select(max(0.0, deadline - time.monotonic()))
                if not ready:
                    missing = [s for n, s in enumerate(self._sites) if n not in answers]
                    raise ContestantFailed(
                        f"no answer to '{request}' within {timeout:.0f} s from site "
                        f"{' and '.join(missing)}"
                    )
                for key, _ in ready:
                    self._read(key.data, request, answers)
        return [answers[number] for number in range(len(self._processes))]

    def _read(self, number: int, request: str, answers: dict[int, Any]) -> None:
        output = self._processes[number].stdout
        assert output is not None, "a pipe"
        piece = os.read(output.fileno(), 1 << 16)
        if not piece:
            raise ContestantFailed(
                f"the process of site {self._sites[number]} ended during '{request}': "
                f"{self._last_words(number)}"
            )
        *lines, self._unread[number] = (self._unread[number] + piece).split(b"\n")
        for line in lines:
            answers[number] = json.loads(line)["answer"]

    def _last_words(self, number: int) -> str:
        lines = self._logs[number].read_text(errors="replace").strip().splitlines()
        return "\n".join(["", *lines[-_LINES_SHOWN:]]) if lines else "without a word"

    def close(self) -> None:
        """End all processes."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None, "a pipe"
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@contextlib.contextmanager
def team(
    contestant: Contestant, link: Link, cores: list[int], weights: Path, torch_python: str
) -> Iterator[Team]:
    """The processes of a contestant, which end with the context."""
    with tempfile.TemporaryDirectory() as folder:
        processes = Team(contestant, link, cores, weights, Path(folder), torch_python)
        try:
            yield processes
        finally:
            processes.close()
