"""The times of steps are noted without a thread that blocks in XLA."""

import time
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from geojax.train.training_loop import StepEnds, _pause


def test_an_end_is_noted_when_the_devices_are_done():
    ends, started = StepEnds(), time.monotonic()
    with ends:
        end = ends.of({"loss": jnp.ones(()) + 1})
        assert started <= end.result(timeout=60) <= time.monotonic()


def test_leaving_does_not_wait_for_devices_that_still_compute():
    ends, loss = StepEnds(), mock.Mock(spec=jax.Array, is_ready=lambda: False)
    with ends:
        end = ends.of({"loss": loss})
    assert not ends._thread.is_alive()
    assert not end.done()


@pytest.mark.parametrize("seconds", [0.01, 0.1, 0.4, 10.0, 300.0])
def test_a_step_as_long_as_the_one_before_is_looked_at_a_few_times(seconds):
    elapsed, looks = 0.0, 0
    while elapsed < seconds:
        elapsed += _pause(elapsed, seconds)
        looks += 1
    assert looks <= 60
    assert elapsed - seconds <= max(0.0021, seconds / 150)
