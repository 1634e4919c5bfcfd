"""`geojax plan`: the layout in which a model trains fastest on a topology, and why."""

import dataclasses
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import pydantic
import tyro
from rich.console import Console

from geojax.cli import plan_tables
from geojax.errors import UserError
from geojax.quantities import Count, Length, Tokens
from geojax.settings import Settings, validate

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.planner.cost.calibration import Calibration
    from geojax.planner.cost.layout import LayoutCandidate
    from geojax.planner.cost.prediction import Prediction
    from geojax.planner.search.request import PlanRequest
    from geojax.planner.search.search import Candidate, SearchResult
    from geojax.planner.search.sensitivity import LayoutTimer
    from geojax.topology import Topology

_PER_ROLE = 3
_KEYS = {
    "--topology": "topology",
    "--global-batch": "batch.global_batch_size",
    "--sequence-length": "batch.sequence_length",
}
"""Settings of a config that are options as well."""


class Options(Settings):
    """The numbers of the command, checked."""

    global_batch: Count | None
    sequence_length: Length | None
    tokens: Tokens | None
    rows: Annotated[int, pydantic.Field(ge=1, le=100)]
    trace: Annotated[int, pydantic.Field(ge=0, le=100)]


@dataclasses.dataclass(frozen=True)
class PlanCommand:
    """Find the layout in which a model trains fastest on a topology: in seconds, without a device.

    With CONFIG, the plan keeps its model, topology, batch and precision. Options change settings:
    `--batch.global_batch_size 1024`. With MODEL (a preset or a YAML file), give --topology,
    --global-batch and --sequence-length. Times are predicted, not measured.
    """

    config: Annotated[tyro.conf.Positional[Path], tyro.conf.arg(metavar="CONFIG|MODEL")]
    """YAML file of a run, or name or YAML file of a model."""

    topology: str | None = None
    """Preset or YAML file of the sites; default: the config's."""

    global_batch: int | None = None
    """Sequences of a step; default: the config's."""

    sequence_length: int | None = None
    """Tokens of a sequence; default: the config's."""

    roles: tuple[Literal["data", "stage"], ...] = ("data", "stage")
    """Roles of the sites to choose from."""

    joins: tuple[Literal["one_program", "islands"], ...] = ()
    """Ways to join the sites to choose from. Default: one_program, or islands if sites differ in
    number or kind of accelerators."""

    precisions: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAME")] = ()
    """Precisions to choose from; default: the config's, or bf16."""

    compressions: tuple[Literal["none", "bf16", "int8"], ...] = ()
    """Gradient compressions to choose from; default: the config's, or none."""

    stage_times: Path | None = None
    """YAML file of the times that `geojax probe` measured for the model's pieces, in place of
    published peaks. The plan then holds only layouts with the measured sequences, tensor ranks and
    so on."""

    measured: bool = False
    """Take the rates of the topology as reached: `geojax probe` wrote it."""

    tokens: Annotated[str | None, tyro.conf.arg(metavar="9T")] = None
    """Token budget, to predict the days of a run."""

    rows: int = 8
    """Layouts in the table."""

    explain: Annotated[str | None, tyro.conf.arg(metavar="ROW|CONFIG")] = None
    """Print the terms of one layout: a row of the table, or the run in a YAML file."""

    trace: int = 0
    """Number of layouts, from the best on, whose memory is traced as `geojax memory` does. Each
    takes seconds."""

    output: Annotated[Path | None, tyro.conf.arg(metavar="FILE.yaml")] = None
    """File for the best layout that also fits by its trace, as a config that `geojax train`
    runs."""

    pictures: Annotated[Path | None, tyro.conf.arg(metavar="FOLDER")] = None
    """Folder for three pictures. roles.png: each role's step time over bandwidth and round trip.
    step.png: the terms of the best layout's step. timeline.png: its pipeline at work."""


