"""The sites of a run under one supervisor each, as jobs of their own."""

import contextlib
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from support.full_disk import SmallDisk
from support.processes import family, is_running
from support.small_runs import REPOSITORY, environment

from chaos_faults import half_cores
from chaos_faults.loopback_sites import LoopbackSites
from chaos_faults.routed_sites import RoutedSites
from geojax.checkpoint.folder import committed_steps
from geojax.errors import UserError
from geojax.job.island_env import VARIABLES
from geojax.launch import reaper
from geojax.membership.record import MembershipRecord
from geojax.membership.record_file import decode_record

SITES = ("east", "mid", "west")
RUN = "run"
"""Last part of each site's run directory, which names the run in the record."""
_SUPERVISOR = Path(__file__).with_name("site_supervisor.py")
_LARGE_STATE = Path(__file__).with_name("large_state.py")
_FAMILY_ABOVE = 2
"""Processes above the site's own and their reapers: the supervisor's reaper, and the supervisor."""
_COORDINATOR_PORT = 6150
_ENDED = re.compile(r"exit code (\d+)")


class SupervisedRun:
    """Three sites, each under a supervisor in its namespace and cgroup.

    Args:
        folder: of logs, of the record and of compiled programs.
        config: of the run.
        disks: one of each site.
        network: joins the sites.
        groups: cgroup of each site; None: there are none.
        lease_seconds: silence after which a site is evicted.
        save_interval: steps from one save to the next.
        processes: number of processes of each site.
        devices: devices of a process of the site that has most; all sites have equally many.
        averages: averages of gradients that the state of each site holds too.
    """

    sites = SITES

    def __init__(
        self,
        folder: Path,
        config: Path,
        disks: Sequence[SmallDisk],
        network: RoutedSites | LoopbackSites,
        groups: Sequence[Path] | None,
        lease_seconds: float,
        save_interval: int,
        processes: Sequence[int] = (1,) * len(SITES),
        devices: int = 1,
        averages: int = 0,
    ):
        self.folder, self.network, self.disks = folder, network, disks
        self.lease_seconds, self.save_interval = lease_seconds, save_interval
        self.record_path = folder / "membership.json"
        self.runs = [disk.folder / RUN for disk in disks]
        self.checkpoints = [
            run / "checkpoints" / site for run, site in zip(self.runs, SITES, strict=True)
        ]
        """Folder of each site's checkpoints."""
        self.logs = [folder / f"{site}.log" for site in SITES]
        self._config, self._groups, self._counts = config, groups, processes
        self._devices = [devices * max(processes) // count for count in processes]
        """Devices of a process of each site."""
        self._program = [str(_LARGE_STATE), str(averages)] if averages else ["-m", "geojax"]
        self._key = secrets.token_hex(16)
        self._supervisors: list[subprocess.Popen[bytes]] = []

    @property
    def written(self) -> list[Path]:
        """Folders of each site's metrics and events."""
        return [run / site for run, site in zip(self.runs, SITES, strict=True)]

    @property
    def has_quotas(self) -> bool:
        """True if each site has a cgroup of its own."""
        return self._groups is not None

    def start(self) -> None:
        """Start all sites."""
        self._supervisors = [self._start(site) for site in range(len(SITES))]

    def end(self) -> None:
        """End all that is left of all sites, at once."""
        for supervisor in self._supervisors:
            for process in family(supervisor.pid):
                _send(process, signal.SIGKILL)
        for supervisor in self._supervisors:
            for process in family(supervisor.pid):
                _send(process, signal.SIGKILL)
            supervisor.wait()
            if supervisor.stdin is not None:
                supervisor.stdin.close()
        self._supervisors = []

    def share_newest_checkpoint(self) -> None:
        """Copy the newest checkpoint of all sites to those that lack it."""
        folders = zip(SITES, self.checkpoints, strict=True)
        steps = {site: committed_steps(folder) for site, folder in folders}
        step, source = max((max(steps[site], default=0), site) for site in SITES)
        for run in self.runs:
            target = run / "checkpoints" / source / str(step)
            if step and not target.exists():
                origin = self.checkpoints[SITES.index(source)] / str(step)
                shutil.copytree(origin, target)

    def processes(self, site: int) -> list[int]:
        """Return the living processes of a site below its supervisor, in their order in it."""
        if not self._supervisors:
            return []
        below = family(self._supervisors[site].pid)[_FAMILY_ABOVE:]
        return [process for process in below if is_running(process) and not _is_reaper(process)]

    def strike(self, site: int, number: int, signal_number: int) -> float:
        """Send a signal to one process of a site, and return the time; the numbers go round."""
        struck = time.time()
        processes = self.processes(site)[: self._counts[site]]
        if processes:
            _send(processes[number % len(processes)], signal_number)
        return struck

    def send(self, site: int, number: int) -> float:
        """Send a signal to all processes of a site; return the time."""
        sent = time.time()
        for process in self.processes(site):
            _send(process, number)
        return sent

    def resume(self, site: int) -> None:
        """Let all processes of a site go on if they stand still."""
        self.send(site, signal.SIGCONT)

    def figures(self, site: int) -> "ProcessFigures | None":
        """Return the figures of a site's first process; None: there is none."""
        processes = self.processes(site)
        return figures_of(processes[0]) if processes else None

    def ended_for_good(self, site: int) -> bool:
        """Return True if a site's supervisor starts it no more."""
        return self._supervisors[site].poll() is not None

    def record(self) -> MembershipRecord | None:
        """Return the record of who takes part."""
        try:
            return decode_record(self.record_path.read_bytes(), RUN, str(self.record_path))
        except (OSError, UserError):
            return None

    def log_sizes(self) -> list[int]:
        """Return the size of each site's log."""
        return [log.stat().st_size if log.exists() else 0 for log in self.logs]

    def log_since(self, site: int, size: int) -> str:
        """Return a site's log from a place on."""
        with self.logs[site].open("rb") as log:
            log.seek(size)
            return log.read().decode(errors="replace")

    def codes_since(self, site: int, size: int) -> list[int]:
        """Return the exit codes of a site's processes that its supervisor has seen since."""
        return [int(code) for code in _ENDED.findall(self.log_since(site, size))]

    def variables(self, site: int) -> dict[str, str]:
        """Return the variables of a site's processes."""
        return {
            "GEOJAX_SITE": SITES[site],
            "GEOJAX_ISLANDS": ",".join(SITES),
            VARIABLES["coordinators"]: ",".join(self.network.coordinators),
            "GEOJAX_KEY": self._key,
            "GEOJAX_ISLANDS_ADDRESS": self.network.addresses[site],
            "GEOJAX_ISLANDS_PORT": str(self.network.ports[site]),
            "GEOJAX_HEARTBEAT_TIMEOUT": f"{self.lease_seconds:g}",
            "MALLOC_ARENA_MAX": "1",
            "COLUMNS": "1000",
            "XDG_CACHE_HOME": str(self.folder / f"{SITES[site]}-cache"),
        }

    def command(self, site: int) -> list[str]:
        """Return the command of a site's processes."""
        train = [sys.executable, *self._program, "train", str(self._config)]
        devices = ["--simulate_devices", str(self._devices[site])]
        return [*train, "--run_directory", str(self.runs[site]), *devices]

    def _start(self, site: int) -> "subprocess.Popen[bytes]":
        prefix = [*self.network.command_prefix(site)]
        if self._groups is not None:
            prefix = [*half_cores.words_into(self._groups[site]), *prefix]
        meeting = f"{self.network.addresses[site]}:{_COORDINATOR_PORT}"
        place = [SITES[site], str(self._counts[site]), meeting]
        supervisor = [sys.executable, str(_SUPERVISOR), *place, *prefix, "--", *self.command(site)]
        with self.logs[site].open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-I", reaper.__file__, "5", *supervisor],
                env=environment(**self.variables(site)),
                cwd=REPOSITORY,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )


@contextlib.contextmanager
def started(run: SupervisedRun) -> Iterator[SupervisedRun]:
    """Start a run, and end what is left of it."""
    try:
        run.start()
        yield run
    finally:
        run.end()


def _is_reaper(process: int) -> bool:
    try:
        return reaper.__file__.encode() in Path(f"/proc/{process}/cmdline").read_bytes()
    except OSError:
        return False


def _send(process: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(process, number)


class ProcessFigures(NamedTuple):
    """What one process of a site holds."""

    process: int
    """Its number."""
    resident_megabytes: float
    threads: int
    open_files: int


def figures_of(process: int) -> ProcessFigures | None:
    """Return the figures of a process; None: it has ended."""
    folder = Path(f"/proc/{process}")
    try:
        pages = int((folder / "statm").read_text().split()[1])
        threads, files = (len(os.listdir(folder / part)) for part in ("task", "fd"))
    except (OSError, IndexError):
        return None
    return ProcessFigures(process, pages * os.sysconf("SC_PAGE_SIZE") / 1e6, threads, files)
