"""A smoothed curve neither lags behind its values nor leaves their range."""

import pytest

from geojax.saved_runs.records.smoothing import smooth


def test_a_constant_stays():
    assert smooth([3.0, 3.0, 3.0]) == pytest.approx([3.0, 3.0, 3.0])
    assert smooth([]) == []


def test_a_straight_line_does_not_lag():
    line = [float(step) for step in range(1000)]
    assert smooth(line)[100:900] == pytest.approx(line[100:900], abs=0.1)
