"""Derivatives under check_vma=True, in float64, against those of the plain psum."""

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

# With 200 bytes the cube is split, and the others are merged.
LAYOUTS = {
    "2x4 unbucketed": ({"dc": 2, "data": 4}, ("data",), None),
    "2x4": ({"dc": 2, "data": 4}, ("data",), 200),
    "3x2": ({"dc": 3, "data": 2}, ("data",), 200),
    "1x8": ({"dc": 1, "data": 8}, ("data",), 200),
    "8x1": ({"dc": 8, "data": 1}, ("data",), 200),
    "2x2x2": ({"dc": 2, "data": 2, "expert": 2}, ("data", "expert"), 200),
    "2x2x2 unbucketed": ({"dc": 2, "data": 2, "expert": 2}, ("data", "expert"), None),
}
SHAPES = {"scale": (1,), "vector": (7,), "matrix": (3, 5), "cube": (2, 8, 3)}
DIMS = {"scale": 0, "vector": 0, "matrix": 1, "cube": 1}

pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(params=LAYOUTS)
def layout(request, mesh_of):
    sizes, inner, bucket_bytes = LAYOUTS[request.param]
    return mesh_of(**sizes), inner, bucket_bytes


def numbers(seed, leading=()):
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=(*leading, *shape)) for name, shape in SHAPES.items()}


def nonlinear(tree):
    """A number that every element of the tree has its own influence on."""
    weights = numbers(7)
    return sum(jnp.sum(weights[name] * jnp.sin(tree[name])) for name in SHAPES)


def operations(inner, bucket_bytes):
    """Sums over all ranks, by the collectives in their several ways and by plain psum."""

    def all_reduced(tree):
        return all_reduce(tree, inner, "dc", bucket_bytes=bucket_bytes)

    def by_halves(to):
        def both(tree):
            shards = reduce_scatter(tree, inner, "dc", dims=DIMS, bucket_bytes=bucket_bytes)
            return all_gather(
                shards, inner, dims=DIMS, shapes=SHAPES, bucket_bytes=bucket_bytes, to=to
            )

        return both

    return {
        "plain": lambda tree: lax.psum(tree, ("dc", *inner)),
        "all-reduce": all_reduced,
        "halves": by_halves("invarying"),
        "halves, varying": by_halves("varying"),
    }


def assert_equal_trees(tree, expected):
    for name in SHAPES:
        np.testing.assert_allclose(tree[name], expected[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("operation", ["all-reduce", "halves"])
def test_gradient_through_the_shard_map_is_that_of_psum(layout, operation):
    mesh, inner, bucket_bytes = layout
    tree = numbers(0, leading=(mesh.size,))

    def gradient(operate):
        def loss(tree):
            return nonlinear(operate(jax.tree.map(lambda x: x[0] ** 2, tree)))

        program = jax.shard_map(loss, mesh=mesh, in_specs=P(("dc", *inner)), out_specs=P())
        return jax.jit(jax.grad(program))(tree)

    known = operations(inner, bucket_bytes)
    assert_equal_trees(gradient(known[operation]), gradient(known["plain"]))


@pytest.mark.parametrize("operation", ["all-reduce", "halves, varying"])
def test_gradient_inside_the_shard_map(layout, operation):
    """With respect to a rank's own values; a varying result makes the loss of every rank count."""
    mesh, inner, bucket_bytes = layout
    axes = ("dc", *inner)
    tree = numbers(0, leading=(mesh.size,))
    varying = operation == "halves, varying"

    def gradient(operate):
        def step(tree):
            return jax.grad(lambda own: nonlinear(operate({k: v[0] for k, v in own.items()})))(tree)

        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P(axes), out_specs=P(axes)))(tree)

    known = operations(inner, bucket_bytes)
    plain = gradient(known["plain"])
    # The loss of each rank of inner is a loss of its own there, and its gradients are summed.
    ranks = int(np.prod([mesh.shape[axis] for axis in inner])) if varying else 1
    assert_equal_trees(gradient(known[operation]), {k: ranks * v for k, v in plain.items()})


