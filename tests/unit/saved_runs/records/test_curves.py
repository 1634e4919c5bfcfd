"""Curves of a bounded number of points keep means, extremes and the shape of long runs."""

import statistics

import pytest

from geojax.saved_runs.records.curves import Curves, ThinnedValues, shown_range


def test_a_short_curve_has_a_point_for_each_step():
    curves = Curves(10)
    for step in range(1, 6):
        curves.add(step, {"loss": 10.0 - step})
    assert [(point.step, point.mean) for point in curves.points("loss")] == [
        (step, 10.0 - step) for step in range(1, 6)
    ]
    assert curves.points("other") == []
    assert curves.mean("other") is None


def test_a_long_curve_is_thinned_and_keeps_spikes_and_mean():
    curves, values = Curves(16), []
    for step in range(1, 1001):
        values.append(100.0 if step == 700 else 2.0)
        curves.add(step, {"loss": values[-1]})
    points = curves.points("loss")
    assert 8 <= len(points) <= 16
    assert curves.mean("loss") == pytest.approx(statistics.fmean(values))
    assert max(point.high for point in points) == 100.0
    assert [point.low for point in points] == [2.0] * len(points)
    assert [point.step for point in points] == sorted(point.step for point in points)


def test_curves_are_paired_by_their_steps():
    curves = Curves(100)
    curves.add(1, {"a": 1.0, "b": 2.0})
    curves.add(2, {"a": 3.0})
    assert curves.paired(("a", "b", "c")) == [(1, {"a": 1.0, "b": 2.0}), (2, {"a": 3.0})]


def test_names_are_bounded():
    curves = Curves(4)
    curves.add(1, {f"name {number}": 1.0 for number in range(1000)})
    assert len(curves.names) == 256


def test_thinned_values_keep_the_median():
    values = ThinnedValues(most=64)
    for value in range(10_001):
        values.add(float(value))
    assert values.median == pytest.approx(5000, rel=0.05)
    assert values.quantile(0.9) == pytest.approx(9000, rel=0.05)
    assert ThinnedValues().median is None


def test_the_range_to_show_leaves_the_steep_beginning_out():
    falling = [100.0 / (1 + step) for step in range(100)]
    assert shown_range([falling]) == (1.0, 100 / 11)
    assert shown_range([[2.0, 2.0]]) == (1.5, 2.5)
    assert shown_range([[]]) is None
