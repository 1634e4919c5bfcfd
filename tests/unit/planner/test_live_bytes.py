"""What small programs hold at once, counted by hand. A vector is 4,000 bytes."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from geojax import collectives
from geojax.planner.flat_program import flatten
from geojax.planner.live_bytes import Accounting, Compiler, peaks

VECTOR = jax.ShapeDtypeStruct((1000,), jnp.float32)
MATRIX = jax.ShapeDtypeStruct((1000, 1000), jnp.float32)
NARROW = jax.ShapeDtypeStruct((1000, 1000), jnp.bfloat16)
ONE = 4000


def held(function, *arguments, donated=None, **how):
    """The most bytes held beside the arguments."""
    program = flatten(jax.make_jaxpr(function, axis_env=[("data", 2)])(*arguments))
    compiler = Compiler(**how)
    accounting = Accounting(lambda operation, buffer: "computed", lambda operation: "all", compiler)
    snapshots = peaks(program, accounting, donated)
    given = sum(buffer.bytes for buffer in program.inputs)
    return max((each.bytes for each in snapshots.values()), default=given) - given


def test_what_is_computed_element_by_element_takes_no_memory_on_the_way():
    assert held(lambda x: jnp.square(x * 2 + 1) - x, VECTOR) == ONE


def test_products_read_and_write_memory():
    assert held(lambda a, x: a @ (a @ (2 * x)), MATRIX, VECTOR) == 2 * ONE


def test_what_is_expensive_is_computed_once_for_all_its_readers():
    def twice(function):
        return lambda a, x: ((a @ x) * function(x)).sum() + ((a @ (a @ x)) * function(x)).sum()

    def once(function):
        def run(a, x):
            made = function(x)
            return ((a @ x) * made).sum() + ((a @ (a @ x)) * made).sum()

        return run

    assert held(once(jnp.exp), MATRIX, VECTOR) == held(once(jnp.negative), MATRIX, VECTOR) + ONE
    assert held(twice(jnp.negative), MATRIX, VECTOR) == held(once(jnp.negative), MATRIX, VECTOR)


def test_a_buffer_is_freed_after_its_last_reader():
    def chain(a, x):
        for _ in range(5):
            x = a @ x
        return x

    assert held(chain, MATRIX, VECTOR) == 2 * ONE


def test_zeros_are_made_when_they_are_read():
    def late(a, x):
        total = jnp.zeros_like(x)
        made = (a @ (a @ (a @ x))).sum()  # holds two vectors at once
        return lax.fori_loop(0, 3, lambda _, total: total + made, total)

    assert held(late, MATRIX, VECTOR) < 3 * ONE


def test_a_donated_argument_is_overwritten_unless_it_is_read_later():
    def update(x, y):
        return x + y, jnp.sum(y)

    def keep(a, x, y):
        new = x + y
        lax.optimization_barrier(new)
        return new, a @ x

    assert held(update, VECTOR, VECTOR) == ONE + 4
    assert held(update, VECTOR, VECTOR, donated={0: 0}) == 4
    assert held(keep, MATRIX, VECTOR, VECTOR, donated={0: 1}) == 2 * ONE


@pytest.mark.parametrize("barrier", [lax.optimization_barrier, collectives.barrier])
def test_a_barrier_between_two_loops_copies_nothing(barrier):
    def loops(a, x):
        def double(_, carry):
            return a @ carry[0], a @ carry[1]

        carry = lax.fori_loop(0, 3, double, (x * 2, x * 3))
        return lax.fori_loop(0, 3, double, barrier(carry))

    assert held(loops, MATRIX, VECTOR) == pytest.approx(3 * ONE, abs=8)


@pytest.mark.parametrize("barrier", [lax.optimization_barrier, collectives.barrier])
def test_zeros_of_a_barrier_are_made_where_it_is(barrier):
    def early(a, x):
        x, zero = barrier((x, jnp.zeros(())))
        total = jnp.full_like(x, zero)
        made = (a @ (a @ (a @ x))).sum()  # holds two vectors beside it
        return lax.fori_loop(0, 3, lambda _, total: total + made, total)

    assert held(early, MATRIX, VECTOR) == pytest.approx(3 * ONE, abs=8)


@pytest.mark.parametrize("first", ["message", "work", "work, barrier", "work, other message"])
def test_a_message_travels_beside_what_can_wait(first):
    """It holds what it sends and what arrives; a barrier keeps to itself what was before it."""

    def program(a, x):
        def work():
            return (a @ (a @ (a @ x))).sum()  # holds two vectors at once

        sent = a @ x
        if first == "message":
            arrived = lax.psum(sent, "data")
            made = work()
        else:
            made = work()
            if first == "work, barrier":
                sent, made = lax.optimization_barrier((sent, made))
            elif first == "work, other message":
                made += lax.psum(x[0], "data")
            arrived = lax.psum(sent, "data")
        return (arrived * made).sum()

    vectors = 3 if first == "work, barrier" else 4
    assert held(program, MATRIX, VECTOR) == pytest.approx(vectors * ONE, abs=16)


def test_a_loop_holds_its_carry_once_and_all_that_it_stacks():
    def loop(x):
        return lax.scan(lambda x, _: (x * 2, jnp.exp(x)), x, length=7)

    assert held(loop, VECTOR) == pytest.approx((1 + 7 + 1) * ONE, abs=ONE)


def test_a_loop_updates_what_it_carries_in_place():
    def fill(table, a, x):
        def body(table, index):
            return lax.dynamic_update_index_in_dim(table, a @ x, index, 0), None

        return lax.scan(body, table * 2, jnp.arange(1000))[0]

    table = 1000 * ONE
    assert table <= held(fill, MATRIX, MATRIX, VECTOR) < table + 4 * ONE


def test_branches_share_their_memory():
    def branch(a, x):
        return lax.cond(x[0] > 0, lambda: a @ (a @ x), lambda: a @ x)

    assert held(branch, MATRIX, VECTOR) <= 3 * ONE


def test_breadth_first_starts_what_is_possible():
    def chains(a, x):
        total = x
        for factor in range(4):
            total = a @ (total + a @ jnp.sin(a @ (factor * x)))
        return total

    in_order = held(chains, MATRIX, VECTOR)
    assert held(chains, MATRIX, VECTOR, breadth_first=True) >= in_order + 2 * ONE


def test_narrow_floats_can_be_counted_as_wide():
    def products(a):
        return a @ a

    assert held(products, NARROW) == 2_000_000
    assert held(products, NARROW, widens_16_bit=True) == 4_000_000


def gathered(a):
    return lax.all_gather(a, "data")


def written(a):
    def body(stack, index):
        return lax.dynamic_update_index_in_dim(stack, a[index], index, 0), None

    return lax.scan(body, jnp.zeros_like(a), jnp.arange(1000))[0]


@pytest.mark.parametrize(("function", "narrow"), [(gathered, 4_000_000), (written, 2_000_000)])
def test_what_is_only_moved_can_stay_narrow(function, narrow):
    few = 20_000  # a row, and the loop's indices
    how = {"widens_16_bit": True}
    assert held(function, NARROW, **how) == pytest.approx(narrow, abs=few)
    assert held(function, NARROW, **how, widens_moved=True) == pytest.approx(2 * narrow, abs=few)


def test_calls_and_derivatives_are_followed():
    def loss(a, x):
        return jax.jit(lambda x: jnp.sum(jax.checkpoint(jnp.tanh)(a @ x)))(x)

    assert 0 < held(jax.grad(loss, argnums=1), MATRIX, VECTOR) <= 4 * ONE
