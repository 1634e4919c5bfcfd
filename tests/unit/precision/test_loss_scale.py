import jax
import jax.numpy as jnp
import pytest

from geojax.errors import UserError
from geojax.precision import LossScale, LossScaleSettings, scale_gradient
from geojax.settings import validate

SETTINGS = LossScaleSettings(initial=8, grow_after_steps=3, minimum=2)


def walk(scale, steps, settings=SETTINGS):
    """The scale after each step; `steps` has a dot for a clean one and an x for an overflow."""
    scales = []
    for step in steps:
        scale = scale.after(jnp.bool_(step == "."), settings)
        scales.append(float(scale.scale))
    return scales


def test_it_halves_at_an_overflow_and_doubles_after_enough_clean_steps():
    start = LossScale.start(SETTINGS)
    assert walk(start, "......") == [8, 8, 16, 16, 16, 32]
    assert walk(start, "..x...") == [8, 8, 4, 4, 4, 8], "an overflow starts the count again"


def test_it_stays_between_its_minimum_and_infinity():
    assert walk(LossScale.start(SETTINGS), "xxx") == [4, 2, 2]
    below = LossScale(jnp.float32(1), jnp.int32(0))  # of a run that had another minimum
    assert walk(below, "x...") == [1, 1, 1, 2]
    last = LossScale(jnp.float32(2.0**127), jnp.int32(2))
    assert walk(last, ".x") == [2.0**127, 2.0**126]


def test_a_value_passes_and_its_gradient_is_multiplied():
    def loss(x, factor):
        return scale_gradient(jnp.sum(x * x), factor)

    x = jnp.array([1.0, -3.0])
    value, (of_x, of_factor) = jax.value_and_grad(loss, (0, 1))(x, jnp.float32(4))
    assert value == 10
    assert of_x.tolist() == [8, -24]
    assert of_factor == 0


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"initial": 60000}, "initial: 60000 is not a power of two; 65536 is, and is near"),
        ({"initial": 1, "minimum": 2}, "minimum 2 is above initial 1"),
        ({"grow_after_steps": 0}, "grow_after_steps"),
    ],
)
def test_settings_that_cannot_be_are_refused(content, message):
    with pytest.raises(UserError, match=message):
        validate(LossScaleSettings, content, "x")
