import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geojax.errors import UserError
from geojax.named_arrays import leaves_by_name
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.settings import validate

SETTINGS = OptimizerSettings(
    peak_learning_rate=1e-2, final_learning_rate=1e-3, warmup_steps=10, clip_norm=None
)


def test_the_rate_rises_to_the_peak_and_falls_along_a_cosine():
    schedule = learning_rate_schedule(SETTINGS, 110)
    assert schedule(0) == 0
    np.testing.assert_allclose(schedule(5), 5e-3, rtol=1e-6)
    np.testing.assert_allclose(schedule(10), 1e-2, rtol=1e-6)
    np.testing.assert_allclose(schedule(60), (1e-2 + 1e-3) / 2, rtol=1e-6)
    np.testing.assert_allclose(schedule(110), 1e-3, rtol=1e-5)


@pytest.mark.parametrize(("steps", "warmup"), [(1, 0), (1, 10), (5, 5)])
def test_short_runs_have_a_schedule_too(steps, warmup):
    settings = OptimizerSettings(warmup_steps=warmup)
    values = [float(learning_rate_schedule(settings, steps)(count)) for count in range(steps + 1)]
    assert np.isfinite(values).all()
    assert max(values) <= settings.peak_learning_rate * (1 + 1e-6)


@given(
    warmup=st.integers(0, 40), steps=st.integers(1, 30), longer=st.integers(1, 100), data=st.data()
)
def test_a_longer_run_keeps_the_schedule_and_then_its_last_rate(warmup, steps, longer, data):
    settings = OptimizerSettings(warmup_steps=warmup)
    extended = settings.model_copy(update={"decay_steps": steps})
    before = learning_rate_schedule(settings, steps)
    after = learning_rate_schedule(extended, steps + longer)
    step = data.draw(st.integers(0, steps))
    assert float(after(step)) == float(before(step))
    beyond = data.draw(st.integers(steps, steps + longer))
    assert float(after(beyond)) == float(before(steps))
    if warmup < steps:
        np.testing.assert_allclose(after(beyond), settings.final_learning_rate, rtol=1e-6)


def test_the_first_update_is_not_lost_to_a_rate_of_zero():
    optimizer = make_optimizer(SETTINGS, 100)
    parameters = {"kernel": jnp.ones((2, 2))}
    updates, _ = optimizer.update(
        {"kernel": jnp.ones((2, 2))}, optimizer.init(parameters), parameters
    )
    # Adam's first step is the sign of the gradient, decay adds weight_decay * weight.
    expected = -1e-3 * (1 + SETTINGS.weight_decay)
    np.testing.assert_allclose(updates["kernel"], expected, rtol=1e-5)


def test_norms_and_biases_are_not_decayed():
    optimizer = make_optimizer(SETTINGS, 100)
    parameters = {
        "layers": {
            "kernel": jnp.ones((2, 3, 3)),
            "bias": jnp.ones((2, 3)),
            "scale": jnp.ones((2, 3)),
        }
    }
    zero = jax.tree.map(jnp.zeros_like, parameters)
    updates, _ = optimizer.update(zero, optimizer.init(parameters), parameters)
    assert np.all(np.asarray(updates["layers"]["kernel"]) < 0)
    assert not np.any(np.asarray(updates["layers"]["bias"]))
    assert not np.any(np.asarray(updates["layers"]["scale"]))


def test_a_final_rate_above_the_peak_is_refused():
    with pytest.raises(UserError, match=r"final_learning_rate 1 is above peak_learning_rate"):
        validate(OptimizerSettings, {"final_learning_rate": 1.0}, "run.yaml")


def test_a_run_may_be_resumed_with_clipping_or_without():
    parameters = {"kernel": jnp.ones((2, 2))}
    names = [
        list(leaves_by_name(make_optimizer(OptimizerSettings(clip_norm=norm), 10).init(parameters)))
        for norm in (1.0, None)
    ]
    assert names[0] == names[1]
