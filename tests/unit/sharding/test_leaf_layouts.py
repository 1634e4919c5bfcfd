import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support import whole_state

from geojax import make_mesh
from geojax.sharding import leaf_layouts


@given(
    shape=st.lists(st.integers(1, 40), min_size=1, max_size=4),
    ranks=st.integers(1, 12),
    stacked=st.booleans(),
)
def test_a_leaf_is_cut_along_the_dimension_that_wastes_least(shape, ranks, stacked):
    if stacked and len(shape) == 1:
        shape = [*shape, 3]
    place = leaf_layouts.leaf_layout(tuple(shape), jnp.float32, {"data": ranks}, stacked=stacked)
    candidates = shape[1:] if stacked else shape
    dim = place.shard.dim
    assert not (stacked and dim == 0), "layers are never cut"
    assert place.padded_shape[dim] % ranks == 0
    waste = math.prod(place.padded_shape) / math.prod(shape)
    if any(size % ranks == 0 for size in candidates):
        assert waste == 1
    else:
        assert shape[dim] == max(candidates)
    assert math.prod(place.shard_shape) * ranks == math.prod(place.padded_shape)


def test_padding_leaves_the_values_alone():
    place = leaf_layouts.leaf_layout((5, 7), jnp.float32, {"data": 4}, stacked=False)
    leaf = jnp.arange(35.0).reshape(5, 7)
    padded = place.pad(leaf)
    assert padded.shape == (5, 8)
    np.testing.assert_array_equal(padded[:, 7], 0)
    np.testing.assert_array_equal(place.trim(padded), leaf)


def test_padding_for_shards_does_not_move_what_the_model_cuts():
    part = leaf_layouts.DimSharding(0, ("tensor",), 2)
    place = leaf_layouts.leaf_layout(
        (9, 4), jnp.float32, {"data": 3}, stacked=False, model_shards=(part,)
    )
    assert place.shard.dim == 0
    assert (place.gathered_shape, place.model_shard_shape) == ((5, 4), (6, 4))
    leaf = jnp.arange(1, 37.0).reshape(9, 4)
    padded = place.pad(leaf)
    np.testing.assert_array_equal(padded[:5], leaf[:5])
    np.testing.assert_array_equal(padded[6:10], leaf[5:])
    np.testing.assert_array_equal(padded[jnp.array([5, 10, 11])], 0)
    np.testing.assert_array_equal(place.trim(padded), leaf)


@pytest.mark.parametrize("axes", [{"data": 8}, {"dc": 2, "data": 4}, {"data": 2, "expert": 3}])
def test_a_checkpoint_sees_the_models_shapes_and_no_more_copies_than_needed(axes):
    size = math.prod(axes.values())
    mesh = make_mesh(devices=jax.devices()[:size], **axes)
    parameters = {
        "embedding": jnp.arange(37.0 * 9).reshape(37, 9),
        "layers": {"kernel": jnp.arange(3 * 16 * 10.0).reshape(3, 16, 10)},
    }
    layouts = leaf_layouts.parameter_layouts(parameters, mesh)
    state = jax.device_put(
        jax.tree.map(lambda leaf, place: place.pad(leaf), parameters, layouts),
        leaf_layouts.shardings(layouts, mesh),
    )
    whole = whole_state.trim(state, layouts, mesh)
    jax.tree.map(np.testing.assert_array_equal, whole, parameters)
    for leaf, expected in zip(
        jax.tree.leaves(whole),
        jax.tree.leaves(whole_state.abstract_unpadded(layouts, mesh)),
        strict=True,
    ):
        assert leaf.shape == expected.shape
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
    again = whole_state.pad(whole, layouts, mesh)
    jax.tree.map(np.testing.assert_array_equal, again, state)
    for leaf, before in zip(jax.tree.leaves(again), jax.tree.leaves(state), strict=True):
        assert leaf.sharding.is_equivalent_to(before.sharding, leaf.ndim)


def test_a_padded_leaf_is_saved_in_as_many_parts_as_divide_it():
    mesh = make_mesh(data=2, expert=3, devices=jax.devices()[:6])
    layouts = leaf_layouts.parameter_layouts({"scale": jnp.ones(8)}, mesh)
    (leaf,) = jax.tree.leaves(whole_state.abstract_unpadded(layouts, mesh))
    assert leaf.shape == (8,)
    assert leaf.sharding.shard_shape((8,)) == (4,)  # 8 rows over gcd(8, 6) = 2 parts


def test_bytes_per_device_count_the_padding():
    mesh = make_mesh(dc=2, data=4)
    layouts = leaf_layouts.parameter_layouts({"scale": jnp.ones(5, jnp.float32)}, mesh)
    assert leaf_layouts.bytes_per_device(layouts) == 2 * 4  # 5 padded to 8, over 4 ranks
