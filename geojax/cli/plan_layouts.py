"""The section of `geojax plan` on other layouts: the fastest, why they are, and what would help."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from rich.console import Console

from geojax.cli import plan_tables
from geojax.cli.plan_options import PlanCommand
from geojax.errors import UserError

if TYPE_CHECKING:
    from geojax.cli.planned_runs import PlannedRuns
    from geojax.config.run_config import RunConfig
    from geojax.planner.cost.calibration import Calibration
    from geojax.planner.cost.layout import LayoutCandidate
    from geojax.planner.cost.prediction import Prediction
    from geojax.planner.search.request import PlanRequest
    from geojax.planner.search.search import Candidate, SearchResult
    from geojax.planner.search.sensitivity import LayoutTimer

_PER_ROLE = 3


class FoundLayouts(NamedTuple):
    """The fastest layouts of a request."""

    request: "PlanRequest"
    calibration: "Calibration"
    timer: "LayoutTimer"
    result: "SearchResult"
    """Its first layout fits by a trace where the closed form is not sure."""
    left_out: tuple[str, ...]
    """A line for each layout that was faster and does not fit."""
    runs: "PlannedRuns"
    seconds: float
    """Time of the search."""

    @property
    def best(self) -> "tuple[Candidate, ...]":
        """The layouts, fastest first."""
        return self.result.best

    def to_json(self) -> list[dict[str, Any]]:
        """Return plain dicts, strings and numbers."""
        return [
            {
                "layout": str(each.layout),
                "step_seconds": each.seconds,
                "memory_bytes": each.memory.bytes,
            }
            for each in self.best
        ]


def find_layouts(
    command: PlanCommand,
    request: "PlanRequest",
    config: "RunConfig | None",
    calibration: "Calibration",
    console: Console,
) -> FoundLayouts:
    """Search for the fastest layouts.

    Raises:
        UserError: none fits, or too little is known.
    """
    from geojax.cli.plan_request import timer_of
    from geojax.cli.planned_runs import PlannedRuns, new_run
    from geojax.planner.search.advice import why_none
    from geojax.planner.search.search import NOT_MEASURED, search

    timer = timer_of(request, calibration)
    started = time.monotonic()
    with console.status("searching layouts"):
        found = search(
            request, lambda layout: timer(layout, request.topology), calibration, keep=command.rows
        )
    if not found.best:
        if found.refused[NOT_MEASURED]:
            raise UserError(
                f"--stage-times {command.stage_times}: no layout that fits has the microbatch, "
                "remat, precision and parallelism that were measured. Measure a config's with "
                "geojax probe CONFIG --stage-times FILE"
            )
        raise UserError(why_none(request))
    seconds = time.monotonic() - started
    runs = PlannedRuns(request, new_run(command.config, command.topology or "", request), config)
    with console.status("tracing the first"):
        fitting = runs.beginning_with_one_that_fits(found.best)
    if not fitting.best:
        raise UserError(
            f"no layout of the table fits by its trace; more --rows than {len(found.best)} might"
        )
    found = dataclasses.replace(found, best=fitting.best)
    return FoundLayouts(request, calibration, timer, found, fitting.left_out, runs, seconds)


def print_layouts(found: FoundLayouts, own: "Prediction | None", console: Console) -> None:
    """Tabulate the layouts, and say why the first is the fastest and what would help it.

    Args:
        found: the layouts.
        own: the step of the config's own layout; None: not known.
        console: where to print.
    """
    from geojax.planner.search.dimensions import not_searched
    from geojax.planner.search.fewer_sites import without_each_site
    from geojax.planner.search.one_site import one_site_efficiency
    from geojax.planner.search.request import are_alike
    from geojax.planner.search.sensitivity import gains, memory_gain

    request, timer, calibration = found.request, found.timer, found.calibration
    best = found.best[0]
    console.print(plan_tables.searched(found.result, found.seconds))
    for line in found.left_out:
        console.print(line)
    console.print(plan_tables.layouts_table(request, found.best))
    if note := plan_tables.what_runs(request, found.best):
        console.print(note)
    with console.status("comparing with one site"):
        efficiencies = [
            one_site_efficiency(each.layout, request.topology, timer) for each in found.best
        ]
    console.print(plan_tables.figures_table(request, found.best, efficiencies))
    if own is not None:
        console.print(plan_tables.beside_own(own, best))
    if not are_alike(request.topology):
        with console.status("leaving out each site"):
            for fewer in without_each_site(request, timer, calibration):
                console.print(plan_tables.without(fewer, best))
    if len(found.best) > 1:
        console.print(plan_tables.why(best, found.best[1]))
    with console.status("taking derivatives"):
        helps = gains(best.layout, request.topology, timer)
        if math.isfinite(request.usable_bytes):
            helps.append(memory_gain(request, best.seconds, timer, calibration))
        helps.sort(key=lambda gain: -gain.seconds)
    console.print(plan_tables.limits(best, helps))
    console.print(f"not searched: {'; '.join(not_searched(request))}")
    console.print(f"not modelled: {'; '.join(best.prediction.not_modelled)}")


def print_traces(found: FoundLayouts, most: int, console: Console) -> None:
    """Trace the memory of the first layouts of the table."""
    for row, each in enumerate(found.best[:most], 1):
        with console.status("tracing"):
            console.print(f"{row}: {found.runs.traced(each).line}")


def write_config(found: FoundLayouts, path: Path, console: Console) -> None:
    """Write the fastest layout that fits by its trace as a config.

    Raises:
        UserError: none does, or the file cannot be written.
    """
    with console.status("tracing"):
        row = found.runs.write_first_that_fits(found.best, path)
    console.print(f"{path}: layout {row}, for geojax train {path}")


def layout_to_explain(named: str, best: "Sequence[Candidate]") -> "LayoutCandidate":
    """Return the layout of a row of the table, or of the run in a YAML file.

    Raises:
        UserError: there is no such row, or the file has a mistake.
    """
    from geojax.config.run_config import RunConfig
    from geojax.planner.resolve.run_layout import layout_of_run

    if not named.isdecimal():
        return layout_of_run(RunConfig.load(Path(named)))
    if not 1 <= int(named) <= len(best):
        raise UserError(f"--explain {named}: the table has the rows 1 to {len(best)}")
    return best[int(named) - 1].layout


def draw_roles(found: FoundLayouts, image: Path) -> None:
    """Draw the step time of each role over the links' bandwidth and round trip."""
    from geojax.planner.search.drawing import save_sweeps
    from geojax.planner.search.sensitivity import sweeps

    layouts = {
        role: [each.layout for each in found.best if each.layout.dc.role == role][:_PER_ROLE]
        for role in found.request.roles
    }
    layouts = {role: of_role for role, of_role in layouts.items() if of_role}
    save_sweeps(sweeps(layouts, found.request.topology, found.timer), image)


def draw_step(
    request: "PlanRequest",
    layout: "LayoutCandidate",
    prediction: "Prediction",
    calibration: "Calibration",
    folder: Path,
) -> list[str]:
    """Draw the terms of a layout's step and its pipeline at work; return the files' names."""
    from geojax.pipeline.drawing.timelines import save_timelines
    from geojax.planner.search.drawing import save_terms
    from geojax.planner.search.timeline import step_timeline

    save_terms(prediction, str(layout), folder / "step.png")
    pipeline = step_timeline(request, layout, calibration)
    if pipeline is None:
        return ["step.png"]
    save_timelines([pipeline.timeline], pipeline.sites, folder / "timeline.png")
    return ["step.png", "timeline.png"]
