"""The page of `geojax plan`: a section for each question, in the order in which people ask."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
from rich.console import Console

from geojax.cli import plan_tables
from geojax.cli.plan_compiled import print_compiled, target_of
from geojax.cli.plan_layouts import (
    FoundLayouts,
    draw_roles,
    draw_step,
    find_layouts,
    layout_to_explain,
    print_layouts,
    print_traces,
    write_config,
)
from geojax.cli.plan_options import PlanCommand
from geojax.cli.plan_request import (
    asks_about_another,
    calibration_of,
    config_of,
    request_of_config,
    request_of_model,
    timer_of,
)
from geojax.cli.plan_schedules import print_schedules
from geojax.cli.plan_step import OwnStep
from geojax.cli.simulated_pipeline import SimulatedPipeline
from geojax.errors import UserError
from geojax.exit_codes import FAILURE

if TYPE_CHECKING:
    from geojax.planner.compile_target import CompileTarget
    from geojax.planner.cost.calibration import Calibration
    from geojax.planner.cost.layout import LayoutCandidate
    from geojax.planner.cost.prediction import Prediction
    from geojax.planner.search.request import PlanRequest


class PredictedStep(NamedTuple):
    """A layout with its predicted step, to be drawn."""

    layout: "LayoutCandidate"
    prediction: "Prediction"

    def to_json(self) -> dict[str, Any]:
        """Return plain dicts, strings and numbers."""
        return {
            "seconds": self.prediction.step_seconds,
            "relative_error": self.prediction.relative_error,
            "model_flops_utilization": self.prediction.model_flops_utilization,
            "terms": [dataclasses.asdict(term) for term in self.prediction.terms],
        }


def print_model_page(command: PlanCommand, overrides: Sequence[str], console: Console) -> int:
    """Print the fastest layouts of a model, and return the exit code 0.

    Raises:
        UserError: an option is missing or not possible, or no layout fits.
    """
    calibration = calibration_of(command)
    request = request_of_model(command, overrides, calibration)
    jax.config.update("jax_platforms", "cpu")  # no accelerator is touched
    found = find_layouts(command, request, None, calibration, console)
    best = found.best[0]
    sizes = request.global_batch_size, request.sequence_length
    console.print(
        plan_tables.question(request.model, request.topology, *sizes, request.precisions),
        *plan_tables.links(request.topology),
        sep="\n",
    )
    print_layouts(found, None, console)
    console.print(plan_tables.pace(sizes, best.prediction, command.tokens))
    _print_more(command, request, calibration, found, console)
    if command.pictures is not None:
        step = PredictedStep(best.layout, best.prediction)
        _draw(command.pictures, request, calibration, step, found, console)
    _write_figures(command, {"layouts": found.to_json()}, console)
    return 0


class ConfigPage:
    """The page of a config: what is known of its step, and of faster ones."""

    def __init__(self, command: PlanCommand, overrides: Sequence[str], console: Console):
        """Trace the step, and check all that options ask for.

        Raises:
            UserError: the config has a mistake, or an option asks for what cannot be had.
        """
        self._command, self._console = command, console
        self._config = config_of(command, overrides)
        jax.config.update("jax_enable_x64", self._config.precision == "fp64")
        self._calibration = calibration_of(command)
        self._target = target_of(command.target, self._config) if command.compile else None
        self._pipeline = None
        if command.schedules is not None:
            self._pipeline = SimulatedPipeline.of(self._config, command, self._calibration)
        self._request: PlanRequest | None = None
        self._no_request: UserError | None = None
        try:
            self._request = request_of_config(self._config, command.choices, self._calibration)
        except UserError as reason:
            if command.asks_for_layouts or command.explain is not None:
                raise
            self._no_request = reason
        # A step without described accelerators is traced for those of this machine.
        described = self._config.topology is not None or self._config.simulate_devices is not None
        if described or self._target is not None:
            jax.config.update("jax_platforms", "cpu")  # no accelerator is touched
        self._own: OwnStep | None = None
        self._no_own: UserError | None = None
        try:
            self._own = OwnStep.of(self._config)
        except UserError as reason:
            if not asks_about_another(command) or not command.rows:
                raise
            self._no_own = reason
        jax.config.update("jax_platforms", "cpu")
        self._figures: dict[str, Any] = {"config": str(command.config)}

    def print(self) -> int:
        """Print the sections, write what is asked for, and return the exit code.

        Raises:
            UserError: an option asks for what cannot be had.
        """
        command, config, console = self._command, self._config, self._console
        batch = config.batch
        sizes = batch.global_batch_size, batch.sequence_length
        console.print(
            plan_tables.question(config.model, config.load_topology(), *sizes, (config.precision,))
        )
        step = self._print_own(sizes)
        found = self._print_layouts(step) if command.rows else None
        if self._request is not None:
            _print_more(command, self._request, self._calibration, found, console)
        if self._pipeline is not None:
            self._print_schedules(self._pipeline)
        if command.pictures is not None:
            if step is None and found is not None:
                step = PredictedStep(found.best[0].layout, found.best[0].prediction)
            _draw(command.pictures, self._request, self._calibration, step, found, console)
        fits = self._print_compiled(self._target) if self._target is not None else True
        _write_figures(command, self._figures, console)
        return 0 if fits else FAILURE

    def _title(self, text: str) -> None:
        self._console.print(f"\n{text}", style="bold")

    def _print_own(self, sizes: tuple[int, int]) -> PredictedStep | None:
        """Print the sections on the config's own step; return it if its time is known."""
        console, own = self._console, self._own
        if own is None:
            console.print(f"the config's own layout is left out: {self._no_own}")
            return None
        console.print(own.heading)
        self._title("Does it fit?")
        own.print_fit(console)
        self._title("How long is a step, and why?")
        step = None
        try:
            prediction = own.predict(self._calibration)
        except UserError as reason:
            console.print(f"not known: {reason}")
        else:
            step = PredictedStep(own.layout, prediction)
            console.print(plan_tables.own_time(prediction))
            console.print(plan_tables.pace(sizes, prediction, self._command.tokens))
        if own.ramp_line is not None:
            console.print(own.ramp_line)
        self._title("What crosses the link?")
        own.print_crossing(console)
        self._figures |= own.to_json() | {"step": None if step is None else step.to_json()}
        return step

    def _print_layouts(self, own: PredictedStep | None) -> FoundLayouts | None:
        """Print the section on other layouts; return them if there are any."""
        command, console = self._command, self._console
        title = "What would be faster?"
        try:
            if self._request is None:
                assert self._no_request is not None, "there is a request or a reason"
                raise self._no_request
            found = find_layouts(command, self._request, self._config, self._calibration, console)
        except UserError as reason:
            if command.asks_for_layouts or self._no_own is not None:
                raise
            self._title(title)
            console.print(f"not searched: {reason}")
            return None
        self._title(title)
        print_layouts(found, None if own is None else own.prediction, console)
        self._figures["layouts"] = found.to_json()
        return found

    def _print_schedules(self, pipeline: SimulatedPipeline) -> None:
        command = self._command
        self._title("Which pipeline schedule?")
        if command.pictures is not None:
            _make(command.pictures)
        self._figures["schedules"] = print_schedules(
            pipeline, command.schedules or (), command.pictures, self._console
        )

    def _print_compiled(self, target: "CompileTarget") -> bool:
        """Print the section on the compiled program; return True if it fits."""
        self._title("Does the compiled program agree?")
        figures = print_compiled(self._config, target, self._console)
        self._figures["compiled"] = figures
        return bool(figures["fits"])


