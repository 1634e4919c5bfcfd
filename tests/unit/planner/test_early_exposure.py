"""What the early parts of a pipeline's gradients cost beyond the ticks that they travel beside."""

from types import SimpleNamespace

import pytest

from geojax.planner.buckets import ComputeTimes, LinkShare, exposed_seconds
from geojax.planner.traffic.gradients import EarlyMessage, GradientMessages

TIMES = ComputeTimes(100.0, 0.25, 0.5)


def exposed_by(parts, bytes_per_second, *, overlap_scatter):
    """With 200 bytes after all, and ticks of a second."""
    chunks = SimpleNamespace(max_layers_per_chunk=2)
    plan = SimpleNamespace(staged_layers=chunks, overlap_scatter=overlap_scatter)
    link = LinkShare("a-b", 0.0, bytes_per_second, 1)
    return exposed_seconds(GradientMessages((), 0, (200.0,), parts), plan, link, TIMES)


@pytest.mark.parametrize(("bytes_per_second", "exposed"), [(50.0, 10.0 + 4.0), (200.0, 1.0 + 1.0)])
def test_a_part_costs_what_its_ticks_do_not_hide_and_the_rest_all(bytes_per_second, exposed):
    parts = (EarlyMessage(600.0, 2), EarlyMessage(200.0, 5))
    assert exposed_by(parts, bytes_per_second, overlap_scatter=False) == pytest.approx(exposed)


@pytest.mark.parametrize(("overlap_scatter", "exposed"), [(False, 1.0), (True, 3.0)])
def test_a_part_that_is_summed_beside_ticks_crosses_later(overlap_scatter, exposed):
    """The second one takes three seconds, from the first of its two ticks on, or behind them."""
    parts = (EarlyMessage(200.0, 1), EarlyMessage(600.0, 2))
    made = exposed_by(parts, 200.0, overlap_scatter=overlap_scatter)
    assert made == pytest.approx(exposed + 1.0)
