"""The supervisor of one site, with the function by which `geojax launch --supervise` runs it.

    python site_supervisor.py SITE PROCESSES COORDINATOR [PREFIX ...] -- COMMAND [ARGUMENT ...]

The environment is the site's. Its first process listens at the coordinator's host:port.
"""

import io
import sys
import time

from geojax.launch import Output, Worker, supervise_sites
from geojax.launch import reaper as reaper_script
from geojax.launch.workers import worker_env

_GRACE_SECONDS = 10.0
_LIMIT = 10**6
"""A site fails more often than the default lets it."""


class StampedLines(io.TextIOBase):
    """Standard output, with the system's clock before each line."""

    def __init__(self) -> None:
        self._at_start = True

    def write(self, text: str) -> int:
        """Write lines, or the rest of one."""
        for piece in text.splitlines(keepends=True):
            stamp = f"{time.time():.3f} " if self._at_start else ""
            sys.stdout.write(stamp + piece)
            self._at_start = piece.endswith("\n")
        return len(text)

    def flush(self) -> None:
        """Hand over what was written."""
        sys.stdout.flush()


def main() -> int:
    """Run the site until its command ends for good; return the exit code."""
    site, processes, coordinator, *command = sys.argv[1:]
    split = command.index("--")
    prefix, command = command[:split], command[split + 1 :]
    reaped = [sys.executable, "-I", reaper_script.__file__, f"{_GRACE_SECONDS:g}", *command]
    count = int(processes)
    workers = [
        Worker(
            process, site, (*prefix, *reaped), worker_env(process, count, coordinator, site, None)
        )
        for process in range(count)
    ]
    lines = StampedLines()
    output = Output(workers, lines, lines)
    outcomes = supervise_sites([workers], output, limit=_LIMIT, grace_seconds=_GRACE_SECONDS)
    codes = [outcome.exit_code for outcome in outcomes]
    output.log(f"site {site} ended for good, exit code {codes[0]}")
    return codes[0]


if __name__ == "__main__":
    raise SystemExit(main())
