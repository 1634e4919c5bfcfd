"""Faults of a run of two islands, each so often that luck is seen: does it end or go on as stated?

    python benchmarks/island_faults.py                   # as root, on Linux; --help says more
    python benchmarks/island_faults.py --only "cut of"   # those with this in their name

Two jobs of `geojax train` on this machine, `dc.join: islands`, train a small model. Each fault is
put into a run of its own, and stated is what the documentation says of it:

- *full disk*: at one site, at a drawn moment, until the other has done all steps. The run goes on,
  and its last save waits for space;
- *disk that stays full*: saves fail until one too many has, and both sites end and name the disk;
- *process killed*: the other site ends, and names it;
- *cut of N s*: the bridge between the sites drops all packets for so long, of 40 s of silence.
  The run goes on. *two cuts of 20 s* are two seconds apart;
- *stranger at the start*: lines of another key reach the rendezvous from a drawn moment on. The run
  starts and trains;
- *damaged part*: a byte of a checkpoint is flipped at one site. The run goes on from that step.

A run that goes on ends with exit code 0, and its losses are those of an undisturbed run to the bit.
"""

import argparse
import contextlib
import functools
import json
import os
import platform
import random
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))
from support.bridged_sites import BridgedSites, bridged_sites
from support.full_disk import small_disk
from support.island_jobs import SETTINGS, SITES, site_variables
from support.processes import end_by_exceptions, family
from support.small_runs import command, environment, losses, prepare_corpus, write_config

NAME = "island-faults"
OUTPUT = Path(__file__).parent / "results" / "island_faults.json"
STEPS = 300
FAULT_STEP = 20
"""Step after which a fault comes into a run that trains."""
SILENCE_SECONDS = 40
LIMIT_SECONDS = 420.0
CUTS = (1, 5, 10, 20, 25, 30, 35, 39)
STRANGERS = (
    b'{"process":1,"count":2,"token":"x","host":"evil","versions":{"jax":"9.9"},"site":"west"}\n',
    b'{"process":7,"count":2,"token":"x","host":"evil","versions":{},"site":"west"}\n',
    b'{"process":1,"count":3,"token":"x","host":"evil","versions":{},"site":"west"}\n',
    b"GET / HTTP/1.1\r\n\r\n",
    bytes(1 << 16),
    b"",
)


class Round(NamedTuple):
    """A run with a fault."""

    as_stated: bool
    seconds: float
    note: str


