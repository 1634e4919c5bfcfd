"""Predicted step times beside measured ones: eight layouts on two sites of four simulated devices.

    python benchmarks/measured_plans.py --output measured_plans.json        # as root, on Linux

Two processes of four simulated devices, each on a core of its own, train the same Llama on the same
batch over the link that `geojax wan up` emulates: both roles of the sites, as one program and as
islands. `geojax probe` measures beforehand, in the same places: the times of a layer, embedding and
head, the devices and their network, the link, and what messages cost a core that also computes. The
plan of each layout follows from that; no measured step is an input.

A goal that is missed is named, and the exit code is 1: median error at most 15%, rank correlation
(Spearman) at least 0.8. Layouts that the output file has are measured again only where --only names
them. Whatever else runs on the machine can only slow a step down, so the fastest attempt counts.
"""

import argparse
import dataclasses
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import yaml
from rich.console import Console
from rich.table import Table
from wan_sides.contestants import Contestant
from wan_sides.geojax_side import run_config
from wan_sides.link import Link, link
from wan_sides.team import team, worker_environment
from wan_sides.work import ROWS, SEQUENCE

from geojax.job.cluster_env import VARIABLES
from geojax.pipeline.simulation.stage_times import StageTimes
from geojax.planner.cost.calibration import MEASURED
from geojax.planner.cost.predict import predict
from geojax.planner.cost.prediction import Prediction
from geojax.planner.resolve.run_layout import layout_of_run
from geojax.topology import Topology
from geojax.wan import WanSettings

LINK = WanSettings(round_trip_seconds=0.021, bytes_per_second=500e6 / 8)
NAME = "plans"
PORT = 29_500
DEVICES = 4
REPEATS = 2
MEDIAN_LIMIT, RANK_LIMIT = 0.15, 0.8
WARM_UP = 10
"""Steps until the allocator has taken what it keeps: some before last half as long again, for new
pages."""
STEPS = 6
START_SECONDS, STEP_SECONDS = 200.0, 60.0


def layouts() -> list[Contestant]:
    """Both roles, one program and islands."""
    mesh = {"mesh": {"dc": 2, "data": DEVICES}}
    one_bucket = {"bucket_bytes": 2**30, "overlap_grad_reduce": False}

    def of(name: str, role: str, microbatches: int, settings: dict[str, Any]) -> Contestant:
        batch = {
            "global_batch_size": REPEATS * ROWS,
            "sequence_length": SEQUENCE,
            "microbatches": microbatches,
        }
        side = "islands_side" if "dc" in settings else "geojax_side"
        return Contestant(
            name,
            side,
            role,
            mesh | {"batch": batch} | settings,
            repeats=REPEATS,
            devices=DEVICES,
        )

    def data(wire: str, join: str) -> Contestant:
        compressed = {} if wire == "fp32" else {"gradient_compression": wire}
        if join == "islands":
            islands = {"dc": {"join": "islands"}, "communication": compressed}
            return of(f"data, islands, {wire}", "data", 2, islands)
        return of(
            f"data, one program, {wire}", "data", 2, {"communication": one_bucket | compressed}
        )

    def stage(schedule: str, join: str) -> Contestant:
        settings: dict[str, Any] = {"pipeline": {"schedule": schedule}}
        if join == "islands":
            settings["dc"] = {"join": "islands"}
        name = f"stage, {join.replace('_', ' ')}, {schedule}"
        return of(name, "stage", 4, settings)

    return [
        *(data(wire, "one_program") for wire in ("fp32", "bf16", "int8")),
        *(data(wire, "islands") for wire in ("fp32", "int8")),
        *(stage(schedule, "one_program") for schedule in ("branch_free", "gpipe")),
        stage("1f1b", "islands"),
    ]


def calibrated(joined: Link, cores: list[int]) -> dict[str, Any]:
    """The topology and the stage times that `geojax probe` writes in the two sites."""
    config = run_config(layouts()[-1].settings, REPEATS)  # the microbatches of a pipeline
    content = config.model_dump(mode="json", exclude_unset=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "run.yaml").write_text(yaml.safe_dump(content))
        wanted = {"topology": folder / "topology.yaml", "stage_times": folder / "times.yaml"}
        command = ["-m", "geojax", "probe", str(folder / "run.yaml"), "--streams", "4", "--output"]
        command += [str(wanted["topology"]), "--stage-times", str(wanted["stage_times"])]
        processes = []
        for number, site in enumerate(joined.wan.sites):
            place = {
                VARIABLES["coordinator"]: f"{joined.wan.sites[0].address}:{PORT}",
                VARIABLES["process_count"]: "2",
                VARIABLES["process_id"]: str(number),
                VARIABLES["site"]: site.name,
                VARIABLES["simulated_devices"]: str(DEVICES),
            }
            words = [*site.command_prefix, sys.executable, *command]
            environment = worker_environment() | {"OMP_NUM_THREADS": "1"} | place
            with (folder / f"{site.name}.log").open("w") as log:
                process = subprocess.Popen(words, env=environment, stdout=log, stderr=log)
            os.sched_setaffinity(process.pid, {cores[number]})
            processes.append(process)
        codes = [process.wait(timeout=START_SECONDS) for process in processes]
        if not wanted["stage_times"].exists():
            logs = [path.read_text()[-2000:] for path in folder.glob("*.log")]
            raise SystemExit("\n".join([f"geojax probe ended with {codes}", *logs]))
        return {key: yaml.safe_load(path.read_text()) for key, path in wanted.items()}


