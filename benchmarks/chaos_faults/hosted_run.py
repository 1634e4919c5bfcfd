"""The sites of a run on hosts of their own: ssh sends signals to their processes, no more."""

import contextlib
import re
import shlex
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from support.full_disk import SmallDisk

from chaos_faults.supervised_run import ProcessFigures
from geojax.config.run_config import RunConfig
from geojax.errors import RunError, UserError
from geojax.job.cluster_env import VARIABLES, ProcessSettings
from geojax.job.island_env import VARIABLES as ISLAND_VARIABLES
from geojax.membership.record import MembershipRecord
from geojax.run_paths import LOCK
from geojax.train.islands.record_store import record_store

HOSTED_KINDS = ("kill", "kill_first", "kill_holder", "pause", "short_pause")
"""Faults that take a signal alone."""
SSH = "ssh -o BatchMode=yes -o ConnectTimeout=10"
_SSH_SECONDS = 60.0
_HOLDER = re.compile(r"process (\d+) on (\S+)")
_SITE, _HEARTBEAT = VARIABLES["site"], VARIABLES["heartbeat_timeout_seconds"]
_SITES = ISLAND_VARIABLES["sites"]
_OTHER_HOST, _NO_PROCESS = 90, 91
"""Exit codes of a remote command that does nothing."""


class _Process(NamedTuple):
    """The process of a site that writes its run directory."""

    number: int
    host_name: str
    """Name of its host, as that host gives it."""


class _EndedError(UserError):
    """The process has ended."""


class UntouchedNetwork:
    """A network in which nothing was broken."""

    def restore(self) -> None:
        """Leave all packets alone."""

    def limit_rate(self, site: int, bits_per_second: float) -> None:
        """Leave a site's rate alone."""


