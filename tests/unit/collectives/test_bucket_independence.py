"""The buckets' phases do not wait for one another, and a leaf that is its own bucket is not copied.

Read from the jaxpr, where an equation waits for another when there is a path of values from one to
the other.
"""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from geojax.collectives import (
    all_gather,
)
from geojax.collectives import all_reduce as sum_of
from geojax.collectives import (
    reduce_scatter as scattered_sum_of,
)
from geojax.collectives.wire_format import Int8Format

TREE = {
    "big": jax.ShapeDtypeStruct((64, 16), jnp.float32),
    "one": jax.ShapeDtypeStruct((8,), jnp.float32),
    "two": jax.ShapeDtypeStruct((4,), jnp.float32),
}
BUCKET_BYTES = 1024  # big is 4096 bytes: four buckets, and a fifth with the two others


def equations(mesh, step, *arguments):
    """The equations of the shard_map's body."""
    program = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    (outer,) = jax.make_jaxpr(program)(*arguments).jaxpr.eqns
    return outer.params["jaxpr"].eqns


def ancestors(body):
    """For each equation the numbers of those that it waits for."""
    made_by, waits = {}, []
    for number, equation in enumerate(body):
        sources = [made_by[v] for v in equation.invars if not hasattr(v, "val") and v in made_by]
        waits.append(set(sources).union(*(waits[source] for source in sources)))
        made_by.update(dict.fromkeys(equation.outvars, number))
    return waits


def names_of(jaxpr):
    """The primitives of a jaxpr, and of those within."""
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for value in equation.params.values():
            if hasattr(getattr(value, "jaxpr", value), "eqns"):
                yield from names_of(getattr(value, "jaxpr", value))


def numbers_of(body, *names):
    return [number for number, equation in enumerate(body) if equation.primitive.name in names]


def all_reduce(tree):
    return sum_of(tree, "data", "dc", bucket_bytes=BUCKET_BYTES)


def reduce_scatter(tree):
    return scattered_sum_of(tree, "data", "dc", dims=0, bucket_bytes=BUCKET_BYTES)


@pytest.mark.parametrize("operation", [all_reduce, reduce_scatter])
def test_no_phase_of_a_bucket_waits_for_another_bucket(mesh_of, operation):
    body = equations(mesh_of(dc=2, data=4), operation, TREE)
    waits = ancestors(body)
    scatters = numbers_of(body, "reduce_scatter")
    sums = numbers_of(body, "psum", "psum_invariant")
    gathers = numbers_of(body, "all_gather", "all_gather_invariant")
    assert len(scatters) == len(sums) == 5
    assert len(gathers) == (5 if operation is all_reduce else 0)
    for phase in (scatters, sums, gathers):
        for number in phase:
            assert not waits[number] & (set(phase) - {number}), "waits for its own phase elsewhere"
    for number in scatters:
        assert not waits[number] & set(sums)
    for number in sums:
        assert len(waits[number] & set(scatters)) == 1
        assert not waits[number] & set(gathers)
    for number in gathers:
        assert len(waits[number] & set(sums)) == 1


@pytest.mark.parametrize(
    ("sites", "wanted"),
    [(2, ["ppermute"]), (4, ["all_to_all", "all_gather"])],
)
def test_nor_in_a_wire_format(mesh_of, sites, wanted):
    wire = Int8Format(block=2)  # a bucket holds a block at least

    def step(tree):
        return scattered_sum_of(tree, "data", "dc", dims=0, bucket_bytes=BUCKET_BYTES, wire=wire)

    body = equations(mesh_of(dc=sites, data=8 // sites), step, TREE)
    waits = ancestors(body)
    scatters = set(numbers_of(body, "reduce_scatter"))
    sums = set(numbers_of(body, "custom_jvp_call"))
    assert len(scatters) == len(sums) == 5
    for number in scatters:
        assert not waits[number] & (scatters | sums)
    sends = {"all_to_all", "all_gather", "ppermute"}
    for number in sums:
        # Outside `check_vma` JAX 0.12 has one primitive for both kinds of all-gather.
        names = [
            name.removesuffix("_invariant") for name in names_of(body[number].params["call_jaxpr"])
        ]
        assert [name for name in names if name in sends] == wanted
        assert len(waits[number] & scatters) == 1
        assert not waits[number] & sums


def test_a_leaf_that_is_its_own_bucket_is_sent_as_it_lies(mesh_of):
    def step(tree):
        shards = scattered_sum_of(tree, "data", "dc", dims=dims)
        return all_gather(shards, "data", dims=dims, shapes=tree)

    dims = {"big": 0, "one": 0, "two": 0}
    body = equations(mesh_of(dc=2, data=4), step, TREE)
    names = {equation.primitive.name for equation in body}
    assert names <= {"reduce_scatter", "psum", "all_gather", "all_gather_invariant"}


@pytest.mark.parametrize(("dim", "shard"), [(1, (8, 4, 32)), (2, (8, 16, 8))])
def test_the_dim_that_is_scattered_leaves_the_layout_of_a_sum_as_it_is(mesh_of, dim, shard):
    """A compiler that scatters along the major dim would turn around what blocks are added to."""

    def step(stacked):
        def add(total, summand):
            return total + scattered_sum_of(summand, "data", "dc", dims=dim), None

        zeros = jax.lax.pcast(jnp.zeros(shard), "data", to="varying")
        return jax.lax.scan(add, zeros, stacked)[0]

    specs = {"in_specs": P(None, "dc"), "out_specs": P(*[None] * dim, "data")}
    program = jax.shard_map(step, mesh=mesh_of(dc=2, data=4), **specs)
    stacked = jax.ShapeDtypeStruct((3, 16, 16, 32), jnp.float32)
    text = jax.jit(program).lower(stacked).compile().as_text()
    sizes = ",".join(map(str, shard))
    assert "reduce-scatter" in text
    assert set(re.findall(rf"f32\[{sizes}\]\{{([\d,]+)\}}", text)) == {"2,1,0"}


@pytest.mark.parametrize("sizes", [{"data": 1}, {"dc": 2}, {"data": 4}])
def test_an_axis_of_size_one_emits_nothing(mesh_of, sizes):
    def step(tree):
        shards = reduce_scatter(tree)
        whole = all_gather(shards, "data", dims=0, shapes=tree, bucket_bytes=BUCKET_BYTES)
        return all_reduce(whole)

    mesh = mesh_of(**sizes)
    body = equations(mesh, step, TREE)
    for number in numbers_of(
        body, "psum", "psum_invariant", "reduce_scatter", "all_gather", "all_gather_invariant"
    ):
        params = body[number].params
        axes = params.get("axes") or params["axis_name"]
        axes = (axes,) if isinstance(axes, str) else axes
        assert all(mesh.shape[axis] > 1 for axis in axes)
