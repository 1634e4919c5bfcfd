"""Faults of a run of three sites that goes on, drawn by a seed: is it recovered within its bounds?

    python benchmarks/chaos.py                       # as root, on Linux; --help says more
    python benchmarks/chaos.py run.yaml --faults 100 --hours 3 --output chaos.json
    python benchmarks/chaos.py --kinds kill pause --faults 4
    python benchmarks/chaos.py --processes-per-site 1 2 1
    python benchmarks/chaos.py --within 25 --faults 10
    python benchmarks/chaos.py --averages 77 --megabits 13
    python benchmarks/chaos.py config.yaml --hosts east=east1 mid=me@mid1 west=west1

Three sites on this machine train, each in a network namespace behind a router of its own and in a
cgroup of half a core, under the supervisor of `geojax launch --supervise`. The faults come one
after the other. Each is watched until all sites train together again, or are too late; then all are
started again, and the fault counts as a failure.

*Recovered* means that every bound held: the loss is noticed within 1 s of a process's death, and of
silence within the eviction time, or twice that if the holder of the record is silent; the others'
next step comes within one step and 2 s; between two of their steps pass at most two medians, or
what passes in a minute without faults if that is longer; none of their steps is done again; the
site is back within 60 s; and the losses are those of the same run without faults, which follows at
the end.

With `--within` the faults must begin and end within so many consecutive steps. A site needs some
ten seconds to start again, so the steps of the small model are as long. The next fault comes in the
first step of a site that has returned, and no loss may differ by a bit. The bounds of seconds are
printed and not held: they are those of short steps.

With `--averages` a site's state is larger, and takes many steps to cross. AdamW's alone is three
times as large as the sums of a step.

With `--hosts` the run is one that goes on already, on hosts of its own, and the config is its. The
command kills and stops the first process of a site by ssh, and touches nothing else. It finds that
process by the lock of the site's run directory, which this machine must be able to read.

Nobody outside a site sees which part of a step it computes. The *sum* is when bytes leave the site,
*apply* when they have just ceased, and *forward* the time after it has written down a step. A save
is seen by its folder. What was not seen in time is marked.
"""

import argparse
import contextlib
import json
import os
import platform
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
import yaml
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from chaos_faults.campaign import Campaign, Trial, other_losses, undisturbed_losses
from chaos_faults.chaos_report import (
    failures,
    in_words,
    is_late_at_most,
    killed_sites,
    span_of,
    summary_of,
    table_of,
)
from chaos_faults.drawn_faults import ANY_PHASE, KINDS, Fault, drawn_faults
from chaos_faults.half_cores import quotas
from chaos_faults.hosted_run import HOSTED_KINDS, SSH, HostedRun, watched
from chaos_faults.injections import Injector
from chaos_faults.pace import CLOSE, USUAL, Pace
from chaos_faults.routed_sites import routed_sites
from chaos_faults.sightings import Sightings
from chaos_faults.supervised_run import SITES, SupervisedRun, started
from chaos_faults.verdicts import REJOIN_SECONDS
from support.full_disk import SmallDisk, small_disk
from support.island_jobs import SETTINGS
from support.processes import end_by_exceptions
from support.small_runs import losses, prepare_corpus, write_config

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.run_paths import EVENTS, METRICS

RESULTS = Path(__file__).parent / "results"
LEASE_SECONDS = 8.0
"""Eviction time."""
CORES = 0.5
MEGABITS = 40.0
"""Rate at which a site sends, by default."""
DISK_MEGABYTES = 128
CALM_SECONDS = 60.0
"""Time without faults at the beginning."""
TOLERANCE = 1e-6
"""Largest relative distance of a loss from the undisturbed one."""
STEPS_A_SECOND = 6
"""More than half a core does."""
BATCH = {"global_batch_size": 144, "sequence_length": 32, "microbatches": 12}
LONG_STEPS = {"global_batch_size": 28_800, "sequence_length": 32, "microbatches": 96}
"""Batch of a step that takes longer than the start of a site, 20 to 30 s."""
CLOSE_KINDS = (
    *("kill", "kill", "kill_first", "kill_holder"),
    *("resets", "packet_loss", "slow_link", "short_pause", "short_cut", "short_half_cut"),
)
"""Faults with `--within`."""
REJOIN_STEPS = 4.0
"""Steps that are added to the bound of a return with `--within`.

A site that returns validates and does two steps for itself. Then it waits for the end of the
others' step, which is twice as long without it.
"""


