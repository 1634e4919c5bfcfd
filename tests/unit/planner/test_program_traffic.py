"""The collectives of small traced programs: what counts, how often, and with what mark."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.extend.core import Primitive
from jax.sharding import PartitionSpec as P
from support.step_traffic import by_kind

from geojax.hlo import collective_traffic
from geojax.planner.program_traffic import program_traffic

ALL = ("dc", "data")
X = jax.ShapeDtypeStruct((8,), jnp.float32)


@pytest.fixture
def mesh(mesh_of):
    return mesh_of(dc=2, data=4)


def trace(mesh, step):
    """A step on numbers that vary over all axes, and whose results do."""

    def local(x):
        return step(lax.pcast(x, ALL, to="varying"))

    return jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P(), out_specs=P(ALL))).trace(X)


def count(mesh, step, *, longest_loop=None):
    """The collectives of a step, which are those of its lowered program."""
    traced = trace(mesh, step)
    counted = program_traffic(traced, mesh, longest_loop=longest_loop)
    read = collective_traffic(traced.lower(), mesh, longest_loop=longest_loop)
    assert by_kind(counted) == by_kind(read)
    assert counted.total_bytes_over("dc") == read.total_bytes_over("dc")
    return counted


def summed(x, axes=ALL):
    return lax.pcast(lax.psum(x, axes), axes, to="varying")


@pytest.mark.parametrize(
    ("step", "kind", "axes", "sent"),
    [
        (lambda x: summed(x, "data"), "all-reduce", ("data",), 48),
        (summed, "all-reduce", ALL, 56),
        (lambda x: lax.pmax(x, "dc"), "all-reduce", ("dc",), 32),
        (lambda x: lax.all_gather(x, "data"), "all-gather", ("data",), 96),
        (lambda x: lax.psum_scatter(x, "data", tiled=True), "reduce-scatter", ("data",), 24),
        (lambda x: lax.all_to_all(x, "data", 0, 0, tiled=True), "all-to-all", ("data",), 24),
        (lambda x: lax.all_gather(x.astype("bfloat16"), "dc"), "all-gather", ("dc",), 16),
        (lambda x: lax.all_gather(x.astype("uint8"), "dc"), "all-gather", ("dc",), 8),
    ],
)
def test_one_collective(mesh, step, kind, axes, sent):
    (found,) = count(mesh, step).collectives
    assert (found.kind, found.axes, found.bytes_sent) == (kind, axes, sent)
    assert (found.executions, found.in_loop, found.conditional) == (1, False, False)


def test_axes_of_one_rank_casts_and_results_that_nothing_reads_send_nothing(mesh):
    def step(x):
        lax.psum(x, "data")

        def body(carry, _):
            kept, dropped = carry
            return (kept + 1, summed(dropped)), None

        (kept, _), _ = lax.scan(body, (x, x), None, length=3)
        return kept + lax.psum(x, "tensor")

    assert count(mesh, step).collectives == ()


def test_a_permute_is_listed_once_for_each_set_of_axes_that_it_crosses(mesh):
    pairs = [(0, 4), (1, 5), (2, 3)]
    traffic = count(mesh, lambda x: lax.ppermute(x, ALL, pairs))
    assert {each.axes: each.senders for each in traffic.collectives} == {("dc",): 2, ("data",): 1}
    assert (traffic.bytes_over("dc"), traffic.total_bytes_over("dc")) == (32, 64)
    inner = count(mesh, lambda x: lax.ppermute(x, "data", [(0, 1), (1, 2)]))
    assert [(each.axes, each.senders) for each in inner.collectives] == [(("data",), 4)]


def test_loops_count_as_often_as_they_run(mesh):
    def inner(x, _):
        return summed(x, "data"), None

    def outer(x, _):
        return lax.scan(inner, x, None, length=5)[0], None

    traffic = count(mesh, lambda x: lax.scan(outer, summed(x, "dc"), None, length=3)[0])
    found = {each.axes: (each.executions, each.in_loop) for each in traffic.collectives}
    assert found == {("dc",): (1, False), ("data",): (15, True)}
    assert all(each.name.endswith("psum_invariant") for each in traffic.collectives)


def test_a_loop_over_data_counts_once_and_is_marked(mesh):
    def step(x):
        return lax.while_loop(lambda x: lax.psum(x, ALL)[0] < 100, summed, x)

    once = count(mesh, step).collectives
    assert [(each.executions, each.at_least) for each in once] == [(1, True)] * 2
    assert all(each.in_loop for each in once)
    known = count(mesh, step, longest_loop=3).collectives
    assert [(each.executions, each.at_least) for each in known] == [(3, False)] * 2


def test_all_branches_count_and_are_marked(mesh):
    def step(x):
        branches = [lambda x: x, lambda x: summed(x, "data"), lambda x: summed(x, "dc")]
        return summed(lax.switch(x[0].astype("int32"), branches, x))

    traffic = count(mesh, step)
    found = {each.axes: each.conditional for each in traffic.collectives}
    assert found == {("data",): True, ("dc",): True, ALL: False}


def test_calls_and_derivatives_are_entered(mesh):
    @jax.custom_vjp
    def gathered(x):
        return jnp.sum(lax.all_gather(x, "data"), 0)

    gathered.defvjp(
        lambda x: (gathered(x), None),
        lambda _, cotangent: (summed(cotangent, "dc"),),
    )

    @jax.checkpoint
    def block(x):
        return jnp.sin(jax.jit(functools.partial(summed, axes="data"))(jnp.sin(x)))

    plain = count(mesh, gathered)
    assert [each.kind for each in plain.collectives] == ["all-gather"]
    traffic = count(mesh, jax.grad(lambda x: jnp.sum(gathered(block(x)))))
    assert {(each.kind, each.axes) for each in traffic.collectives} == {
        ("all-reduce", ("dc",)),
        ("all-reduce", ("data",)),
    }


def test_a_collective_that_is_not_known_is_named(mesh):
    odd = Primitive("odd_exchange")
    odd.def_abstract_eval(lambda x, *, axes: x)
    with pytest.raises(AssertionError, match=r"odd_exchange over \('data',\)"):
        program_traffic(trace(mesh, lambda x: odd.bind(x, axes=("data",))), mesh)
