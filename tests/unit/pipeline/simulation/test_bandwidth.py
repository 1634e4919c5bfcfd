"""The bandwidth point: what a pipeline can make use of, by the simulator and by the formula."""

import math

import numpy as np
import pytest

from geojax.pipeline.drawing.bandwidth import draw_bandwidth
from geojax.pipeline.simulation.bandwidth import closed_form, steady_period, sweep, sweep_around
from geojax.pipeline.simulation.costs import Costs, Hop

HOP_BYTES = 1e8
WORK = 0.03


def four_stages(latency=0.0):
    cut = Hop(latency, 1.0, "east-west")  # the sweep sets the transfer
    return Costs((WORK / 3,) * 4, (WORK / 3,) * 4, (WORK / 3,) * 4, (Hop(), cut, Hop()))


@pytest.mark.parametrize("latency", [0.0, 0.04, 0.2])
def test_with_memory_enough_the_link_need_only_keep_up_with_a_stage(latency):
    costs = four_stages(latency)
    limit = 4 + math.ceil(2 * (latency + WORK) / WORK)
    expected = HOP_BYTES / WORK
    assert closed_form(costs, HOP_BYTES, limit, tolerance=0) == pytest.approx(expected)
    found = sweep(costs, HOP_BYTES, [expected / 4, expected * 4], [limit])
    assert found.points[0].simulated == pytest.approx(expected, rel=0.06)
    assert found.periods[0] == pytest.approx([4 * WORK, WORK], rel=1e-6)


def test_with_less_memory_transfers_must_be_shorter():
    costs = four_stages(latency=WORK / 2)  # 1F1B's memory is full: 4 stages + a round trip > 4
    points = [closed_form(costs, HOP_BYTES, limit, tolerance=0) for limit in (4, 5, 6, 7, 8)]
    assert points == pytest.approx([math.inf, math.inf, 2 / WORK * 1e8, 1e8 / WORK, 1e8 / WORK])
    bandwidths = [each * HOP_BYTES / WORK for each in (0.5, 1.5, 3.0, 50.0)]
    found = sweep(costs, HOP_BYTES, bandwidths, [5, 6, 8])
    assert found.points[1].simulated == pytest.approx(points[2], rel=0.1)
    assert found.points[2].simulated == pytest.approx(points[3], rel=0.1)
    assert np.all(np.diff(found.periods, axis=0) <= 1e-9)  # memory never hurts
    assert np.all(np.diff(found.periods, axis=1) <= 1e-9)  # nor does bandwidth


def test_no_bandwidth_that_was_tried_is_enough():
    costs = four_stages()
    found = sweep(costs, HOP_BYTES, [0.1 * HOP_BYTES / WORK, 0.5 * HOP_BYTES / WORK], [6])
    assert found.points[0].simulated == math.inf


def test_the_steady_period_is_the_slowest_stage_s_or_little_s_law():
    costs = four_stages()
    free = Costs(costs.forward, costs.backward, costs.weight, (Hop(),) * 3)
    assert steady_period(free, 4) == pytest.approx(WORK)
    assert steady_period(free, 2) == pytest.approx(2 * WORK)  # 4 stages, 2 microbatches


def test_a_sweep_covers_the_limit_and_what_hides_the_latency():
    costs = four_stages(latency=0.05)
    found = sweep_around(costs, HOP_BYTES, 5)
    assert 5 in found.memory_limits
    assert found.memory_limits[-1] >= 4 + 4
    assert found.periods.shape == (len(found.memory_limits), len(found.bandwidths))
    assert found.periods[-1, -1] == pytest.approx(found.work, rel=0.01)

    figure = draw_bandwidth(found, {"east-west": 1e10})
    axes, _ = figure.axes
    points = {line.get_label(): line.get_xdata() for line in axes.lines}
    assert list(points["bandwidth point, simulated"]) == [p.simulated for p in found.points]
    assert [label.get_text() for label in axes.get_yticklabels()] == [
        str(limit) for limit in found.memory_limits
    ]
    assert [text.get_text() for text in axes.texts] == ["east-west 10.0 GB/s"]