class Jobs:
    """The jobs of both sites, and what they leave."""

    def __init__(
        self,
        folder: Path,
        corpus: Path,
        *arguments: str,
        bridge: BridgedSites | None = None,
        disks: dict[str, Path] | None = None,
        late: dict[str, float] | None = None,
        **variables: str,
    ) -> None:
        """Start the jobs.

        Args:
            folder: of the run and of its logs.
            corpus: prepared data.
            arguments: further ones of `geojax train`.
            bridge: what joins the sites; None: they share this host's loopback.
            disks: folders of sites whose run directory lies elsewhere.
            late: seconds by which sites start later.
            variables: further ones of the environment.
        """
        settings = SETTINGS | {
            "steps": STEPS,
            "simulate_devices": 1,
            "mesh": {"dc": 2},
            "evaluation": {"interval": 100_000, "sequences": 8},
            "checkpoint": {"interval": 10},
        }
        config = write_config(folder / "run.yaml", corpus, **settings)
        self.runs = {site: (disks or {}).get(site, folder) / "run" for site in SITES}
        self.logs = {site: folder / f"{site}.log" for site in SITES}
        self.started = time.monotonic()
        self.jobs: dict[str, subprocess.Popen[bytes]] = {}
        self.port = 0
        for number, (site, given) in enumerate(zip(SITES, site_variables(), strict=True)):
            given |= {"GEOJAX_HEARTBEAT_TIMEOUT": str(SILENCE_SECONDS)}
            self.port = int(
                given["GEOJAX_ISLANDS_COORDINATORS"].partition(",")[0].rpartition(":")[2]
            )
            delay = (late or {}).get(site, 0.0)
            prefix = ["sh", "-c", 'sleep "$0"; exec "$@"', str(delay)] if delay else []
            if bridge is not None:
                prefix = [*prefix, *bridge.command_prefix(number)]
                given["GEOJAX_ISLANDS_ADDRESS"] = bridge.addresses[number]
                given["GEOJAX_ISLANDS_COORDINATORS"] = f"{bridge.addresses[0]}:{self.port}"
            line = command(config, *arguments, "--run_directory", str(self.runs[site]))
            with self.logs[site].open("ab") as log:
                self.jobs[site] = subprocess.Popen(
                    [*prefix, *line],
                    env=environment(**given | variables),
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def __enter__(self) -> "Jobs":
        return self

    def __exit__(self, *error: object) -> None:
        for job in self.jobs.values():
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            for process in family(job.pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            job.wait()

    def step(self, site: str) -> int:
        """The last step that a site has written down."""
        try:
            return max(losses(self.runs[site] / site), default=0)
        except (FileNotFoundError, json.JSONDecodeError):
            return 0

    def wait_for_step(self, site: str, step: int) -> bool:
        """Wait until a site has done a step; False: a job has ended before, or takes too long."""
        return self._wait(lambda: self.step(site) >= step)

    def ended(self) -> bool:
        """Wait until both jobs have ended; False: they take too long."""
        return self._wait(lambda: False) or all(
            job.poll() is not None for job in self.jobs.values()
        )

    def _wait(self, condition: Callable[[], bool]) -> bool:
        deadline = self.started + LIMIT_SECONDS
        while time.monotonic() < deadline:
            if condition():
                return True
            codes = [job.poll() for job in self.jobs.values()]
            if all(code is not None for code in codes):
                return condition()
            time.sleep(0.05)
        return False

    def log(self) -> str:
        """Return what both have printed."""
        return "".join(path.read_text(errors="replace") for path in self.logs.values())

    def last_lines(self) -> str:
        """Return the last line of each site, or its error."""
        last = {}
        for site, path in self.logs.items():
            lines = path.read_text(errors="replace").strip().splitlines()
            telling = [line for line in lines if line.startswith("error: ")] or lines or ["nothing"]
            last[site] = telling[-1].strip()
        return "; ".join(
            f"{site} ({self.jobs[site].poll()}): {line}" for site, line in last.items()
        )

    def went_on(self, undisturbed: dict[int, float], site: str = "west") -> Round:
        """Judge a run that must go on to its end."""
        over = self.ended()
        seconds = time.monotonic() - self.started
        codes = [job.poll() for job in self.jobs.values()]
        if not over or codes != [0, 0]:
            return Round(False, seconds, self.last_lines() if over else f"stuck: {codes}")
        if (written := losses(self.runs[site] / site)) != undisturbed:
            other = next(step for step in undisturbed if undisturbed[step] != written.get(step))
            return Round(False, seconds, f"the loss of step {other} is another")
        return Round(True, seconds, "goes on, losses to the bit")

    def ended_with(self, words: str, since: float) -> Round:
        """Judge a run that must end at both sites, with an error that says `words`."""
        over = self.ended()
        seconds = time.monotonic() - since
        codes = [job.poll() for job in self.jobs.values()]
        stated = over and codes == [1, 1] and words in self.log()
        stated = stated and "Traceback (most recent call last)" not in self.log()
        return Round(stated, seconds, self.last_lines() if over else f"stuck: {codes}")


class Bench(NamedTuple):
    """What all faults share."""

    folder: Path
    corpus: Path
    undisturbed: dict[int, float]
    """Losses by step."""
    rng: random.Random


def full_disk(bench: Bench, place: Path, *, stays: bool = False) -> Round:
    """Fill east's disk at a drawn moment."""
    with small_disk(place / "disk", megabytes=24) as disk:
        assert disk is not None, "root may mount"
        disks = {"east": disk.folder, "west": place / "west"}
        # With saves on the way five in a row may fail first, which ends a run too.
        interval = [] if stays else ["--checkpoint.interval", str(STEPS)]
        with Jobs(place, bench.corpus, *interval, disks=disks) as jobs:
            if not jobs.wait_for_step("west", bench.rng.randrange(5, 60)):
                return Round(False, 0.0, f"did not begin: {jobs.last_lines()}")
            disk.fill()
            since = time.monotonic()
            if stays:
                return jobs.ended_with("could not be saved", since)
            if not jobs.wait_for_step("west", STEPS):
                return Round(False, time.monotonic() - since, f"stuck: {jobs.last_lines()}")
            disk.empty()
            judged = jobs.went_on(bench.undisturbed)
            if "No space left on device; writes lost" not in jobs.log():
                judged = judged._replace(as_stated=False, note=f"no warning: {judged.note}")
            return judged


def process_killed(bench: Bench, place: Path) -> Round:
    """Kill the process of west."""
    with bridged_sites(NAME) as bridge, Jobs(place, bench.corpus, bridge=bridge) as jobs:
        if not jobs.wait_for_step("west", FAULT_STEP):
            return Round(False, 0.0, f"did not begin: {jobs.last_lines()}")
        for process in family(jobs.jobs["west"].pid):
            os.kill(process, signal.SIGKILL)
        return jobs.ended_with("lost the connection to site west", time.monotonic())


def cuts(bench: Bench, place: Path, *, lengths: tuple[float, ...]) -> Round:
    """Cut the link for each of `lengths` in seconds, two seconds apart."""
    with bridged_sites(NAME) as bridge, Jobs(place, bench.corpus, bridge=bridge) as jobs:
        if not jobs.wait_for_step("west", FAULT_STEP):
            return Round(False, 0.0, f"did not begin: {jobs.last_lines()}")
        for number, seconds in enumerate(lengths):
            time.sleep(2.0 if number else 0.0)
            bridge.cut_for(seconds)
        return jobs.went_on(bench.undisturbed)


def stranger(bench: Bench, place: Path) -> Round:
    """Send strangers' lines to the rendezvous from a drawn moment on, until training begins.

    One site, drawn, comes later, so that the other waits at the rendezvous meanwhile.
    """
    begin, late = bench.rng.uniform(0, 6), {bench.rng.choice(SITES): bench.rng.uniform(1, 5)}
    with Jobs(place, bench.corpus, late=late) as jobs:
        time.sleep(begin)
        sent = 0
        while not jobs.step("west") and all(job.poll() is None for job in jobs.jobs.values()):
            with (
                contextlib.suppress(OSError),
                socket.create_connection(("127.0.0.1", jobs.port), 1) as connection,
            ):
                connection.sendall(bench.rng.choice(STRANGERS))
                sent += 1
            time.sleep(bench.rng.uniform(0, 0.05))
        judged = jobs.went_on(bench.undisturbed)
        return judged._replace(note=f"{judged.note}; {sent} lines from {begin:.1f} s on")


def damaged_part(bench: Bench, place: Path) -> Round:
    """Flip a byte of east's part of the newest checkpoint, and start again."""
    half = STEPS // 2
    with Jobs(place, bench.corpus, "--steps", str(half)) as jobs:
        if not jobs.ended():
            return Round(False, 0.0, f"did not end: {jobs.last_lines()}")
    newest = place / "run" / "checkpoints" / "east" / str(half)
    files = [path for path in newest.rglob("*") if path.is_file() and path.stat().st_size]
    chosen = bench.rng.choice(files)
    content = bytearray(chosen.read_bytes())
    content[bench.rng.randrange(len(content))] ^= 1 << bench.rng.randrange(8)
    chosen.write_bytes(content)
    with Jobs(place, bench.corpus) as jobs:
        judged = jobs.went_on(bench.undisturbed)
        if f"resuming from step {half}" not in jobs.log():
            judged = judged._replace(as_stated=False, note=f"not from step {half}: {judged.note}")
    return judged._replace(note=f"{judged.note}; a byte of {chosen.relative_to(newest)}")


FAULTS: dict[str, tuple[int, Callable[[Bench, Path], Round]]] = {
    "full disk": (10, full_disk),
    "disk that stays full": (1, functools.partial(full_disk, stays=True)),
    "process killed": (3, process_killed),
    **{f"cut of {length} s": (1, functools.partial(cuts, lengths=(length,))) for length in CUTS},
    "two cuts of 20 s": (1, functools.partial(cuts, lengths=(20, 20))),
    "stranger at the start": (10, stranger),
    "damaged part": (5, damaged_part),
}
"""Runs of each fault."""


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="PART", help="faults with this in their name"
    )
    parser.add_argument("--rounds", type=int, help="runs of each fault; default: its own number")
    parser.add_argument("--seed", type=int, default=0, help="seed of what is drawn")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="JSON to write")
    options = parser.parse_args()
    if options.rounds is not None and options.rounds < 1:
        parser.error("--rounds must be at least 1")
    for part in options.only:
        if not any(part in name for name in FAULTS):
            parser.error(f"--only {part}: in no fault's name; there are {', '.join(FAULTS)}")
    if os.geteuid() != 0:
        parser.error("full disks and cuts need root, to mount and to make network namespaces")
    return options


