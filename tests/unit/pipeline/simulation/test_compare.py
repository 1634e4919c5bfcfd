"""All schedules on one pipeline."""

import itertools

import pytest

from geojax.pipeline import SCHEDULES
from geojax.pipeline.balance import balanced_layers
from geojax.pipeline.simulation.compare import compare
from geojax.pipeline.simulation.costs import Costs, Hop


def costs_of(layers):
    """Return the costs of so many layers of 5 ms, on two stages in each of two sites."""

    def costs(placement):
        count = balanced_layers([1.0] * layers, placement.chunks)
        forward, weight = [0.002 * each for each in count], [0.001 * each for each in count]
        backward = [0.002 * each for each in count]
        hops = [
            Hop(0.01, 0.0007, "east-west") if {a // 2, b // 2} == {0, 1} else Hop()
            for a, b in itertools.pairwise(placement.stage_of)
        ]
        return Costs(tuple(forward), tuple(backward), tuple(weight), tuple(hops))

    return costs


@pytest.fixture(scope="module")
def comparison():
    return compare(costs_of(8), (2, 2), microbatches=16, memory_limit=4, chunks_per_stage=2)


def test_every_schedule_is_timed_in_both_modes(comparison):
    assert [entry.name for entry in comparison.entries] == list(SCHEDULES)
    assert not comparison.left_out
    for entry in comparison.entries:
        assert entry.event_driven.seconds >= 16 * 0.01
        if entry.lock_step is not None:
            assert entry.lock_step.seconds > 16 * 0.01
            assert max(entry.lock_step.in_flight) <= max(entry.event_driven.in_flight)


def test_what_is_held_is_counted_in_microbatches_of_the_whole_stage(comparison):
    held = {entry.name: entry.microbatches_in_flight for entry in comparison.entries}
    assert (held["gpipe"], held["1f1b"], held["zero_bubble_h2"]) == (16, 4, 7)
    assert held["zbv"] == 4  # 8 halves
    assert held["latency_hiding"] <= 4


def test_the_best_keeps_the_limit_in_both_modes(comparison):
    fitting = [entry for entry in comparison.entries if entry.microbatches_in_flight <= 4]
    name, seconds = comparison.best(4, in_lock_step=False)
    assert seconds == min(entry.event_driven.seconds for entry in fitting)
    assert name in {entry.name for entry in fitting}
    _, in_step = comparison.best(4, in_lock_step=True)
    assert in_step >= seconds
    assert comparison.best(1, in_lock_step=False) is None


def test_a_schedule_that_cannot_be_had_is_left_out_with_the_reason():
    comparison = compare(costs_of(6), (2, 2), 6, memory_limit=4, chunks_per_stage=3)
    assert set(comparison.left_out) == {"interleaved", "zbv"}
    assert "6 layers cannot be cut into 12 stages" in comparison.left_out["interleaved"]
