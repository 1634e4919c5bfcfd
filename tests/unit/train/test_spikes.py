"""A spike is far above the steps before, and noise is none."""

import random

import pytest

from geojax.train.spikes import SpikeDetector


def spikes_of(values):
    detector = SpikeDetector()
    return [number for number, value in enumerate(values) if detector.is_spike(value) is not None]


def test_noise_and_a_falling_loss_are_no_spikes():
    draw = random.Random(1)
    assert spikes_of(8 * 0.999**step + draw.gauss(0, 0.05) for step in range(2000)) == []
    assert spikes_of([1.0] * 50 + [1.1] * 50) == []


@pytest.mark.parametrize("value", [3.0, 1e30, float("inf"), float("nan")])
def test_a_high_or_infinite_value_is_a_spike(value):
    draw = random.Random(1)
    values = [2 + draw.gauss(0, 0.02) for _ in range(100)]
    assert spikes_of([*values, value, *values]) == [100]


def test_first_steps_are_no_spikes():
    assert spikes_of([1.0, 9.0, 1.0, 99.0]) == []