def run(command: PlanCommand, overrides: Sequence[str]) -> int:
    """Print the plan, write what is asked for, and return the exit code 0."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    import jax

    from geojax.cli.planned_runs import PlannedRuns, new_run
    from geojax.planner.search.advice import why_none
    from geojax.planner.search.dimensions import not_searched
    from geojax.planner.search.fewer_sites import without_each_site
    from geojax.planner.search.one_site import one_site_efficiency
    from geojax.planner.search.request import are_alike
    from geojax.planner.search.search import NOT_MEASURED, search
    from geojax.planner.search.sensitivity import gains, memory_gain

    jax.config.update("jax_platforms", "cpu")  # no accelerator is touched
    console = Console(highlight=False, soft_wrap=True, markup=False)
    options = _options(command)
    _check_outputs(command)
    config, request = _request(command, overrides)
    calibration = _calibration(command)
    if calibration.stage_times is not None:
        request = dataclasses.replace(request, remats=(calibration.stage_times.remat,))
    timer = _timer(request, calibration)
    started = time.monotonic()
    with console.status("searching layouts"):
        found = search(
            request,
            lambda layout: timer(layout, request.topology),
            calibration,
            keep=options.rows,
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
    fresh = new_run(command.config, command.topology or "", request)
    runs = PlannedRuns(request, fresh, config)
    with console.status("tracing the first"):
        fitting = runs.beginning_with_one_that_fits(found.best)
    if not fitting.best:
        raise UserError(
            f"no layout of the table fits by its trace; more --rows than {len(found.best)} might"
        )
    found = dataclasses.replace(found, best=fitting.best)
    best = found.best[0]
    console.print(plan_tables.heading(request))
    console.print(plan_tables.searched(found, seconds))
    for line in fitting.left_out:
        console.print(line)
    console.print(plan_tables.layouts_table(request, found.best))
    if note := plan_tables.what_runs(request, found.best):
        console.print(note)
    with console.status("comparing with one site"):
        efficiencies = [
            one_site_efficiency(each.layout, request.topology, timer) for each in found.best
        ]
    console.print(plan_tables.figures_table(request, found.best, efficiencies))
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
    console.print(plan_tables.pace(request, best, options.tokens))
    if command.explain is not None:
        layout = _layout_to_explain(command.explain, found.best)
        console.print(plan_tables.terms(layout, timer(layout, request.topology)))
    console.print(f"not searched: {'; '.join(not_searched(request))}")
    console.print(f"not modelled: {'; '.join(best.prediction.not_modelled)}")
    for row, each in enumerate(found.best[: options.trace], 1):
        with console.status("tracing"):
            console.print(f"{row}: {runs.traced(each).line}")
    if command.output is not None:
        with console.status("tracing"):
            row = runs.write_first_that_fits(found.best, command.output)
        console.print(f"{command.output}: layout {row}, for geojax train {command.output}")
    if command.pictures is not None:
        with console.status("drawing"):
            written = _draw(command.pictures, request, found, timer, calibration)
        console.print(f"{command.pictures}: {', '.join(written)}")
    return 0


def _options(command: PlanCommand) -> Options:
    given = vars(command)
    return validate(Options, {name: given[name] for name in Options.model_fields}, "geojax plan")


def _check_outputs(command: PlanCommand) -> None:
    """Check, before the search, that what is asked for can be written.

    Raises:
        UserError: a folder cannot be there, because a file is.
    """
    outputs = {"--pictures": command.pictures}
    outputs["--output"] = None if command.output is None else command.output.parent
    for option, folder in outputs.items():
        if folder is None:
            continue
        there = next((path for path in (folder, *folder.parents) if path.exists()), folder)
        if not there.is_dir():
            raise UserError(f"{option}: {there} is no folder; name another one")
    if command.output is not None and command.output.is_dir():
        raise UserError(f"--output: {command.output} is a folder; name a file in it")


def _request(
    command: PlanCommand, overrides: Sequence[str]
) -> "tuple[RunConfig | None, PlanRequest]":
    """Return the question, and the config that it comes from if it comes from one."""
    from geojax.config.run_config import RunConfig
    from geojax.models import ModelConfig
    from geojax.planner.search.request import PlanRequest, joins_of
    from geojax.topology import Topology

    given = {
        "--topology": command.topology,
        "--global-batch": command.global_batch,
        "--sequence-length": command.sequence_length,
    }
    choices: dict[str, Any] = {"roles": command.roles}
    choices |= {"precisions": command.precisions} if command.precisions else {}
    choices |= {"compressions": command.compressions} if command.compressions else {}
    if _is_run(command.config):
        for name, key in _KEYS.items():
            if given[name] is not None:
                overrides = [*overrides, f"--{key}", str(given[name])]
        config = RunConfig.load(command.config, overrides)
        topology = config.load_topology()
        if topology is None:
            raise UserError(
                f"{command.config}: a plan needs a topology; add one, such as --topology "
                "two-h100-sites"
            )
        own: dict[str, Any] = {
            "precisions": (config.precision,),
            "compressions": (config.communication.gradient_compression,),
            "optimizer": config.optimizer,
            "joins": command.joins or joins_of(topology),
        }
        batch = config.batch
        return config, PlanRequest(
            config.model,
            topology,
            batch.global_batch_size,
            batch.sequence_length,
            **own | choices,
        )
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise UserError(f"geojax plan MODEL needs {' and '.join(missing)} as well")
    if overrides:
        raise UserError(f"unknown argument {overrides[0]}; settings can be changed with a CONFIG")
    assert command.topology is not None, "it was given"
    topology = Topology.load(command.topology)
    return None, PlanRequest(
        ModelConfig.load(str(command.config)),
        topology,
        command.global_batch or 0,
        command.sequence_length or 0,
        joins=command.joins or joins_of(topology),
        **choices,
    )


def _is_run(path: Path) -> bool:
    """Tell a run's file from a model's, or from the name of a preset."""
    from geojax.settings import load_yaml

    if path.suffix not in (".yaml", ".yml"):
        return False
    return not load_yaml(path).keys().isdisjoint(("model", "run_directory", "batch"))


def _calibration(command: PlanCommand) -> "Calibration":
    """Return what accelerators and networks reach of their rates."""
    from geojax.pipeline.simulation.stage_times import StageTimes
    from geojax.planner.cost.calibration import MEASURED, Calibration

    calibration = MEASURED if command.measured else Calibration()
    if command.stage_times is None:
        return calibration
    return dataclasses.replace(calibration, stage_times=StageTimes.load(command.stage_times))


def _timer(request: "PlanRequest", calibration: "Calibration") -> "LayoutTimer":
    """Return the cost model, which remembers what it predicted for the request's topology."""
    from geojax.planner.cost.predict import predict

    known: dict[LayoutCandidate, Prediction] = {}

    def predicted(layout: "LayoutCandidate", topology: "Topology") -> "Prediction":
        if topology is request.topology and layout in known:
            return known[layout]
        made = predict(
            request.model,
            layout,
            topology,
            sequence_length=request.sequence_length,
            calibration=calibration,
            optimizer=request.optimizer,
        )
        if topology is request.topology:
            known[layout] = made
        return made

    return predicted