def measured_steps(contestant: Contestant, joined: Link, cores: list[int]) -> dict[str, Any]:
    """Seconds and processor seconds of steps over the long link, once memory no longer grows.

    Of two processes the one that takes longer counts.
    """
    with team(contestant, joined, cores, Path("no weights")) as workers:
        workers.ask("start", START_SECONDS)
        workers.ask("steps", WARM_UP * STEP_SECONDS, count=WARM_UP)
        answers = [workers.ask("steps", STEP_SECONDS, count=1) for _ in range(STEPS)]
    return {
        name: [max(answer[name] for answer in of_step) for of_step in answers]
        for name in ("seconds", "processor_seconds")
    } | {"load_after": os.getloadavg()[0]}


def measure(
    chosen: list[Contestant], joined: Link, record: dict[str, Any], output: Path, console: Console
) -> None:
    """Probe unless it was done, and measure; each result is written at once."""

    def save() -> None:
        output.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")

    joined.shape(True)
    cores = sorted(os.sched_getaffinity(0))[:2]
    if "calibration" not in record:
        console.print("probing ...")
        record["calibration"] = calibrated(joined, cores)
        save()
    for each in chosen:
        console.print(f"{each} ...")
        attempts = record["steps"].setdefault(str(each), [])
        attempts.append(measured_steps(each, joined, cores))
        save()


def planned(contestant: Contestant, calibration: dict[str, Any]) -> Prediction:
    """The plan of a layout, from what was probed."""
    config = run_config(contestant.settings, contestant.repeats)
    times = StageTimes.model_validate(calibration["stage_times"])
    # The runs' own topology knows no peaks, so that their hops take one tick.
    layout = layout_of_run(config).changed(pipeline={"hop_ticks": 1})
    return predict(
        config.model,
        layout,
        Topology.model_validate(calibration["topology"]),
        calibration=dataclasses.replace(MEASURED, stage_times=times),
        optimizer=config.optimizer,
    )


def spearman(first: list[float], second: list[float]) -> float:
    """Correlation of the ranks of two lists without ties."""

    def ranks(values: list[float]) -> list[int]:
        return [sorted(values).index(value) for value in values]

    return statistics.correlation(ranks(first), ranks(second))


def show(console: Console, record: dict[str, Any]) -> list[str]:
    """Print plan and measurement of each layout, and return the goals that are missed."""
    table = Table("layout", "measured", "processor", "planned", "error", "terms", box=None)
    plans, steps = [], []
    for contestant in layouts():
        if str(contestant) not in record["steps"]:
            continue
        prediction = planned(contestant, record["calibration"])
        attempts = record["steps"][str(contestant)]
        own = min(attempts, key=lambda attempt: statistics.median(attempt["seconds"]))
        seconds = statistics.median(own["seconds"])
        worked = own.get("processor_seconds")
        plans.append(prediction.step_seconds)
        steps.append(seconds)
        terms = ", ".join(
            f"{term.name} {term.exposed_seconds:.2f}"
            for term in sorted(prediction.terms, key=lambda term: -term.exposed_seconds)
            if term.exposed_seconds > 0.01 * prediction.step_seconds
        )
        error = prediction.step_seconds / seconds - 1
        table.add_row(
            str(contestant),
            f"{seconds:.2f} s",
            f"{statistics.median(worked):.2f} s" if worked else "",
            f"{prediction.step_seconds:.2f} s",
            f"{error:+.1%}",
            terms,
        )
    console.print(table)
    if len(steps) < 2:
        return []
    median = statistics.median(abs(p / s - 1) for p, s in zip(plans, steps, strict=True))
    rank = spearman(plans, steps)
    console.print(f"{len(steps)} layouts: median error {median:.1%}, rank correlation {rank:.2f}")
    missed = []
    if median > MEDIAN_LIMIT:
        missed.append(f"the median error is {median:.1%}, not {MEDIAN_LIMIT:.0%} or less")
    if rank < RANK_LIMIT:
        missed.append(f"the rank correlation is {rank:.2f}, not {RANK_LIMIT} or more")
    return missed


def _end(number: int, frame: Any) -> None:
    raise SystemExit(128 + number)


def main() -> int:
    signal.signal(signal.SIGTERM, _end)  # on the way out processes end and the link is taken down
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("measured_plans.json"))
    parser.add_argument("--only", nargs="*", help="measure layouts with one of these in their name")
    arguments = parser.parse_args()
    console = Console(width=180, highlight=False, markup=False)
    output: Path = arguments.output
    record = json.loads(output.read_text()) if output.exists() else {"steps": {}}
    chosen = [
        each
        for each in layouts()
        if (
            str(each) not in record["steps"]
            if arguments.only is None
            else any(part in str(each) for part in arguments.only)
        )
    ]
    if chosen or "calibration" not in record:
        with link(LINK, NAME) as joined:
            measure(chosen, joined, record, output, console)
    missed = show(console, record)
    for each in missed:
        console.print(f"missed: {each}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
