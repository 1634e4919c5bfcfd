"""The question of `geojax plan`: the config or the model, with the options that change it."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from geojax.cli.plan_options import PlanCommand
from geojax.errors import UserError
from geojax.planner.search.choices import OpenChoices

if TYPE_CHECKING:
    from geojax.config.run_config import RunConfig
    from geojax.planner.cost.calibration import Calibration
    from geojax.planner.cost.layout import LayoutCandidate
    from geojax.planner.cost.prediction import Prediction
    from geojax.planner.search.request import PlanRequest
    from geojax.planner.search.sensitivity import LayoutTimer
    from geojax.topology import Topology

_KEYS = {
    "topology": "topology",
    "global_batch": "batch.global_batch_size",
    "sequence_length": "batch.sequence_length",
}
"""Settings of a config that are options as well."""


def is_run(path: Path) -> bool:
    """Tell a run's file from a model's, or from the name of a preset."""
    from geojax.settings import load_yaml

    if path.suffix not in (".yaml", ".yml"):
        return False
    return not load_yaml(path).keys().isdisjoint(("base", "model", "run_directory", "batch"))


def asks_about_another(command: PlanCommand) -> bool:
    """Return True if options put another topology or batch in place of the config's."""
    return any(getattr(command, name) is not None for name in _KEYS)


def config_of(command: PlanCommand, overrides: Sequence[str]) -> "RunConfig":
    """Return the config with the settings that options and overrides change."""
    from geojax.config.run_config import RunConfig

    for name, key in _KEYS.items():
        given = getattr(command, name)
        if given is not None:
            overrides = [*overrides, f"--{key}", str(given)]
    return RunConfig.load(command.config, overrides)


def request_of_config(
    config: "RunConfig", named: OpenChoices, calibration: "Calibration"
) -> "PlanRequest":
    """Ask for layouts in place of the config's own.

    Raises:
        UserError: there is no topology, or no plan of the model or of the choices.
    """
    from geojax.planner.search.request import PlanRequest

    topology = config.load_topology()
    if topology is None:
        raise UserError("there is no topology; add one, such as --topology two-h100-sites")
    of_config = OpenChoices(
        precisions=(config.precision,),
        compressions=(config.communication.gradient_compression,),
    )
    batch = config.batch
    return PlanRequest(
        config.model,
        topology,
        batch.global_batch_size,
        batch.sequence_length,
        optimizer=config.optimizer,
        **_choices(named, of_config, topology),
        **_measured(calibration),
    )


def request_of_model(
    command: PlanCommand, overrides: Sequence[str], calibration: "Calibration"
) -> "PlanRequest":
    """Ask for layouts of a model that has no config yet.

    Raises:
        UserError: an option is missing or needs a config, or there is no plan of the choices.
    """
    from geojax.models import ModelConfig
    from geojax.planner.search.request import PlanRequest
    from geojax.topology import Topology

    topology, batch, length = command.topology, command.global_batch, command.sequence_length
    if topology is None or batch is None or length is None:
        missing = [name for name in _KEYS if getattr(command, name) is None]
        options = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise UserError(f"geojax plan MODEL needs {options} as well")
    if overrides:
        raise UserError(f"unknown argument {overrides[0]}; settings can be changed with a CONFIG")
    needs_config = {
        "--compile": command.compile,
        "--schedules": command.schedules is not None,
        "--rows 0": not command.rows,
    }
    for option, given in needs_config.items():
        if given:
            raise UserError(
                f"geojax plan MODEL: {option} requires the config of a run; {command.config} is a "
                "model"
            )
    sites = Topology.load(topology)
    return PlanRequest(
        ModelConfig.load(str(command.config)),
        sites,
        batch,
        length,
        **_choices(command.choices, OpenChoices(), sites),
        **_measured(calibration),
    )


def _choices(named: OpenChoices, default: OpenChoices, topology: "Topology") -> dict[str, Any]:
    """Return what is named, and by default the sites' join and the rest of `default`."""
    from geojax.planner.search.request import joins_of

    given = {name: value for name, value in vars(named).items() if value}
    return {**vars(default), "joins": joins_of(topology), **given}


def _measured(calibration: "Calibration") -> dict[str, Any]:
    """Return the choices that measured times leave."""
    if calibration.stage_times is None:
        return {}
    return {"remats": (calibration.stage_times.remat,)}


def calibration_of(command: PlanCommand) -> "Calibration":
    """Return what accelerators and networks reach of their rates."""
    from geojax.pipeline.simulation.stage_times import StageTimes
    from geojax.planner.cost.calibration import MEASURED, Calibration

    calibration = MEASURED if command.measured else Calibration()
    if command.stage_times is None:
        return calibration
    return dataclasses.replace(calibration, stage_times=StageTimes.load(command.stage_times))


def timer_of(request: "PlanRequest", calibration: "Calibration") -> "LayoutTimer":
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
            calibration=calibration,
            optimizer=request.optimizer,
        )
        if topology is request.topology:
            known[layout] = made
        return made

    return predicted