def _layout_to_explain(named: str, best: "Sequence[Candidate]") -> "LayoutCandidate":
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


def _draw(
    folder: Path,
    request: "PlanRequest",
    found: "SearchResult",
    timer: "LayoutTimer",
    calibration: "Calibration",
) -> list[str]:
    """Draw the roles over the links' properties, and a step of the best layout."""
    from geojax.pipeline.drawing.timelines import save_timelines
    from geojax.planner.search.drawing import save_sweeps, save_terms
    from geojax.planner.search.sensitivity import sweeps
    from geojax.planner.search.timeline import step_timeline

    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--pictures {folder}: cannot be made ({error.strerror})") from None
    best = found.best[0]
    save_terms(best.prediction, str(best.layout), folder / "step.png")
    written = ["step.png"]
    pipeline = step_timeline(request, best.layout, calibration)
    if pipeline is not None:
        save_timelines([pipeline.timeline], pipeline.sites, folder / "timeline.png")
        written.append("timeline.png")
    if request.topology.links:
        layouts = {
            role: [each.layout for each in found.best if each.layout.dc_role == role][:_PER_ROLE]
            for role in request.roles
        }
        layouts = {role: own for role, own in layouts.items() if own}
        save_sweeps(sweeps(layouts, request.topology, timer), folder / "roles.png")
        written.append("roles.png")
    return written
