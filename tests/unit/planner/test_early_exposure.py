"""What the early parts of a pipeline's gradients cost beyond the ticks that they travel beside."""

from types import SimpleNamespace

import pytest

from geojax.planner.buckets import ComputeTimes, LinkShare, exposed_seconds
from geojax.planner.traffic.gradients import EarlyMessage, GradientMessages


@pytest.mark.parametrize(("bytes_per_second", "exposed"), [(50.0, 10.0 + 4.0), (200.0, 1.0 + 1.0)])
def test_a_part_costs_what_its_ticks_do_not_hide_and_the_rest_all(bytes_per_second, exposed):
    plan = SimpleNamespace(staged_layers=SimpleNamespace(max_layers_per_chunk=2))
    messages = GradientMessages((), 0, (200.0,), (EarlyMessage(600.0, 2), EarlyMessage(200.0, 5)))
    link = LinkShare("a-b", 0.0, bytes_per_second, 1)
    seconds = exposed_seconds(messages, plan, link, ComputeTimes(100.0, 0.25, 0.5))
    assert seconds == pytest.approx(exposed)
