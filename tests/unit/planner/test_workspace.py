"""The memory that a piece of a program needs beside its arguments, counted by hand."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from geojax.planner.workspace import peak_bytes

MATRIX = jax.ShapeDtypeStruct((64, 64), jnp.float32)
BYTES = 64 * 64 * 4


def matrices(function, count):
    return peak_bytes(jax.make_jaxpr(function)(*[MATRIX] * count)) / BYTES


def test_what_is_computed_element_by_element_takes_no_memory():
    assert matrices(lambda x: (jnp.sin(x) + 1) * 2 - x, 1) == 1
    assert matrices(lambda x, w: (x * 2 + 1) @ w, 2) == 2, "a product reads its operand in memory"
    assert matrices(lambda x, w: x @ w @ w @ w, 2) == 2, "a product's operand is freed behind it"


@pytest.mark.parametrize(("function", "held"), [(jnp.negative, 4), (jnp.exp, 5)])
def test_costly_values_are_made_once_and_cheap_ones_by_each_reader(function, held):
    def late(x, w):
        made = function(x)
        return (made * 2) @ w, (x @ w) @ (w @ x), (made * 3) @ w

    assert matrices(late, 2) == held


def test_a_product_is_added_to_a_sum_in_its_place():
    def sums(x, w):
        def step(total, _):
            return total + x @ w, None

        return lax.scan(step, jnp.zeros_like(x), None, length=3)[0]

    assert matrices(sums, 2) == 1
    assert matrices(lambda x, w: x @ w + w @ x, 2) == 2


def test_a_loop_carries_its_values_in_place_and_adds_what_its_body_needs():
    def loop(x, w):
        return lax.scan(lambda x, _: (x @ w @ w, None), x @ w, None, length=3)[0]

    assert matrices(loop, 2) == 2


def test_the_largest_branch_counts():
    def branches(x, w):
        return lax.cond(x[0, 0] > 0, lambda: x @ w, lambda: (x @ w) @ (w @ x) @ w)

    assert 3 <= matrices(branches, 2) <= 4
