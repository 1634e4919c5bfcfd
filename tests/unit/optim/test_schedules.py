"""A schedule is one entry of the registry: a warm-up, and then its own course."""

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from geojax.errors import UserError
from geojax.optim import SCHEDULES, OptimizerSettings, learning_rate_schedule
from geojax.settings import validate

PEAK, FINAL = 1e-2, 1e-3


def rates(name, steps, **changes):
    given_settings = OptimizerSettings(
        schedule=name, peak_learning_rate=PEAK, final_learning_rate=FINAL, **changes
    )
    # One length for all, so that JAX compiles each operation once.
    schedule = learning_rate_schedule(given_settings, steps)
    return np.broadcast_to(schedule(np.arange(2048)), 2048)


def test_each_schedule_is_that_of_optax():
    rising = optax.linear_schedule(0, PEAK, 10)
    of_optax = {
        "cosine": optax.warmup_cosine_decay_schedule(0, PEAK, 10, 110, FINAL),
        "linear": optax.join_schedules([rising, optax.linear_schedule(PEAK, FINAL, 100)], [10]),
        "wsd": optax.join_schedules(
            [rising, optax.constant_schedule(PEAK), optax.linear_schedule(PEAK, FINAL, 30)],
            [10, 80],
        ),
        "constant": optax.warmup_constant_schedule(0, PEAK, 10),
    }
    for name, schedule in of_optax.items():
        changes = {"wsd_decay_steps": 30} if name == "wsd" else {}
        expected = schedule(np.arange(2048))
        actual = rates(name, 110, warmup_steps=10, **changes)
        np.testing.assert_allclose(actual, expected, rtol=2e-6, err_msg=name)


def test_the_inverse_root_falls_from_the_peak_to_the_final_rate():
    rate = rates("inverse_sqrt", 2000, warmup_steps=10)
    np.testing.assert_allclose(rate[[5, 10, 40]], [PEAK / 2, PEAK, PEAK / 2], rtol=1e-6)
    np.testing.assert_allclose(rate[[1000, 2047]], FINAL, rtol=1e-6)


@settings(max_examples=40)
@given(
    schedule=st.sampled_from(sorted(SCHEDULES)),
    warmup=st.integers(0, 60),
    steps=st.integers(1, 80),
)
def test_no_rate_is_further_from_the_next_than_its_course_allows(schedule, warmup, steps):
    rate = rates(schedule, steps, warmup_steps=warmup)[1:]
    rise = PEAK / max(min(warmup, steps), 1)
    decay = max(steps - warmup, 1) if schedule in ("cosine", "linear") else -(-steps // 10)
    decay = min(decay, max(steps - warmup, 1))
    fall = PEAK * np.pi / 2 / decay
    if schedule == "inverse_sqrt":
        fall = PEAK * (1 - np.sqrt(max(warmup, 1) / (max(warmup, 1) + 1)))
    assert np.isfinite(rate).all()
    assert np.diff(rate).max(initial=0) <= rise * (1 + 1e-5)
    assert np.diff(rate).min(initial=0) >= -fall * (1 + 1e-5)
    assert rate.max() <= PEAK * (1 + 1e-6)


@pytest.mark.parametrize(
    ("given_settings", "message"),
    [
        ({"schedule": "cosin"}, "schedule: no schedule is called 'cosin'; choose one of cosine"),
        ({"wsd_decay_steps": 5}, "wsd_decay_steps requires schedule=wsd; got cosine"),
    ],
)
def test_a_mistake_is_one_line(given_settings, message):
    with pytest.raises(UserError, match=message):
        validate(OptimizerSettings, given_settings, "run.yaml")
