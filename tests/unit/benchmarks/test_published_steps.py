"""Published step times as `benchmarks/planner.py` predicts them."""

import importlib
import statistics
import sys
from pathlib import Path

import numpy as np
import pytest

from geojax.planner.cost.calibration import FITTED_EFFICIENCY, RELATIVE_ERROR, Calibration

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def published(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    yield lambda name: importlib.import_module(f"published.{name}")
    for name in [name for name in sys.modules if name.startswith("published")]:
        del sys.modules[name]


def test_published_steps_are_predicted_with_one_constant_an_accelerator(published):
    rows, fit = published("rows").published_rows(), published("fit")
    errors = {key: [] for key in FITTED_EFFICIENCY}
    for row in rows:
        error = row.predict(Calibration()).step_seconds / row.seconds - 1
        if row.name in fit.FITTED_ON.values():
            assert abs(error) < 0.002, "the constant in use is the fitted one"
        else:
            errors[row.constant].append(abs(error))
    scored = [error for of_key in errors.values() for error in of_key]
    assert len(scored) == len(rows) - len(FITTED_EFFICIENCY) == 33
    assert statistics.median(scored) <= 0.06
    assert max(scored) <= 0.20
    ninety = {key: float(np.quantile(of_key, 0.9)) for key, of_key in errors.items()}
    assert ninety == pytest.approx(RELATIVE_ERROR, abs=5e-4)
