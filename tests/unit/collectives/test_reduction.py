"""Values and types of the collectives, on several meshes, against sums in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from geojax.collectives import (
    BFLOAT16,
    all_gather,
    all_reduce,
    reduce_scatter,
)
from geojax.collectives.axes import drop_single, to_varying, varying_axes
from geojax.errors import UserError

LAYOUTS = {
    "two sites of four": ({"dc": 2, "data": 4}, ("data",)),
    "four sites of two": ({"dc": 4, "data": 2}, ("data",)),
    "three sites of two": ({"dc": 3, "data": 2}, ("data",)),
    "one site of eight": ({"dc": 1, "data": 8}, ("data",)),
    "eight sites of one": ({"dc": 8, "data": 1}, ("data",)),
    "one device": ({"dc": 1, "data": 1}, ("data",)),
    "two inner axes": ({"dc": 2, "data": 2, "expert": 2}, ("data", "expert")),
    "two inner axes, reversed": ({"dc": 2, "data": 2, "expert": 2}, ("expert", "data")),
    "an inner axis of one": ({"dc": 3, "data": 2, "expert": 1}, ("data", "expert")),
}
DIMS = {"vector": 0, "matrix": 1, "cube": -3, "empty": 1}
SHAPES = {"vector": (7,), "matrix": (3, 5), "cube": (8, 2, 3), "empty": (2, 0)}

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=LAYOUTS)
def layout(request, mesh_of):
    sizes, inner = LAYOUTS[request.param]
    return mesh_of(**sizes), inner


@pytest.fixture(params=[None, 80, 10_000], ids=["unbucketed", "split", "merged"])
def bucket_bytes(request):
    # 80 bytes: one float64 for each of eight ranks and a little, so that everything is split.
    return request.param


def summands(mesh, shapes):
    """{name: [devices, *shape]}, every device's own numbers."""
    generator = np.random.default_rng(0)
    return {name: generator.normal(size=(mesh.size, *shape)) for name, shape in shapes.items()}


def own(tree):
    """What a device sees of `summands`."""
    return jax.tree.map(lambda x: x[0], tree)


def assert_close(tree, expected):
    for name, value in expected.items():
        np.testing.assert_allclose(tree[name], value, rtol=1e-12, atol=1e-12, err_msg=name)


@pytest.mark.parametrize("check_vma", [True, False])
def test_all_reduce_sums_over_both_kinds_of_axes(layout, bucket_bytes, check_vma):
    mesh, inner = layout
    tree = summands(mesh, {**SHAPES, "scalar": ()})

    def step(tree):
        return all_reduce(own(tree), inner, "dc", bucket_bytes=bucket_bytes)

    program = jax.shard_map(
        step, mesh=mesh, in_specs=P(("dc", *inner)), out_specs=P(), check_vma=check_vma
    )
    assert_close(jax.jit(program)(tree), {name: x.sum(0) for name, x in tree.items()})


@pytest.mark.parametrize("to", ["varying", "invarying"])
def test_rank_r_keeps_block_r_and_the_gather_brings_all_back(layout, bucket_bytes, to):
    mesh, inner = layout
    tree = summands(mesh, SHAPES)

    def step(tree):
        shards = reduce_scatter(own(tree), inner, "dc", dims=DIMS, bucket_bytes=bucket_bytes)
        whole = all_gather(
            shards, inner, dims=DIMS, shapes=SHAPES, bucket_bytes=bucket_bytes, to=to
        )
        return shards, jax.tree.map(lambda x: x[None], whole)

    second = P(None, inner)
    specs = {"vector": P(inner), "matrix": second, "cube": P(inner), "empty": second}
    wholes = P(inner) if to == "varying" else P()
    program = jax.shard_map(step, mesh=mesh, in_specs=P(("dc", *inner)), out_specs=(specs, wholes))
    shards, copies = jax.jit(program)(tree)

    for name, shape in SHAPES.items():
        total, dim = tree[name].sum(0), DIMS[name] % len(shape)
        padded = np.asarray(shards[name])
        blocks, padding = np.split(padded, [shape[dim]], axis=dim)
        np.testing.assert_allclose(blocks, total, rtol=1e-12, atol=1e-12)
        assert not padding.any()
        for copy in copies[name]:
            np.testing.assert_allclose(copy, total, rtol=1e-12, atol=1e-12)