def record(path: Path, found: dict[str, list[Round]]) -> None:
    """Write what has been seen so far, beside faults of an earlier start."""
    content: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"faults": {}}
    content["commands"] = [*content.get("commands", []), shlex.join(["python", *sys.argv])]
    content["machine"] = {"device": "CPU", "cores": len(os.sched_getaffinity(0))}
    content["versions"] = {
        "python": platform.python_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "kernel": platform.release(),
    }
    content["faults"] |= {
        name: [each._asdict() for each in rounds] for name, rounds in found.items()
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def main() -> int:
    """Run the faults, print the table, write the record."""
    end_by_exceptions()  # on whose way out jobs end, disks are unmounted and the link is taken down
    options = parsed()
    console = Console(width=150, highlight=False, markup=False)
    rng = random.Random(options.seed)
    found: dict[str, list[Round]] = {}
    with tempfile.TemporaryDirectory(prefix="geojax-faults-") as name:
        folder = Path(name)
        corpus = prepare_corpus(folder)
        (alone := folder / "undisturbed").mkdir()
        with Jobs(alone, corpus) as jobs:
            if not jobs.ended() or not jobs.wait_for_step("west", STEPS):
                console.print(jobs.log())
                return 1
            undisturbed = losses(jobs.runs["west"] / "west")
        bench = Bench(folder, corpus, undisturbed, rng)
        for fault, (rounds, put) in FAULTS.items():
            if options.only and not any(part in fault for part in options.only):
                continue
            found[fault] = []
            for number in range(options.rounds or rounds):
                place = folder / f"{fault} {number}".replace(" ", "-")
                place.mkdir()
                judged = put(bench, place)
                found[fault].append(judged)
                word = "as stated" if judged.as_stated else "NOT AS STATED"
                console.print(f"{fault}: {word}, {judged.seconds:.0f} s, {judged.note}")
    record(options.output, found)
    table = Table("fault", "runs", "as stated", "seconds", "notes")
    for fault, judged_rounds in found.items():
        seconds = [each.seconds for each in judged_rounds]
        stated = sum(each.as_stated for each in judged_rounds)
        notes = dict.fromkeys(each.note for each in judged_rounds if not each.as_stated)
        span = f"{min(seconds):.0f} to {max(seconds):.0f}"
        table.add_row(fault, str(len(seconds)), str(stated), span, "\n".join(notes))
    console.print(table)
    return 0 if all(each.as_stated for rounds in found.values() for each in rounds) else 1


if __name__ == "__main__":
    raise SystemExit(main())
