"""Predicted times of a step: the wait for other sites is a part of it."""

from pathlib import Path

import pytest

from geojax.config.run_config import RunConfig
from geojax.planner.resolve.run_prediction import StepTimes, step_times

CONFIGS = Path(__file__).parents[3] / "configs"


@pytest.mark.parametrize("name", ["llama3-70b-2x64", "nemotron4-340b-2x1536-stage"])
def test_the_wait_for_other_sites_is_part_of_the_step(name):
    times = step_times(RunConfig.load(CONFIGS / f"{name}.yaml"))
    assert 0 <= times.wait_seconds.value < times.seconds.value
    assert times.wait_seconds.source == times.seconds.source == "cost model"


def test_a_slower_link_makes_it_longer():
    config = RunConfig.load(CONFIGS / "llama3-70b-2x64.yaml")
    (link,) = config.load_topology().links
    links = (link.model_copy(update={"bytes_per_second": 1e8}),)
    slow = config.model_copy(update={"adapt": config.adapt.model_copy(update={"links": links})})
    fast, late = step_times(config), step_times(slow)
    assert late.wait_seconds.value > fast.wait_seconds.value
    waited = late.wait_seconds.value - fast.wait_seconds.value
    assert late.seconds.value - fast.seconds.value == pytest.approx(waited, rel=0.05)


def test_a_run_without_a_topology_has_none():
    config = RunConfig.load(CONFIGS / "llama3-70b-2x64.yaml")
    assert step_times(config.model_copy(update={"topology": None})) == StepTimes(None, None)
