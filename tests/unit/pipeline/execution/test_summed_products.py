"""Products of weights' gradients that add to sums: in which dtype, and what waits for them."""

import jax
import jax.numpy as jnp
import numpy as np

from geojax.collectives.order import together
from geojax.pipeline.execution.summed_products import with_summed_products

B, H, F = 8, 4, 6  # positions, hidden, feed-forward


def backward(state):
    """Two products of x, and the gradients of their weights beside what is sent."""
    x, cotangent, first, second, sums = state
    made = cotangent @ first.T, cotangent @ second.T
    gradients = x.T @ cotangent, x.T @ (2 * cotangent)
    sent, *gradients = together((sum(made), *gradients))
    sums = [
        total + gradient.astype(total.dtype)[None]
        for total, gradient in zip(sums, gradients, strict=True)
    ]
    return (x, sent, first, second, sums), sent * 3


def state_of(dtype):
    draw = np.random.default_rng(0).standard_normal
    arrays = [jnp.asarray(draw(shape), dtype) for shape in ((B, H), (B, F), (H, F), (H, F))]
    return (*arrays, [jnp.ones((1, H, F), jnp.float32)] * 2)


def equations(dtype):
    state = state_of(dtype)
    return jax.make_jaxpr(lambda state: with_summed_products(backward, state))(state).jaxpr.eqns


def places_of(name, shape):
    """Return the equations of a primitive that make a value of this shape, by their places."""
    return {
        place: each
        for place, each in enumerate(equations(jnp.bfloat16))
        if each.primitive.name == name and each.outvars[0].aval.shape == shape
    }


def test_the_results_are_those_of_the_passes():
    state = state_of(np.float32)
    made, expected = with_summed_products(backward, state), backward(state)
    jax.tree.map(np.testing.assert_array_equal, made, expected)


def test_a_gradient_of_16_bits_is_not_rounded_before_its_sum():
    state = state_of(jnp.bfloat16)
    x, cotangent = (np.asarray(each, np.float64) for each in state[:2])
    exact = 1 + x.T @ cotangent
    (*_, sums), _ = with_summed_products(backward, state)
    np.testing.assert_allclose(sums[0][0], exact, rtol=1e-6)
    (*_, rounded), _ = backward(state)
    assert np.abs(rounded[0][0] - exact).max() > 1e-3


def test_products_of_the_same_array_are_told_apart():
    gradients = places_of("dot_general", (H, F)).values()
    assert [each.outvars[0].aval.dtype for each in gradients] == [jnp.float32] * 2
    assert len({each.invars[0] for each in gradients}) == 2
    assert len(places_of("apart", (B, H))) == 1, "before it is transposed"


def test_what_waited_for_gradients_waits_for_their_sums():
    assert not places_of("together", (B, H))
    sums, held = places_of("add", (1, H, F)), places_of("held", (B, H))
    assert len(sums) == len(held) == 2
    assert max(sums) < min(held)
