"""`geojax launch -- COMMAND`: start all processes of a run, on this machine or over ssh."""

import itertools
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import pydantic
import tyro

from geojax import exit_codes
from geojax.errors import UserError
from geojax.launch import (
    Hosts,
    Outcome,
    Output,
    Worker,
    as_islands,
    local_workers,
    supervise,
    supervise_sites,
)
from geojax.network_names import is_site_name
from geojax.quantities import Seconds, SimulatedDevices
from geojax.settings import Settings
from geojax.wan import SITE_NAMES, EmulatedWan
from geojax.wan.state import DEFAULT_NAME

_VERBS = ("train", "probe")
_LINES_SHOWN = 15
_RESTARTS_AN_HOUR = 10


class LaunchCommand(Settings):
    """Start a run of several processes: geojax launch --sites 2 -- train CONFIG [overrides].

    After `--` comes a command of geojax, or any program that calls geojax.runtime.start. Ctrl-C
    finishes the step, saves and ends; a second Ctrl-C ends at once. When one process fails, all
    end. The launcher then names the process that failed first, and returns its exit code. Exit code
    3 (a probe found something slow) is a result, not a failure.
    """

    sites: str | None = None
    """Number of sites (called east, west, north, south), or their names: east,west. Default: 2, or
    the sites of the emulated network."""

    processes_per_site: tuple[Annotated[int, pydantic.Field(ge=1, le=1024)], ...] = (1,)
    """Processes in each site. With --islands it may be a number for each: 1 2."""

    devices_per_process: SimulatedDevices | None = None
    """CPU devices to simulate in each process; with several numbers of processes, in those of the
    site that has most. Default: share out the machine's GPUs; without GPUs the config decides."""

    hosts: Path | None = None
    """YAML file of hosts, on which the run starts over ssh, one process a host: `sites: [{name:
    east, hosts: [east1, east2]}, ...]`. Optional keys: `coordinator`, `directory` and `python`
    (docs/launch.md)."""

    wan: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Run each site in its namespace of the network that `geojax wan up` made."""

    wan_name: str = DEFAULT_NAME
    """Name of the emulated network, if several are up."""

    islands: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Start each site as a job of its own, for a config with dc.join=islands."""

    restarts: Annotated[int, pydantic.Field(ge=0, le=10**6)] | None = None
    """Number of times to start a failed run again, from its newest checkpoint. Exit codes 2 (bad
    input) and 3 (a probe found something slow) never restart. With --supervise: failures of a site
    in an hour that make no new step. Default: 0, with --supervise 10."""

    supervise: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Start each island that fails again, by itself. The wait before a start doubles from 1 s to a
    minute while no step is made."""

    grace_seconds: Seconds = 45.0
    """Time that a process has to end after another has failed, before it is killed."""


def run(command: LaunchCommand, launched: Sequence[str]) -> int:
    """Run the workers to their end; return the code of the one that failed first, else 0 or 3."""
    if command.supervise:
        return _run_sites(command, launched)
    restarts = command.restarts or 0
    for remaining in range(restarts, -1, -1):
        workers, output = _started(command, launched)
        outcome = supervise(workers, output, grace_seconds=command.grace_seconds)
        _report(outcome, output)
        if (
            not outcome.failed
            or outcome.exit_code in exit_codes.FINAL
            or outcome.stopped_by
            or not remaining
        ):
            break
        attempt = restarts - remaining + 1
        output.log(f"restart {attempt} of {restarts}, from the newest checkpoint")
    return outcome.exit_code


def _run_sites(command: LaunchCommand, launched: Sequence[str]) -> int:
    """Run each site by itself; return 0 if all of them are done in the end, else a failure's code.

    Raises:
        UserError: the sites are no islands.
    """
    if not command.islands:
        raise UserError(
            "--supervise starts single sites again, which takes sites of their own: add --islands "
            "with dc.join=islands; one program starts again as a whole: --restarts 3"
        )
    workers, output = _started(command, launched)
    of_sites = itertools.groupby(workers, key=lambda worker: worker.site)
    limit = _RESTARTS_AN_HOUR if command.restarts is None else command.restarts
    outcomes = supervise_sites(
        [list(of_site) for _, of_site in of_sites],
        output,
        limit=limit,
        grace_seconds=command.grace_seconds,
    )
    failed = [outcome for outcome in outcomes if outcome.failed]
    for outcome in outcomes:
        _report(outcome, output)
    codes = [outcome.exit_code for outcome in failed or outcomes]
    return max(codes) if not failed else codes[0]


def _started(command: LaunchCommand, launched: Sequence[str]) -> tuple[list[Worker], Output]:
    """Return the workers of a run, and what shows their lines."""
    workers = _workers(command, launched)
    merges = command.islands and launched[0] == "train"
    output = Output(workers, sys.stdout, sys.stderr, merges_progress=merges)
    sites = ", ".join(dict.fromkeys(worker.site for worker in workers))
    output.log(f"{len(workers)} process(es) in {sites}")
    return workers, output


def _workers(command: LaunchCommand, launched: Sequence[str]) -> list[Worker]:
    devices, grace = command.devices_per_process, command.grace_seconds
    if command.hosts is not None:
        if command.sites or command.wan or command.processes_per_site != (1,):
            raise UserError(
                f"--hosts {command.hosts} says which sites there are, with a process on each host: "
                "leave --sites, --processes-per-site and --wan out"
            )
        hosts = Hosts.load(command.hosts)
        line = _command_line(launched, hosts.python or sys.executable, here=False)
        return hosts.workers(
            line, simulated_devices=devices, grace_seconds=grace, islands=command.islands
        )
    wan = EmulatedWan.load(command.wan_name) if command.wan else None
    sites = _sites(command.sites, wan)
    workers = local_workers(
        sites,
        _processes(command, len(sites)),
        _command_line(launched, sys.executable, here=True),
        simulated_devices=devices,
        grace_seconds=grace,
        wan=wan,
    )
    return as_islands(workers, wan) if command.islands else workers


def _processes(command: LaunchCommand, sites: int) -> Sequence[int]:
    """Return the number of processes of each site."""
    counts = command.processes_per_site
    if len(counts) == 1:
        return counts * sites
    if len(counts) != sites or not command.islands:
        shown = " ".join(map(str, counts))
        raise UserError(
            f"--processes-per-site {shown}: give one number for all sites, or with --islands one "
            f"for each of the {sites}"
        )
    return counts


def _sites(sites: str | None, wan: EmulatedWan | None) -> list[str]:
    known = [site.name for site in wan.sites] if wan else list(SITE_NAMES)
    if sites is None:
        return known if wan else known[:2]
    if re.fullmatch("[0-9]+", sites):
        count = int(sites)
        if not 1 <= count <= len(known):
            raise UserError(
                f"--sites {sites}: 1 to {len(known)} have a name; give names: --sites east,west"
                if wan is None
                else f"--sites {sites}: the emulated network '{wan.name}' has {len(known)} sites"
            )
        return known[:count]
    names = sites.split(",")
    if len(set(names)) < len(names) or not all(map(is_site_name, names)):
        raise UserError(
            f"--sites {sites[:200]}: expected a number, or different names of ASCII letters, "
            "digits, '-' and '_': --sites east,west"
        )
    if wan is not None:
        for name in names:
            wan.site(name)  # refuses a name that it does not have
    return names


def _command_line(launched: Sequence[str], python: str, *, here: bool) -> list[str]:
    """Return the command of each worker, from the words after `--`."""
    if not launched:
        raise UserError(
            "geojax launch: no command to launch; give one after --, as in geojax launch -- train "
            "run.yaml"
        )
    if launched[0] in _VERBS:
        return [python, "-m", "geojax", *launched]
    if here and shutil.which(launched[0]) is None:
        raise UserError(
            f"'{launched[0]}' is neither {' nor '.join(map(repr, _VERBS))} nor a program"
        )
    return list(launched)


def _report(outcome: Outcome, output: Output) -> None:
    if output.closed:  # Python would report what it can no longer write, on its way out
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    code, blamed = outcome.exit_code, outcome.blamed
    if not outcome.failed:
        return
    if code in exit_codes.STOPPED:
        output.log(f"stopped, exit code {code}")
        return
    if len(blamed) > 1:
        what = f"{_parted(blamed)} lost contact with each other"
    elif outcome.stuck:
        what = f"{blamed[0]} was stuck, and killed when the others had given up"
    else:
        what = f"{blamed[0]} failed first{_signal_name(code)}"
    output.log(f"{what}, exit code {code}; {'its' if len(blamed) == 1 else 'their'} last lines:")
    for worker in blamed:
        output.repeat(worker, _LINES_SHOWN)


def _parted(workers: Sequence[Worker]) -> str:
    """Name workers in a message: "the sites east and west", or the workers if in one site."""
    sites = list(dict.fromkeys(worker.site for worker in workers))
    if len(sites) > 1:
        return f"the sites {' and '.join(sites)}"
    return " and ".join(map(str, workers))


def _signal_name(code: int) -> str:
    known = {number.value: number.name for number in signal.Signals}
    return f", killed by {known[code - 128]}" if code - 128 in known else ""
