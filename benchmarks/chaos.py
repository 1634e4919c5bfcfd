"""Faults of a run of three sites that goes on, drawn by a seed: is it recovered within its bounds?

    python benchmarks/chaos.py                       # as root, on Linux; --help says more
    python benchmarks/chaos.py run.yaml --faults 100 --hours 3 --output chaos.json
    python benchmarks/chaos.py --kinds kill pause --faults 4
    python benchmarks/chaos.py --processes-per-site 1 2 1

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
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import jax
import jaxlib
import yaml
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from chaos_faults.campaign import Campaign, Trial, other_losses, undisturbed_losses
from chaos_faults.chaos_report import failures, in_words, summary_of, table_of
from chaos_faults.drawn_faults import KINDS, drawn_faults
from chaos_faults.half_cores import quotas
from chaos_faults.injections import Injector
from chaos_faults.routed_sites import routed_sites
from chaos_faults.sightings import Sightings
from chaos_faults.supervised_run import SITES, SupervisedRun, started
from support.full_disk import SmallDisk, small_disk
from support.island_jobs import SETTINGS
from support.processes import end_by_exceptions
from support.small_runs import prepare_corpus, write_config

from geojax.config.run_config import RunConfig

OUTPUT = Path(__file__).parent / "results" / "chaos.json"
LEASE_SECONDS = 8.0
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


def small_config(folder: Path, hours: float, devices: int) -> Path:
    """Write a run of three sites on a small model, of so many hours; return the config's path."""
    steps = round((hours + 0.5) * 3600 * STEPS_A_SECOND)
    settings = SETTINGS | {
        "steps": steps,
        "simulate_devices": 1,
        "mesh": {"dc": len(SITES), "data": devices},
        "batch": {"global_batch_size": 144, "sequence_length": 32, "microbatches": 12},
        "evaluation": {"interval": 2 * steps, "sequences": 12},
        "checkpoint": {"interval": 50, "keep": 3},
    }
    return write_config(folder / "small.yaml", prepare_corpus(folder), **settings)


def chaos_config(folder: Path, options: argparse.Namespace) -> Path:
    """Write the config of the run with a record of who takes part; return its path."""
    path = options.config
    if path is None:
        path = small_config(folder, options.hours, max(options.processes_per_site))
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
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON to write")
    parser.add_argument("--folder", type=Path, help="keeps logs and metrics; default: none")
    parser.add_argument(
        "--kinds", nargs="+", choices=list(KINDS), metavar="KIND", help=", ".join(KINDS)
    )
    options = parser.parse_args()
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
    if options.kinds is None:
        options.kinds = [kind for kind, about in KINDS.items() if about.in_default]
    if os.geteuid() != 0:
        parser.error("namespaces, cgroups and disks need root")
    if options.config is not None and not options.config.is_file():
        parser.error(f"{options.config}: there is no such file")
    return options


def record(path: Path, options: argparse.Namespace, content: dict[str, Any]) -> None:
    """Write what has been seen so far."""
    about = {
        "command": shlex.join(["python", *sys.argv]),
        "seed": options.seed,
        "machine": {"device": "CPU", "cores": len(os.sched_getaffinity(0))},
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
    trials: list[Trial], distances: dict[int, float]
) -> tuple[list[Trial], list[str]]:
    """Count losses beyond the tolerance as misses of the faults in whose steps they are."""
    judged, rest = [], {step for step, distance in distances.items() if distance > TOLERANCE}
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


def main() -> int:
    """Put in the faults, print the table, write the record."""
    end_by_exceptions()  # on whose way out sites end, disks are unmounted and links are taken down
    options = parsed()
    console = Console(width=160, highlight=False, markup=False)
    say = console.print
    faults = drawn_faults(options.faults, options.seed, len(SITES), options.kinds)
    say(f"seed {options.seed}: {len(faults)} faults")
    trials: list[Trial] = []
    with contextlib.ExitStack() as stack:
        folder = options.folder
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="geojax-chaos-")))
        folder.mkdir(parents=True, exist_ok=True)
        config = chaos_config(folder, options)
        name = f"chaos{os.getpid()}"
        disks: list[SmallDisk] = []
        for site in SITES:
            disk = stack.enter_context(small_disk(folder / f"{site}-disk", DISK_MEGABYTES))
            assert disk is not None, "root may mount"
            disks.append(disk)
        rate = options.megabits * 1e6
        network = stack.enter_context(routed_sites(name, len(SITES), rate))
        groups = stack.enter_context(quotas([f"{name}-{site}" for site in SITES], CORES))
        if groups is None:
            say("no cgroups here: each site takes what it gets")
        checked, processes = RunConfig.load(config), options.processes_per_site
        interval, devices = checked.checkpoint.interval, checked.simulate_devices or 1
        run = SupervisedRun(
            folder, config, disks, network, groups, LEASE_SECONDS, interval, processes, devices
        )
        with started(run), Sightings(run.written) as sightings:
            injector = Injector(run, sightings, rate)
            campaign = Campaign(run, sightings, injector)
            if not campaign.begin(CALM_SECONDS):
                say("the sites do not train")
                say("".join(run.log_since(site, 0)[-3000:] for site in range(len(SITES))))
                return 1
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
            seconds = time.monotonic() - began
        last_step = max(sightings.losses, default=0)
        conflicts, seen = sightings.conflicts, sightings.losses
        say(f"{len(trials)} faults in {seconds / 60:.0f} min; the undisturbed run follows")
        devices *= max(processes)
        undisturbed = undisturbed_losses(folder / "undisturbed", config, devices, last_step, say)
    distances = other_losses(seen, undisturbed)
    trials, lines = with_wrong_losses(trials, distances)
    losses = {
        "steps": last_step,
        "compared": len(set(seen) & set(undisturbed)),
        "not_to_the_bit": len(distances),
        "largest_relative_distance": max(distances.values(), default=0.0),
        "of_two_sites": conflicts,
    }
    lines += conflicts
    if losses["compared"] < last_step:
        lines.append(f"{losses['compared']} of {last_step} losses could be compared")
    content = dict(summary_of(trials)) | {
        "minutes": seconds / 60,
        "losses": losses,
        "calm_gap": campaign.calm_gap,
        "half_a_core_each": groups is not None,
        "megabits": options.megabits,
        "processes_per_site": processes,
    }
    record(options.output, options, content)
    say(table_of(trials))
    for line in [*failures(trials), *lines]:
        say(line)
    say(
        f"{losses['compared']} losses beside the undisturbed run: {len(distances)} not to the bit, "
        f"by at most {losses['largest_relative_distance']:.1e}"
    )
    return 0 if not failures(trials) and not lines else 1


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
