"""Runs that an earlier geojax saved go on: the state to the bit, the losses to their rounding."""

import json
from pathlib import Path

import pytest
from support.old_runs import (
    CORPUS,
    EXPECTED,
    RUNS,
    SAVED_STEPS,
    STEPS,
    WEIGHTS,
    config_of,
    losses,
    unpack,
)
from support.shrunk_presets import digest

import geojax

PACKED = Path(__file__).parents[2] / "data" / "old_runs"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    unpack(CORPUS, folder, PACKED)
    unpack(WEIGHTS, folder, PACKED)
    return folder


@pytest.mark.parametrize("name", RUNS)
def test_a_run_that_was_saved_earlier_goes_on(name, folder):
    expected = json.loads((PACKED / EXPECTED).read_text())[name]
    unpack(name, folder, PACKED)
    with geojax.Trainer(config_of(name, folder, STEPS)) as trainer:
        assert trainer.step_number == SAVED_STEPS
        assert digest(trainer.state) == expected["state"]
        trainer.fit()
    # XLA rounds otherwise for other processors.
    assert list(losses(folder / name))[SAVED_STEPS:] == pytest.approx(expected["losses"], rel=1e-6)