@pytest.mark.parametrize("operation", ["all-reduce", "halves, varying"])
def test_forward_and_reverse_mode_are_transposes(layout, operation):
    """<J v, u> = <v, J^T u>, summed over all devices."""
    mesh, inner, bucket_bytes = layout
    axes = ("dc", *inner)
    tree, tangent = (numbers(seed, leading=(mesh.size,)) for seed in (0, 1))

    def operate(tree):
        own = {name: jnp.tanh(leaf[0]) for name, leaf in tree.items()}
        return operations(inner, bucket_bytes)[operation](own)

    copies = P(inner) if operation == "halves, varying" else P()

    def program(tree):
        def step(tree):
            return jax.tree.map(lambda x: x[None], operate(tree))

        return jax.shard_map(step, mesh=mesh, in_specs=P(axes), out_specs=copies)(tree)

    out, pushed = jax.jit(lambda x, v: jax.jvp(program, (x,), (v,)))(tree, tangent)
    cotangent = {k: np.random.default_rng(2).normal(size=v.shape) for k, v in out.items()}
    pulled = jax.jit(lambda x, u: jax.vjp(program, x)[1](u)[0])(tree, cotangent)
    forward = sum(np.vdot(pushed[name], cotangent[name]) for name in SHAPES)
    reverse = sum(np.vdot(tangent[name], pulled[name]) for name in SHAPES)
    np.testing.assert_allclose(forward, reverse, rtol=1e-12)


def test_a_step_on_shards_is_a_step_on_the_whole(layout):
    """Gather, a rank's own gradients, reduce-scatter: what a trainer does with the two halves."""
    mesh, inner, bucket_bytes = layout
    parameters, data = numbers(0), numbers(1, leading=(mesh.size,))

    def loss(parameters, sample):
        return nonlinear({name: parameters[name] * sample[name] for name in SHAPES})

    def step(parameters, data):
        # Shards as a trainer holds them: cut out of the whole by a reduce-scatter of equal copies.
        copies = jax.tree.map(lambda x: x / mesh.size, parameters)
        shards = reduce_scatter(copies, inner, "dc", dims=DIMS)
        whole = all_gather(shards, inner, dims=DIMS, shapes=SHAPES, bucket_bytes=bucket_bytes)
        whole = jax.tree.map(lambda x: lax.pcast(x, "dc", to="varying"), whole)
        gradients = jax.grad(loss)(whole, jax.tree.map(lambda x: x[0], data))
        summed = reduce_scatter(gradients, inner, "dc", dims=DIMS, bucket_bytes=bucket_bytes)
        return all_gather(summed, inner, dims=DIMS, shapes=SHAPES, to="invarying")

    program = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(("dc", *inner))), out_specs=P())
    gradients = jax.jit(program)(parameters, data)
    expected = jax.grad(
        lambda whole: sum(
            loss(whole, {name: x[rank] for name, x in data.items()}) for rank in range(mesh.size)
        )
    )({name: jnp.asarray(x) for name, x in parameters.items()})
    assert_equal_trees(gradients, expected)


def test_a_bfloat16_wire_gives_gradients_within_its_rounding(mesh_of):
    mesh = mesh_of(dc=2, data=4)
    tree = numbers(0, leading=(8,))

    def gradient(wire):
        def loss(tree):
            own = jax.tree.map(lambda x: x[0], tree)
            return nonlinear(all_reduce(own, "data", "dc", bucket_bytes=160, wire=wire))

        program = jax.shard_map(loss, mesh=mesh, in_specs=P(("dc", "data")), out_specs=P())
        return jax.jit(jax.grad(program))(tree)

    rounded, exact = gradient(BFLOAT16), gradient(None)
    weights = numbers(7)
    half_unit = 2.0**-8  # bfloat16 has 7 bits behind the first
    for name in SHAPES:
        # d/dx sin(sum): the sum is wrong by a rounding of each term and one of itself.
        terms = np.abs(tree[name].reshape(2, 4, *SHAPES[name]).sum(1)).sum(0)
        bound = np.abs(weights[name]) * half_unit * 2 * terms
        assert (np.abs(rounded[name] - exact[name]) <= 1.1 * bound).all()
        assert not np.array_equal(rounded[name], exact[name])