def small_config(folder: Path, hours: float, devices: int, long_steps: bool) -> Path:
    """Write a run of three sites on a small model; return the config's path.

    Args:
        folder: for the config and the data.
        hours: the run lasts so long.
        devices: of each site.
        long_steps: a step takes about as long as the start of a site.
    """
    steps = round((hours + 0.5) * 3600 * STEPS_A_SECOND)
    settings = SETTINGS | {
        "steps": steps,
        "simulate_devices": 1,
        "mesh": {"dc": len(SITES), "data": devices},
        "batch": LONG_STEPS if long_steps else BATCH,
        "evaluation": {"interval": 2 * steps, "sequences": 12},
        "checkpoint": {"interval": 50, "keep": 3},
    }
    return write_config(folder / "small.yaml", prepare_corpus(folder), **settings)


def chaos_config(folder: Path, options: argparse.Namespace) -> Path:
    """Write the config of the run with a record of who takes part; return its path."""
    path = options.config
    if path is None:
        long_steps = options.within is not None
        path = small_config(folder, options.hours, max(options.processes_per_site), long_steps)
    config = yaml.safe_load(path.read_text())
    config["dc"] = {**config.get("dc", {}), "join": "islands"}
    islands = config.get("islands", {})
    islands |= {"on_loss": "go_on", "lease": {"path": str(folder / "membership.json")}}
    config["islands"] = islands
    path = folder / "run.yaml"
    path.write_text(yaml.safe_dump(config))
    return path


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("config", nargs="?", type=Path, help="run of three sites; default: small")
    parser.add_argument("--faults", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, help="seed of what is drawn; default: drawn")
    parser.add_argument(
        "--hosts", nargs="+", type=pair, metavar="SITE=HOST", help="of a run that goes on already"
    )
    parser.add_argument(
        "--runs",
        nargs="+",
        type=pair,
        default=[],
        metavar="SITE=DIRECTORY",
        help="with --hosts: run directory of a site, if it is not the config's here",
    )
    parser.add_argument("--ssh", default=SSH, help=f"command before a host; default: {SSH}")
    parser.add_argument(
        "--undisturbed",
        type=Path,
        metavar="DIRECTORY",
        help="with --hosts: metrics of the same run without faults",
    )
    parser.add_argument("--rejoin", type=float, default=REJOIN_SECONDS, help="longest return, in s")
    parser.add_argument("--within", type=int, metavar="STEPS", help="longest span of all faults")
    parser.add_argument("--hours", type=float, default=3.0, help="no fault begins after that")
    parser.add_argument(
        "--processes-per-site",
        type=int,
        nargs="+",
        default=[1],
        metavar="N",
        help="one number for all sites, or one for each; one of a site's is struck",
    )
    parser.add_argument("--megabits", type=float, default=MEGABITS, help="rate of a site, a second")
    parser.add_argument(
        "--averages",
        type=int,
        default=0,
        metavar="N",
        help="averages of gradients in the state, which cross to a site that returns",
    )
    parser.add_argument("--output", type=Path, help="JSON to write; default: with the results")
    parser.add_argument("--folder", type=Path, help="keeps logs and metrics; default: none")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), metavar="KIND", help=", ".join(KINDS)
    )
    options = parser.parse_args()
    if options.averages < 0 or (options.averages and max(options.processes_per_site) > 1):
        parser.error("--averages must be positive, and is for sites of one process")
    if min(options.faults, *options.processes_per_site) < 1:
        parser.error("--faults and --processes-per-site must be at least 1")
    if len(options.processes_per_site) == 1:
        options.processes_per_site *= len(SITES)
    if len(options.processes_per_site) != len(SITES):
        parser.error(
            f"--processes-per-site: give one number, or one for each of {len(SITES)} sites"
        )
    if any(max(options.processes_per_site) % count for count in options.processes_per_site):
        parser.error("--processes-per-site: each number must divide the largest")
    if options.seed is None:
        options.seed = int.from_bytes(os.urandom(4), "big")
    if options.kinds is None and options.hosts is not None:
        options.kinds = HOSTED_KINDS
    elif options.kinds is None:
        in_default = [kind for kind, about in KINDS.items() if about.in_default]
        options.kinds = in_default if options.within is None else CLOSE_KINDS
    if options.config is not None and not options.config.is_file():
        parser.error(f"{options.config}: there is no such file")
    if options.hosts is not None:
        if options.config is None:
            parser.error("--hosts needs the run's config")
        if options.undisturbed and not (options.undisturbed / METRICS).is_file():
            parser.error(f"--undisturbed: {options.undisturbed} has no {METRICS}")
        if others := [kind for kind in options.kinds if kind not in HOSTED_KINDS]:
            kinds = ", ".join(HOSTED_KINDS)
            parser.error(f"--kinds: {others[0]} is more than a signal; --hosts has {kinds}")
    elif options.runs or options.undisturbed:
        parser.error("--runs and --undisturbed are for --hosts")
    elif os.geteuid() != 0:
        parser.error("namespaces, cgroups and disks need root")
    if options.output is None:
        name = "chaos.json" if options.within is None else "chaos_within.json"
        options.output = Path(name) if options.hosts else RESULTS / name
    return options