def _print_more(
    command: PlanCommand,
    request: "PlanRequest",
    calibration: "Calibration",
    found: FoundLayouts | None,
    console: Console,
) -> None:
    """Explain, trace and write the layouts that options ask for."""
    if command.explain is not None:
        timer = timer_of(request, calibration) if found is None else found.timer
        layout = layout_to_explain(command.explain, () if found is None else found.best)
        console.print(plan_tables.terms(layout, timer(layout, request.topology)))
    if found is not None:
        print_traces(found, command.trace, console)
        if command.output is not None:
            write_config(found, command.output, console)


def _draw(
    folder: Path,
    request: "PlanRequest | None",
    calibration: "Calibration",
    step: PredictedStep | None,
    found: FoundLayouts | None,
    console: Console,
) -> None:
    """Draw a step, and each role over the links' properties."""
    if step is None or request is None:
        console.print(f"{folder}: no picture of a step, whose time is not known")
        return
    _make(folder)
    with console.status("drawing"):
        written = draw_step(request, *step, calibration, folder)
        if found is not None and request.topology.links:
            draw_roles(found, folder / "roles.png")
            written.append("roles.png")
    console.print(f"{folder}: {', '.join(written)}")


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--pictures {folder}: cannot be made ({error.strerror})") from None


def _write_figures(command: PlanCommand, figures: dict[str, Any], console: Console) -> None:
    path = command.json_file
    if path is None:
        return
    try:
        path.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise UserError(f"--json {path}: cannot be written ({error.strerror})") from None
    console.print(f"{path}: all figures")
