"""The prediction of a run's step by the cost model."""

import functools
from typing import NamedTuple

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.planner.buckets import ComputeTimes
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import compute_times, predict
from geojax.planner.cost.prediction import Prediction
from geojax.planner.resolve.run_layout import layout_of_run
from geojax.step.resolved import Figure
from geojax.topology import Topology


def predict_run(
    config: RunConfig,
    topology: Topology,
    layout: LayoutCandidate | None = None,
    calibration: Calibration | None = None,
) -> Prediction:
    """Predict the step of `config`.

    Args:
        config: the run.
        topology: its sites, with the links as they are.
        layout: its layout; None: as the config has it, "auto" left open.
        calibration: what accelerators and networks reach of their rates; None: what was fitted.

    Raises:
        UserError: the layout cannot be, a peak or a link is not known, or the model has adapters.
    """
    return predict(
        config.model,
        layout or layout_of_run(config),
        topology,
        calibration=calibration or Calibration(),
        optimizer=config.optimizer,
    )


class StepTimes(NamedTuple):
    """Predicted times of a step; None: a peak or a link is not known."""

    seconds: Figure | None = None
    """The whole step."""
    wait_seconds: Figure | None = None
    """Part of it in which nothing but messages between sites goes on."""


def step_times(config: RunConfig) -> StepTimes:
    """Return the predicted times of the step of `config`."""
    topology = config.load_topology()
    if topology is None:
        return StepTimes()
    try:
        predicted = predict_run(config, topology)
    except UserError:
        return StepTimes()
    waits = sum(term.exposed_seconds for term in predicted.terms if term.network == "between_sites")
    seconds = Figure(
        value=predicted.step_seconds,
        source="cost model",
        relative_error=predicted.relative_error,
    )
    return StepTimes(seconds, Figure(value=max(0.0, waits), source="cost model"))


@functools.lru_cache(maxsize=4)
def compute_times_of_run(config: RunConfig) -> ComputeTimes:
    """Predict the work of the step of `config` that messages may travel beside.

    Raises:
        UserError: the layout cannot be, or a peak or a link is not known.
    """
    topology = config.load_topology()
    assert topology is not None, "the topology describes a link"
    return compute_times(
        config.model,
        layout_of_run(config),
        topology,
        calibration=Calibration(),
        optimizer=config.optimizer,
    )
