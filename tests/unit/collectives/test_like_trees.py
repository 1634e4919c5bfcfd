"""Any registered tree goes through the collectives, and a leaf that does not match is named."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import geojax
from geojax.collectives import INT8
from geojax.collectives.like_trees import spread_dims, spread_errors, spread_shapes
from geojax.errors import UserError


class Two(nnx.Module):
    def __init__(self, rngs):
        self.first = nnx.Linear(3, 5, rngs=rngs)
        self.second = nnx.Linear(5, 2, use_bias=False, rngs=rngs)


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Weights:
    kernel: jax.Array
    none: None
    parts: tuple[jax.Array, jax.Array]


def state():
    return nnx.split(Two(nnx.Rngs(0)), nnx.Param)[1]


TREES = {
    "nnx.State": state,
    "nnx.Param in a dict": lambda: {"w": nnx.Param(jnp.arange(12.0).reshape(6, 2))},
    "a dataclass": lambda: Weights(jnp.ones((5, 2)), None, (jnp.arange(7.0), jnp.ones((4, 1)))),
    "None": lambda: {"kernel": jnp.ones((5, 2)), "bias": None},
}
SHAPES = {
    "the tree itself": lambda tree: tree,
    "arrays without values": lambda tree: jax.eval_shape(lambda: tree),
    "tuples": lambda tree: jax.tree.map(jnp.shape, tree),
}


@pytest.mark.parametrize("kind", TREES)
def test_a_tree_comes_back_from_its_summed_shards(mesh_of, kind):
    whole = TREES[kind]()
    shapes = jax.eval_shape(lambda: whole)
    sizes = jax.tree.map(lambda leaf: jnp.zeros((2, -(-len(leaf) // 2), *leaf.shape[1:])), whole)

    def step(whole, errors):
        errors = jax.tree.map(lambda leaf: leaf[0, 0], errors)
        shards, errors = geojax.reduce_scatter(
            whole, "data", "dc", dims=0, wire=INT8, error_feedback=errors
        )
        gathered = geojax.all_gather(shards, "data", dims=0, shapes=shapes, to="invarying")
        started = geojax.start_all_reduce(whole, "data", "dc").exchange().done()
        reduced, _ = geojax.all_reduce(
            whole, "data", "dc", wire=INT8, error_feedback=jax.tree.map(jnp.zeros_like, whole)
        )
        return gathered, reduced, started

    program = jax.shard_map(
        step, mesh=mesh_of(dc=2, data=2), in_specs=(P(), P("dc", "data")), out_specs=P()
    )
    errors = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), sizes)
    for made in jax.jit(program)(whole, errors):
        assert jax.tree.structure(made) == jax.tree.structure(whole)
        for leaf, summand in zip(*map(jax.tree.leaves, (made, whole)), strict=True):
            # INT8 rounds two sites' numbers, and each to half of 1/127 of the largest.
            error = np.abs(leaf - 4 * summand).max()
            assert error <= 4 * np.abs(summand).max() / 127 + 1e-6


@pytest.mark.parametrize("kind", TREES)
@pytest.mark.parametrize("form", SHAPES)
def test_shapes_are_a_tree_like_the_shards(kind, form):
    tree = TREES[kind]()
    expected = [leaf.shape for leaf in jax.tree.leaves(tree)]
    assert spread_shapes(SHAPES[form](tree), tree) == expected
    assert spread_dims(jax.tree.map(lambda leaf: leaf.ndim - 1, tree), tree) == [
        len(shape) - 1 for shape in expected
    ]


def test_a_wrapped_array_takes_the_shape_of_an_array_and_metadata_do_not_count():
    tree = {"w": nnx.Param(jnp.ones((3, 2)))}
    assert spread_shapes({"w": (6, 2)}, tree) == [(6, 2)]
    assert spread_shapes({"w": jnp.ones((6, 2))}, tree) == [(6, 2)]
    assert spread_shapes({"w": nnx.Param(jnp.ones((6, 2)), note=1)}, tree) == [(6, 2)]
    assert spread_shapes(tree, {"w": jnp.ones((3, 2))}) == [(3, 2)]


def test_shapes_are_tuples_or_things_with_a_shape():
    shapes = {"a": (3, 4), "b": jax.ShapeDtypeStruct((5,), jnp.float32)}
    tree = {"a": jnp.zeros((1, 4)), "b": jnp.zeros(2)}
    assert spread_shapes(shapes, tree) == [(3, 4), (5,)]
    assert spread_shapes((5,), jnp.zeros(2)) == [(5,)]
    assert spread_shapes(((3, 4), (5,)), (tree["a"], tree["b"])) == [(3, 4), (5,)]


def test_dims_spread_from_one_int_or_a_tree():
    tree = {"a": jnp.zeros((2, 3)), "b": {"c": jnp.zeros(4), "d": jnp.zeros(5)}}
    assert spread_dims(0, tree) == [0, 0, 0]
    assert spread_dims({"a": 1, "b": 0}, tree) == [1, 0, 0]


MANY = {f"a_layer_with_a_long_name_{number}": jnp.zeros(2) for number in range(50)}


@pytest.mark.parametrize(
    ("spread", "message"),
    [
        (
            lambda: spread_shapes({"a": (3, 4)}, {"a": jnp.zeros(2), "b": jnp.zeros(2)}),
            r"shapes is a dict without \['b'\], which the arrays have; shapes must be a tree",
        ),
        (
            lambda: spread_shapes({"a": (3,), "b": 5}, {"a": jnp.zeros(2), "b": jnp.zeros(2)}),
            r"shapes \['b'\] is 5; shapes must be a tree like the shards",
        ),
        (
            lambda: spread_shapes({"a": {"k": (2,)}}, {"a": {"k": [jnp.zeros(2)]}}),
            r"shapes\['a'\]\['k'\] is a tuple where the arrays have a list; shapes must be",
        ),
        (
            lambda: spread_shapes(jax.tree.map(jnp.shape, MANY | {"k": jnp.zeros(2)}), MANY),
            r"shapes is a dict with \['k'\], which the arrays lack; shapes must be",
        ),
        (
            lambda: spread_shapes(None, MANY),
            r"shapes is None where the arrays have a dict; shapes must be",
        ),
        (
            lambda: spread_dims({"a": 1}, {"a": jnp.zeros(2), "b": jnp.zeros(2)}),
            r"dims is a dict without \['b'\].*dims must be one int or a tree of ints",
        ),
        (
            lambda: spread_dims([0, 0], {"a": jnp.zeros(2)}),
            r"dims is a list where the arrays have a dict; dims must be one int or a tree of ints",
        ),
        (lambda: spread_dims(1.0, [jnp.zeros(2)]), "dims must be integers, not 1.0"),
        (lambda: spread_dims(True, [jnp.zeros(2)]), "dims must be integers, not True"),
        (lambda: spread_dims("0", [jnp.zeros(2)]), "dims must be integers, not '0'"),
        (
            lambda: spread_errors({"w": jnp.zeros(3)}, {"w": jnp.zeros(4)}, [(4,)]),
            r"error_feedback \['w'\] is .* of shape \(3,\) where the result has shape \(4,\)",
        ),
        (
            lambda: spread_errors(MANY, {"w": jnp.zeros(4)}, [(4,)]),
            r"error_feedback is a dict without \['w'\], which the arrays have; error_feedback must",
        ),
    ],
)
def test_the_leaf_that_differs_is_named_in_one_line(spread, message):
    with pytest.raises(UserError, match=message) as error:
        spread()
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 500