class HostedRun:
    """A run that goes on already, each site on a host that ssh reaches.

    The first process of a site holds the lock of the site's run directory, and the lock file has
    its number and its host. A signal goes to this process alone, and only if it is of this site.

    Args:
        config: of the run.
        hosts: of each site's first process, as ssh knows it.
        directories: run directory of each site, as this machine reads it.
        ssh: words before the host and the command that runs there.

    Raises:
        UserError: a site's process is not found, or the sites are not those of the run.
    """

    network = UntouchedNetwork()
    disks: Sequence[SmallDisk] = ()

    def __init__(
        self,
        config: RunConfig,
        hosts: Mapping[str, str],
        directories: Mapping[str, Path],
        ssh: Sequence[str],
    ):
        lease = config.islands.lease
        if not config.islands.goes_on or lease is None:
            raise UserError("--hosts requires islands.on_loss=go_on: else no site goes on alone")
        self._hosts, self._ssh = hosts, ssh
        self._directories = directories
        self._store = record_store(lease, config.run_directory.name)
        self._stopped: dict[int, _Process] = {}
        self.save_interval = config.checkpoint.interval
        about = {site: self._variables_of(site) for site in hosts}
        for site, variables in about.items():
            names = variables.get(_SITES, "").split(",")
            if sorted(names) != sorted(hosts):
                raise UserError(
                    f"--hosts: the run of site {site} has the sites {', '.join(names)}; give a "
                    f"host of each, in place of {', '.join(hosts)}"
                )
        variables = next(iter(about.values()))
        self.sites = tuple(variables[_SITES].split(","))
        default = ProcessSettings().heartbeat_timeout_seconds
        self.lease_seconds = float(variables.get(_HEARTBEAT, default))

    @property
    def written(self) -> list[Path]:
        """Folders of each site's metrics and events."""
        return [self._directories[site] / site for site in self.sites]

    def processes(self, site: int) -> list[int]:
        """Return the number that a site's first process has on its host."""
        return [self._process(self.sites[site]).number]

    def strike(self, site: int, number: int, signal_number: int) -> float:
        """Send a signal to a site's first process; return the time, by its host's clock."""
        return self.send(site, signal_number)

    def send(self, site: int, number: int) -> float:
        """Send a signal to a site's first process; return the time, by its host's clock."""
        name = self.sites[site]
        process = self._process(name)
        if number == signal.SIGSTOP:  # noted before: whatever happens meanwhile, it will go on
            self._stopped[site] = process
        words = f"date +%s.%N && kill -{signal.Signals(number).name.removeprefix('SIG')}"
        return float(self._at(name, process, f"{words} {process.number}"))

    def resume(self, site: int) -> None:
        """Let a site's first process go on if it stands still."""
        if (process := self._stopped.pop(site, None)) is not None:
            with contextlib.suppress(_EndedError):
                self._at(self.sites[site], process, f"kill -CONT {process.number}")

    def record(self) -> MembershipRecord | None:
        """Return the record of who takes part."""
        try:
            return self._store.read()
        except (RunError, UserError):
            return None

    def figures(self, site: int) -> ProcessFigures | None:
        """Return None: nobody looks at the processes of other hosts."""
        return None

    def ended_for_good(self, site: int) -> bool:
        """Return False: who starts a site again is not known here."""
        return False

    def log_sizes(self) -> list[int]:
        """Return zeros: the logs of the sites are elsewhere."""
        return [0] * len(self.sites)

    def log_since(self, site: int, size: int) -> str:
        """Return nothing: the logs of the sites are elsewhere."""
        return ""

    def codes_since(self, site: int, size: int) -> None:
        """Return None: exit codes are not seen from here."""

    def _process(self, site: str) -> _Process:
        path = self._directories[site] / site / LOCK
        try:
            found = _HOLDER.match(path.read_text(errors="replace"))
        except OSError as error:
            raise UserError(
                f"{path}: cannot be read ({error.strerror}); name the run directory of site {site} "
                f"as this machine reads it: --runs {site}=DIRECTORY"
            ) from None
        if found is None:
            raise UserError(f"{path}: names no process; start site {site}")
        return _Process(int(found[1]), found[2])

    def _variables_of(self, site: str) -> dict[str, str]:
        process = self._process(site)
        names = "|".join((_SITE, _SITES, _HEARTBEAT))
        shown = self._at(
            site,
            process,
            f"tr '\\0' '\\n' < /proc/{process.number}/environ | grep -E '^({names})='",
        )
        pairs = (line.partition("=") for line in shown.splitlines())
        return {name: value for name, _, value in pairs}

    def _at(self, site: str, process: _Process, command: str) -> str:
        """Run a command on a site's host if its process lives there; return what it prints."""
        is_there = shlex.join(
            ["grep", "-qzxF", f"{_SITE}={site}", f"/proc/{process.number}/environ"]
        )
        right_host = shlex.join(["test", process.host_name, "="])
        script = (
            f'{right_host} "$(uname -n)" || exit {_OTHER_HOST}; '
            f"{is_there} 2>/dev/null || exit {_NO_PROCESS}; {command}"
        )
        line = shlex.join(["exec", "sh", "-c", script])
        host = self._hosts[site]
        try:
            done = subprocess.run(
                [*self._ssh, host, line],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=_SSH_SECONDS,
                check=False,
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise UserError(f"site {site}: {shlex.join(self._ssh)} fails: {error}") from None
        if done.returncode == _OTHER_HOST:
            raise UserError(
                f"site {site}: its process is on {process.host_name}, which {host} is not; "
                f"give --hosts {site}=HOST"
            )
        if done.returncode == _NO_PROCESS:
            raise _EndedError(
                f"site {site}: {host} has no process {process.number} of this site, as this user "
                "sees it; start the site, or come as the user who runs it"
            )
        if done.returncode:
            reason = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
            raise UserError(f"site {site}: {host}: {reason}")
        return done.stdout


@contextlib.contextmanager
def watched(run: HostedRun) -> Iterator[HostedRun]:
    """Let go on at the end whatever stands still."""
    try:
        yield run
    finally:
        for site in range(len(run.sites)):
            run.resume(site)
