"""A scan whose stacks nothing fills before it writes them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from geojax.models.chunk.layer_scan import stacking_scan


def body(carry, x):
    number, weights = x
    made = {"before": carry, "number": number, "empty": carry[:0], "nothing": None}
    return carry * weights.sum() + number, made


XS = (jnp.arange(4, dtype=jnp.int32), jnp.linspace(-1, 1, 8).reshape(4, 2))


@pytest.mark.parametrize("count", [1, 4])
@pytest.mark.parametrize("reverse", [False, True])
def test_it_gives_what_a_scan_gives(count, reverse):
    xs = jax.tree.map(lambda leaf: leaf[:count], XS)
    start = jnp.ones(3)
    made = jax.jit(lambda: stacking_scan(body, start, xs, reverse=reverse))()
    expected = jax.jit(lambda: lax.scan(body, start, xs, reverse=reverse))()
    jax.tree.map(np.testing.assert_array_equal, made, expected)


def test_its_stacks_are_memory_that_nothing_fills():
    equations = jax.make_jaxpr(lambda start: stacking_scan(body, start, XS))(jnp.ones(3)).eqns
    (loop,) = (each for each in equations if each.primitive.name == "scan")
    stacks = [each for each in equations if each.outvars[0] in loop.invars and each is not loop]
    memory = {each.outvars[0] for each in equations if each.primitive.name == "empty"}
    begun = [each for each in stacks if each.invars and each.invars[0] in memory]
    assert {each.outvars[0].aval.shape for each in begun} == {(4, 3), (4,), (4, 0)}
    assert all(each.primitive.name == "dynamic_update_slice" for each in begun)
    inside = loop.params["jaxpr"].out_avals
    assert [each.shape for each in inside] == [each.aval.shape for each in loop.outvars]