def pair(text: str) -> tuple[str, str]:
    """Read SITE=VALUE."""
    site, sign, value = text.partition("=")
    if not (site and sign and value):
        raise argparse.ArgumentTypeError(f"{text!r} must be SITE=VALUE")
    return site, value


def record(path: Path, options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write what has been seen so far."""
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "seed": options.seed,
        "versions": {
            "python": platform.python_version(),
            "jax": jax.__version__,
            "jaxlib": jaxlib.__version__,
            "kernel": platform.release(),
        },
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(about | content, indent=1) + "\n")


def with_wrong_losses(
    trials: list[Trial], distances: dict[int, float], tolerance: float
) -> tuple[list[Trial], list[str]]:
    """Count losses beyond the tolerance as misses of the faults in whose steps they are."""
    judged, rest = [], {step for step, distance in distances.items() if distance > tolerance}
    for trial in trials:
        steps = sorted(step for step in rest if trial.first_step < step <= trial.last_step)
        rest -= set(steps)
        if steps:
            text = f"{len(steps)} other losses from step {steps[0]} on"
            verdict = trial.verdict._replace(misses=(*trial.verdict.misses, text))
            trial = trial._replace(verdict=verdict)
        judged.append(trial)
    lines = [f"step {step}: another loss, by {distances[step]:.1e}" for step in sorted(rest)]
    return judged, lines


class Course(NamedTuple):
    """Faults that were put in, and the losses of the steps meanwhile."""

    trials: list[Trial]
    minutes: float
    calm_gap: float
    """Longest time between two steps without faults, in medians."""
    losses: Mapping[int, float]
    conflicts: Sequence[str]
    """Steps with two losses."""


@contextlib.contextmanager
def small_sites(
    folder: Path, config: Path, options: argparse.Namespace, say: Callable[[Any], None]
) -> Iterator[SupervisedRun]:
    """Start three sites on this machine, each behind a link and with half a core."""
    name, rate = f"chaos{os.getpid()}", options.megabits * 1e6
    with contextlib.ExitStack() as stack:
        disks: list[SmallDisk] = []
        for site in SITES:
            disk = stack.enter_context(small_disk(folder / f"{site}-disk", DISK_MEGABYTES))
            assert disk is not None, "root may mount"
            disks.append(disk)
        network = stack.enter_context(routed_sites(name, len(SITES), rate))
        groups = stack.enter_context(quotas([f"{name}-{site}" for site in SITES], CORES))
        if groups is None:
            say("no cgroups here: each site takes what it gets")
        checked, processes = RunConfig.load(config), options.processes_per_site
        interval, devices = checked.checkpoint.interval, checked.simulate_devices or 1
        run = SupervisedRun(
            folder,
            config,
            disks,
            network,
            groups,
            LEASE_SECONDS,
            interval,
            processes,
            devices,
            options.averages,
        )
        yield stack.enter_context(started(run))


def put_in(
    run: SupervisedRun | HostedRun,
    faults: Sequence[Fault],
    options: argparse.Namespace,
    say: Callable[[Any], None],
) -> Course | None:
    """Put the faults into a run, one after the other; None: the sites do not train."""
    is_close, rate = options.within is not None, options.megabits * 1e6
    trials: list[Trial] = []
    with Sightings(run.written) as sightings:
        injector = Injector(run, sightings, rate, pace_of(options))
        rejoin_steps = REJOIN_STEPS if is_close else 0.0
        campaign = Campaign(run, sightings, injector, options.rejoin, rejoin_steps)
        if not campaign.begin(0.0 if is_close else CALM_SECONDS):
            say("the sites do not train")
            say("".join(run.log_since(site, 0)[-3000:] for site in range(len(run.sites))))
            return None
        began = time.monotonic()
        say(
            f"a step takes {1e3 * injector.median_step():.0f} ms, without faults at most "
            f"{campaign.calm_gap:.1f} times the median"
        )
        for fault in faults:
            if time.monotonic() - began > options.hours * 3600:
                say(f"{options.hours:g} hours are over after {len(trials)} faults")
                break
            trial = campaign.put(fault)
            trials.append(trial)
            say(shown(trial))
            record(options.output, options, dict(summary_of(trials)))
            if trial.rebuilt and fault is not faults[-1] and not campaign.rebuild():
                say("the sites do not train any more")
                break
        minutes = (time.monotonic() - began) / 60
        if is_close and not trials[-1].rebuilt:
            campaign.settled()  # the losses after the last return are compared too
    return Course(trials, minutes, campaign.calm_gap, sightings.losses, sightings.conflicts)


def pace_of(options: argparse.Namespace) -> Pace:
    """Return the steps that pass around a fault."""
    return USUAL if options.within is None else CLOSE


def main() -> int:
    """Put in the faults, print the table, write the record."""
    end_by_exceptions()  # on whose way out sites end, disks are unmounted and links are taken down
    options = parsed()
    say = Console(width=160, highlight=False, markup=False).print
    try:
        return on_hosts(options, say) if options.hosts else on_this_machine(options, say)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def on_this_machine(options: argparse.Namespace, say: Callable[[Any], None]) -> int:
    """Start three sites here, and put the faults in; return the exit code."""
    faults = drawn_faults(options.faults, options.seed, len(SITES), options.kinds, pace_of(options))
    say(f"seed {options.seed}: {len(faults)} faults")
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="geojax-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        config = chaos_config(folder, options)
        with small_sites(folder, config, options, say) as run:
            course = put_in(run, faults, options, say)
            for name, written in zip(run.sites, run.written, strict=True):
                for file in (METRICS, EVENTS):  # the sites' disks are about to go
                    if (written / file).exists():
                        shutil.copy(written / file, folder / f"{name}-{file}")
        if course is None:
            return 1
        last_step = max(course.losses, default=0)
        say(f"{in_minutes(course)}; the undisturbed run follows")
        processes = options.processes_per_site
        devices = max(processes) * (RunConfig.load(config).simulate_devices or 1)
        undisturbed = undisturbed_losses(folder / "undisturbed", config, devices, last_step, say)
    machine = {
        "machine": {"device": "CPU", "cores": len(os.sched_getaffinity(0))},
        "half_a_core_each": run.has_quotas,
        "megabits": options.megabits,
        "averages": options.averages,
        "processes_per_site": processes,
    }
    return reported(course, undisturbed, machine, options, say)


def on_hosts(options: argparse.Namespace, say: Callable[[Any], None]) -> int:
    """Put the faults into a run that goes on already; return the exit code."""
    config = RunConfig.load(options.config)
    hosts = dict(options.hosts)
    given = {site: Path(directory) for site, directory in options.runs}
    directories = {site: given.pop(site, config.run_directory) for site in hosts}
    if given:
        raise UserError(f"--runs: {', '.join(given)} has no host in --hosts")
    undisturbed = losses(options.undisturbed) if options.undisturbed else None
    with watched(HostedRun(config, hosts, directories, shlex.split(options.ssh))) as run:
        count = len(run.sites)
        faults = drawn_faults(options.faults, options.seed, count, options.kinds, pace_of(options))
        faults = [fault._replace(phase=ANY_PHASE) for fault in faults]
        say(f"seed {options.seed}: {len(faults)} faults of {', '.join(run.sites)}")
        course = put_in(run, faults, options, say)
    if course is None:
        return 1
    say(in_minutes(course))
    return reported(course, undisturbed, {"sites": list(run.sites)}, options, say)


def in_minutes(course: Course) -> str:
    """Say how many faults there were, and for how long."""
    return f"{len(course.trials)} faults in {course.minutes:.0f} min"


def reported(
    course: Course,
    undisturbed: Mapping[int, float] | None,
    machine: Mapping[str, Any],
    options: argparse.Namespace,
    say: Callable[[Any], None],
) -> int:
    """Print the table, write the record, and return the exit code.

    Args:
        course: the faults, and the losses meanwhile.
        undisturbed: losses without faults, by step; None: nobody knows them.
        machine: figures of where the run was.
        options: of the command.
        say: shows a line or a table.
    """
    tolerance = TOLERANCE if options.within is None else 0.0
    last_step = max(course.losses, default=0)
    distances = other_losses(course.losses, undisturbed or {})
    trials, lines = with_wrong_losses(course.trials, distances, tolerance)
    seen: dict[str, Any] = {"steps": last_step, "of_two_sites": course.conflicts}
    lines += course.conflicts
    if undisturbed is not None:
        seen["compared"] = len(set(course.losses) & set(undisturbed))
        seen["not_to_the_bit"] = len(distances)
        seen["largest_relative_distance"] = max(distances.values(), default=0.0)
        if seen["compared"] < last_step:
            lines.append(f"{seen['compared']} of {last_step} losses could be compared")
    content = dict(summary_of(trials)) | {
        "minutes": course.minutes,
        "losses": seen,
        "calm_gap": course.calm_gap,
        **machine,
    }
    say(table_of(trials))
    for line in [*failures(trials), *lines]:
        say(line)
    if undisturbed is not None:
        say(
            f"{seen['compared']} losses beside the undisturbed run: {len(distances)} not to the "
            f"bit, by at most {seen['largest_relative_distance']:.1e}"
        )
    passed = not failures(trials) and not lines
    if options.within is not None:
        steps, killed = span_of(trials), killed_sites(trials)
        passed = not lines and all(map(is_late_at_most, trials))
        passed = passed and len(trials) == options.faults and steps <= options.within
        span = {"steps": steps, "allowed": options.within, "killed": killed, "passed": passed}
        content["within"] = span
        times = ", ".join(f"{site} {count}" for site, count in killed.items())
        say(
            f"{len(trials)} faults began and ended within {steps} consecutive steps, "
            f"{options.within} allowed; killed: {times}: {'passed' if passed else 'FAILED'}"
        )
    record(options.output, options, content)
    return 0 if passed else 1


def shown(trial: Trial) -> str:
    """Return a line for a trial."""
    verdict = trial.verdict
    figures = {
        "detected": verdict.detection,
        "next step": verdict.next_step,
        "longest gap": verdict.longest_gap,
        "median": verdict.median_step,
        "rejoin": verdict.rejoin,
    }
    words = [f"{name} {value:.2f} s" for name, value in figures.items() if value is not None]
    judgment = "; ".join(verdict.misses) if verdict.misses else "recovered"
    return f"{in_words(trial)}: {', '.join(words)}: {judgment}"


if __name__ == "__main__":
    raise SystemExit(main())