def test_types_do_not_depend_on_the_sizes_of_the_axes(layout):
    mesh, inner = layout
    seen = {}

    def step(x):
        x = to_varying(x, ("context",))
        shard = reduce_scatter(x, inner, "dc", dims=0)
        seen["sum"] = varying_axes(all_reduce(x, inner, "dc"))
        seen["shard"] = varying_axes(shard)
        seen["whole"] = varying_axes(all_gather(shard, inner, dims=0, shapes=(6,)))
        seen["known"] = varying_axes(all_gather(shard, inner, dims=0, shapes=(6,), to="invarying"))
        return jnp.zeros(())

    jax.eval_shape(
        jax.shard_map(step, mesh=mesh, in_specs=P(("dc", *inner)), out_specs=P()),
        jax.ShapeDtypeStruct((6 * mesh.size,), jnp.float64),
    )
    assert seen == {
        "sum": {"context"},
        "shard": {"context", *inner},
        "whole": {"context", *inner},
        "known": {"context"},
    }


def test_a_value_that_does_not_vary_counts_once_for_each_rank(mesh_of):
    mesh = mesh_of(dc=2, data=4)

    def step(x):
        shard = reduce_scatter(x, "data", "dc", dims=0)
        return all_reduce(x, "data", "dc"), shard, lax.psum(x, ("dc", "data"))

    program = jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=(P(), P("data"), P()))
    summed, shard, plain = jax.jit(program)(jnp.arange(8.0))
    np.testing.assert_array_equal(summed, plain)
    np.testing.assert_array_equal(shard, plain)


def test_leaves_keep_their_dtypes_and_other_axes_in_one_bucket(mesh_of):
    mesh = mesh_of(dc=2, data=2, tensor=2)
    tree = {
        "split": jnp.arange(16.0),
        "alike": jnp.arange(3.0),
        "half": jnp.arange(5, dtype=jnp.bfloat16),
        "count": jnp.arange(6, dtype=jnp.int32),
    }
    specs = {"split": P("tensor"), "alike": P(), "half": P(), "count": P()}

    def step(tree):
        return all_reduce(tree, "data", "dc", bucket_bytes=1000)

    out = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs,), out_specs=specs))(tree)
    for name, leaf in tree.items():
        assert out[name].dtype == leaf.dtype
        np.testing.assert_array_equal(out[name], 4 * leaf)


def test_a_bfloat16_wire_rounds_only_between_sites(mesh_of):
    mesh = mesh_of(dc=2, data=4)
    x = np.random.default_rng(1).normal(size=(8, 1000))
    counts = np.arange(8)

    def step(x, counts):
        return all_reduce((x[0], counts[0]), "data", "dc", bucket_bytes=4000, wire=BFLOAT16)

    program = jax.shard_map(step, mesh=mesh, in_specs=P(("dc", "data")), out_specs=P())
    summed, count = jax.jit(program)(x, counts)
    assert summed.dtype == jnp.float64
    assert count == 28
    # Each site's float64 sum is rounded once.
    sites = jnp.asarray(x.reshape(2, 4, 1000).sum(1)).astype(jnp.bfloat16).astype(jnp.float64)
    np.testing.assert_array_equal(summed, sites.sum(0))


def test_a_wire_sums_wider_than_its_numbers(mesh_of):
    mesh = mesh_of(dc=4, data=2)
    x = np.random.default_rng(1).normal(size=(8, 64)).astype(jnp.bfloat16)

    def step(x):
        return reduce_scatter(x[0], "data", "dc", dims=0, wire=BFLOAT16)

    program = jax.shard_map(step, mesh=mesh, in_specs=P(("dc", "data")), out_specs=P("data"))
    summed = jax.jit(program)(x)
    assert summed.dtype == jnp.bfloat16
    sites = (x[0::2] + x[1::2]).astype(np.float32)
    np.testing.assert_array_equal(summed, sites.sum(0).astype(jnp.bfloat16))


