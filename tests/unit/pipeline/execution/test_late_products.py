"""Products of weights' gradients that wait for a tick's streams: which they are, and their sums."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.collectives import barrier
from geojax.collectives.order import together
from geojax.pipeline.execution.late_products import with_late_products

B, H, F = 8, 4, 6  # positions, hidden, feed-forward


def tick(state):
    """A backward of tanh(x @ first) @ second, and a forward of another microbatch."""
    x, cotangent, first, second, sums = state
    made = jnp.tanh(x @ first)
    through = (cotangent @ second.T) * (1 - made**2)
    x_cotangent = through @ first.T
    with jax.named_scope("gradients"):
        of_weights = x.T @ through, made.T @ cotangent
    x_cotangent, *gradients = together((x_cotangent, *of_weights))
    cotangent = cotangent + x_cotangent
    sums = [total + gradient for total, gradient in zip(sums, gradients, strict=True)]
    # The forward waits for the backward.
    cotangent, sums, x = barrier((cotangent, sums, x))
    return (x, cotangent, first, second, sums), {"B": cotangent, "F": jnp.tanh(x @ first) @ second}


def no_product(state):
    """A tick whose cotangent is no product's."""
    x, cotangent, *others = state
    return (x, cotangent, *others), {"B": 2 * cotangent, "F": jnp.tanh(x)}


def state_of(dtype=np.float32):
    draw = np.random.default_rng(0).standard_normal
    shapes = (B, H), (B, H), (H, F), (F, H)
    arrays = [jnp.asarray(draw(shape), dtype) for shape in shapes]
    return (*arrays, [jnp.ones((H, F), dtype), jnp.ones((F, H), dtype)])


@pytest.mark.parametrize("passes", [tick, no_product])
def test_the_results_are_those_of_the_tick(passes):
    expected = passes(state_of())
    *made, late = with_late_products(passes, state_of())
    jax.tree.map(np.testing.assert_array_equal, tuple(made), expected)
    assert [each.shape for each in late] == ([(H, F)] if passes is tick else [])


def test_the_gradient_of_the_first_weights_waits_for_both_streams_and_no_other_does():
    jaxpr = jax.make_jaxpr(lambda state: with_late_products(tick, state))(state_of()).jaxpr
    products = [
        (place, each.outvars[0].aval.shape)
        for place, each in enumerate(jaxpr.eqns)
        if each.primitive.name == "dot_general"
    ]
    sent = max(
        place
        for place, each in enumerate(jaxpr.eqns)
        if each.primitive.name == "barrier" and len(each.outvars) == 2
    )
    assert [shape for place, shape in products if place > sent] == [(H, F)]
    assert (F, H) in [shape for place, shape in products if place < sent]
    held = [each.outvars[0].aval.shape for each in jaxpr.eqns if each.primitive.name == "held"]
    assert held.pop(1) == (B, H), "what is sent, until the sum that it waited for is there"
    assert held == [(B, F)] * 2, "the cotangent, until x.T is there and until the streams are"


def test_a_profile_finds_them_in_the_scopes_that_they_were_in():
    jaxpr = jax.make_jaxpr(lambda state: with_late_products(tick, state))(state_of()).jaxpr
    scoped = [
        each.outvars[0].aval.shape
        for each in jaxpr.eqns
        if each.primitive.name == "dot_general" and "gradients" in str(each.source_info.name_stack)
    ]
    assert scoped == [(F, H), (H, F)]
