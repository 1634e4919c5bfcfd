"""Time in which a process stood still does not count."""

import pytest

from geojax.runtime.liveness import awake_clock
from geojax.runtime.liveness.awake_clock import AwakeClock
from geojax.runtime.liveness.health import HealthKeeper
from geojax.runtime.liveness.heartbeat import Heartbeat


@pytest.fixture
def time(monkeypatch):
    class Time:
        now = 100.0

        def monotonic(self):
            return self.now

    made = Time()
    monkeypatch.setattr(awake_clock, "time", made)
    return made


def test_seconds_pass_as_long_as_somebody_asks(time):
    clock = AwakeClock(4.0)
    for _ in range(6):
        time.now += 2.5
        seconds = clock.seconds()
    assert seconds == 15.0


def test_of_a_standstill_the_longest_time_counts(time):
    clock = AwakeClock(4.0)
    time.now += 1.0
    assert clock.seconds() == 1.0
    time.now += 3600.0
    assert clock.seconds() == 5.0


def test_processes_that_stood_still_together_are_not_lost(time):
    clock = AwakeClock(4.0)
    keeper = HealthKeeper(2, 8.0, clock.seconds())

    def silent(heard):
        heartbeats = {process: Heartbeat(at, 3, "step") for process, at in heard.items()}
        return keeper.take_in(heartbeats, clock.seconds())

    assert silent({0: 1.0, 1: 1.0}) == []
    time.now += 60.0
    assert silent({0: 1.0, 1: 1.0}) == []
    time.now += 1.0
    assert silent({0: 61.0, 1: 1.0}) == []
    for _ in range(3):
        time.now += 1.0
        assert silent({0: time.now, 1: 1.0}) == []
    time.now += 1.0
    assert silent({0: time.now, 1: 1.0}) == [1]
