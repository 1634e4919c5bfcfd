"""Round trips and rates of a link, from times that are given."""

import pytest

from geojax.transport import link_clock
from geojax.transport.link_clock import LinkClock, MeasuredLink


@pytest.fixture
def clock(monkeypatch):
    """A link's clock, and the function that sets the time."""
    now = [0.0]
    monkeypatch.setattr(link_clock.time, "monotonic", lambda: now[0])

    def at(seconds):
        now[0] = seconds
        return made

    made = LinkClock()
    return at


def test_a_burst_takes_a_round_trip_and_its_bytes_over_the_rate(clock):
    # 100 bytes a second and a round trip of half a second; two messages that overlap, then one.
    clock(0.0).echoed(0.7)
    clock(0.0).echoed(0.5)
    clock(1.0).departed(1)
    clock(1.5).departed(2)
    clock(2.5).acknowledged(1, 100)
    clock(3.5).acknowledged(2, 100)
    clock(9.0).departed(3)
    clock(11.5).acknowledged(3, 200)
    assert clock(12.0).take() == MeasuredLink(0.5, pytest.approx(100.0))
    assert clock(13.0).take() == MeasuredLink()


def test_what_nobody_saw_depart_is_not_counted(clock):
    clock(0.0).echoed(0.5)
    clock(1.0).acknowledged(1, 100)
    assert clock(2.0).take() == MeasuredLink(0.5, None)