def test_the_gather_casts_floating_point_shards_before_it_sends_them(mesh_of):
    mesh = mesh_of(dc=2, data=4)
    tree = {"weights": np.random.default_rng(2).normal(size=(10, 3)), "ids": np.arange(10)}

    def step(tree):
        shards = reduce_scatter(tree, "data", "dc", dims=0)
        return all_gather(shards, "data", dims=0, shapes=tree, dtype=jnp.bfloat16, to="invarying")

    out = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()))(tree)
    expected = (8 * jnp.asarray(tree["weights"])).astype(jnp.bfloat16)
    np.testing.assert_array_equal(out["weights"], expected)
    np.testing.assert_array_equal(out["ids"], 8 * tree["ids"])


def test_several_outer_axes_and_none(mesh_of):
    mesh = mesh_of(dc=2, stage=2, data=2)
    x = np.random.default_rng(3).normal(size=(8, 5))

    def step(x):
        both = all_reduce(x[0], "data", ("dc", "stage"))
        inner = all_reduce(x[0], ("data", "stage", "dc"), ())
        return both, inner

    program = jax.shard_map(step, mesh=mesh, in_specs=P(("dc", "stage", "data")), out_specs=P())
    for total in jax.jit(program)(x):
        np.testing.assert_allclose(total, x.sum(0), rtol=1e-12)


def run(mesh, step, *arguments):
    jax.eval_shape(
        jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False), *arguments
    )


@pytest.mark.parametrize(
    ("inner", "outer", "message"),
    [
        ("rows", "dc", "no mesh axis 'rows' here"),
        ("data", ("dc", "data"), "axis 'data' is named twice"),
    ],
)
def test_axes_that_make_no_sense_are_refused(mesh_of, inner, outer, message):
    with pytest.raises(UserError, match=message):
        run(mesh_of(dc=2, data=4), lambda x: all_reduce(x, inner, outer), jnp.ones(4))


def test_a_call_outside_shard_map_is_refused():
    with pytest.raises(UserError, match=r"call inside a jax\.shard_map"):
        all_reduce(jnp.ones(4), "data", "dc")


@pytest.mark.parametrize(
    ("operation", "message"),
    [
        (
            lambda x: all_reduce({"mask": x > 0}, "data", "dc"),
            r"\['mask'\] is boolean",
        ),
        (lambda x: all_reduce(x, "data", "dc", bucket_bytes=8), "takes 32 bytes"),
        (lambda x: reduce_scatter(x, "data", "dc", dims=1), "no dimension 1"),
        (lambda x: reduce_scatter(x[0], "data", "dc", dims=0), "is a scalar"),
        (lambda x: all_gather(x, "data", dims=0, shapes=(17,)), r"shard has shape \(4,\).* \(5,\)"),
        (lambda x: all_gather(x, "data", dims=0, shapes=(16,), to="both"), "to='both'"),
    ],
)
def test_bad_arguments_are_refused_in_one_line(mesh_of, operation, message):
    with pytest.raises(UserError, match=message) as error:
        run(mesh_of(dc=2, data=4), operation, jnp.ones(4))
    assert "\n" not in str(error.value)


def test_drop_single_is_linear_and_maps(mesh_of):
    mesh = mesh_of(dc=2, data=2)
    x = jnp.arange(6.0).reshape(2, 3)

    def step(x):
        def cast(row):
            return drop_single(2 * to_varying(row, ("stage",)), ("stage",))

        out, tangent = jax.jvp(jax.vmap(cast), (x,), (jnp.ones_like(x),))
        gradient = jax.grad(lambda x: jax.vmap(cast)(x).sum())(x)
        return out, tangent, gradient

    out, tangent, gradient = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(), out_specs=P()))(x)
    np.testing.assert_array_equal(out, 2 * x)
    np.testing.assert_array_equal(tangent, np.full((2, 3), 2.0))
    np.testing.assert_array_equal(gradient, np.full((2, 3), 2.0))
