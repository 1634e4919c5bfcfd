"""A leaf spread over the stages of a pipeline holds what the model's leaf holds, each row once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import PartitionSpec
from support import whole_state

from geojax import make_mesh
from geojax.models.parallel.partition import Partition
from geojax.optim import global_norm
from geojax.sharding import StageAssignment, leaf_layouts
from geojax.sharding.stage_assignment import PADDING_LAYER

ACROSS_SITES = ("dc", "stage")


@st.composite
def rows_of_stages(draw, *, stages=None):
    """Layers handed out to stages at random, in any order, with empty rows anywhere."""
    count = stages or draw(st.integers(1, 5))
    layers = draw(st.permutations(range(draw(st.integers(1, 9)))))
    held = [[] for _ in range(count)]
    for layer in layers:
        held[draw(st.integers(0, count - 1))].append(layer)
    longest = max(len(rows) for rows in held) + draw(st.integers(0, 1))
    padded = (draw(st.permutations(r + [PADDING_LAYER] * (longest - len(r)))) for r in held)
    return tuple(tuple(rows) for rows in padded)


@settings(max_examples=30)
@given(rows=rows_of_stages())
def test_spread_rows_are_collected_in_the_models_order(rows):
    stages = StageAssignment(ACROSS_SITES, rows)
    leaf = np.arange(1.0, 3 * (1 + max(stages.order)) + 1).reshape(-1, 3)
    spread = np.asarray(stages.to_stages(jnp.asarray(leaf)))
    for place, row in enumerate(stages.order):
        np.testing.assert_array_equal(spread[place], 0 if row == PADDING_LAYER else leaf[row])
    np.testing.assert_array_equal(stages.from_stages(jnp.asarray(spread)), leaf)
    assert not stages.shared
    assert stages.has_padding == (PADDING_LAYER in stages.order)


@pytest.mark.parametrize("holders", [(0,), (3,), (0, 3)])
def test_a_leaf_without_layers_is_one_row_on_the_stages_that_use_it(holders):
    stages = StageAssignment.on(ACROSS_SITES, 4, holders)
    leaf = jnp.arange(1.0, 7.0).reshape(2, 3)
    spread = stages.to_stages(leaf)
    assert spread.shape == (4, 2, 3)
    for stage in range(4):
        np.testing.assert_array_equal(spread[stage], leaf if stage in holders else 0)
    np.testing.assert_array_equal(stages.from_stages(spread), leaf)
    assert stages.shared == (len(holders) > 1)


def test_equal_consecutive_layers_are_the_leaf_itself():
    leaf = jnp.ones((4, 2))
    place = leaf_layouts.leaf_layout(
        leaf.shape,
        leaf.dtype,
        {},
        stacked=True,
        stages=StageAssignment(("stage",), ((0, 1), (2, 3))),
    )
    assert whole_state.matches_model(place)
    assert place.pad(leaf) is leaf
    permuted = StageAssignment(("stage",), ((0, 2), (1, 3)))
    place = leaf_layouts.leaf_layout(leaf.shape, leaf.dtype, {}, stacked=True, stages=permuted)
    assert place.padded_shape == leaf.shape
    assert not whole_state.matches_model(place)


AXES = {"dc": 2, "stage": 2, "data": 2}
PARAMETERS = {
    "embedding": {"tokens": (7, 6), "positions": (5, 6)},
    "layers": {"kernel": (5, 6, 4), "scale": (5, 3)},
    "final_norm": (6,),
}


def parameters():
    return jax.tree.map(
        lambda shape: 1 + jnp.arange(float(np.prod(shape))).reshape(shape),
        PARAMETERS,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def stage_assignments(axes, stages, of_layers):
    last = stages - 1
    layers = StageAssignment(axes, of_layers)
    return {
        "embedding": {
            "tokens": StageAssignment.on(axes, stages, {0, last}),
            "positions": StageAssignment.on(axes, stages, {0}),
        },
        "layers": {"kernel": layers, "scale": layers},
        "final_norm": StageAssignment.on(axes, stages, {last}),
    }


SPREAD = {
    "sites are stages": (AXES, ACROSS_SITES, ((4, 0), (1, -1), (3, -1), (-1, 2)), "data"),
    "a pipeline in each site": (AXES, ("stage",), ((0, 2, 4), (-1, 1, 3)), "data"),
    "tensor parts": (
        {"dc": 2, "stage": 2, "tensor": 2},
        ACROSS_SITES,
        ((0, 1), (2, -1), (3, -1), (4, -1)),
        "tensor",
    ),
    "3 shards": ({"stage": 2, "data": 3}, ("stage",), ((0, 1, 2), (3, 4, -1)), "data"),
}


def spread(name):
    axes, stage_axes, rows, cutting = SPREAD[name]
    mesh = make_mesh(devices=jax.devices()[: int(np.prod(list(axes.values())))], **axes)
    whole = parameters()
    partitions = jax.tree.map(lambda _: Partition(), whole)
    if cutting == "tensor":
        partitions["embedding"]["tokens"] = Partition({0: ("tensor",)})
        partitions["layers"]["kernel"] = Partition({1: ("tensor",)})
    held = stage_assignments(stage_axes, len(rows), rows)
    return mesh, whole, leaf_layouts.parameter_layouts(whole, mesh, partitions, stages=held)


@pytest.mark.parametrize("name", SPREAD)
def test_the_state_goes_to_the_stages_and_back(name):
    mesh, whole, layouts = spread(name)
    state = whole_state.pad(whole, layouts, mesh)
    for leaf, expected in zip(
        jax.tree.leaves(state), jax.tree.leaves(leaf_layouts.abstract(layouts, mesh)), strict=True
    ):
        assert leaf.shape == expected.shape
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)
    jax.tree.map(
        lambda leaf, place: [
            np.testing.assert_equal(shard.data.shape, place.shard_shape)
            for shard in leaf.addressable_shards
        ],
        state,
        layouts,
    )
    again = whole_state.trim(state, layouts, mesh)
    jax.tree.map(np.testing.assert_array_equal, again, whole)
    for leaf, expected in zip(
        jax.tree.leaves(again),
        jax.tree.leaves(whole_state.abstract_unpadded(layouts, mesh)),
        strict=True,
    ):
        assert leaf.shape == expected.shape
        assert leaf.sharding.is_equivalent_to(expected.sharding, leaf.ndim)


@settings(max_examples=20)
@given(rows=rows_of_stages(stages=4), width=st.integers(1, 9), data=st.integers(1, 5))
def test_padding_and_rows_are_undone_together(rows, width, data):
    stages = StageAssignment(ACROSS_SITES, rows)
    leaf = jnp.arange(1.0, width * (1 + max(stages.order)) + 1).reshape(-1, width)
    shards = {"data": data}
    place = leaf_layouts.leaf_layout(leaf.shape, leaf.dtype, shards, stacked=True, stages=stages)
    padded = place.pad(leaf)
    assert padded.shape == place.padded_shape
    assert jnp.sum(padded) == jnp.sum(leaf)
    assert place.shard_shape == (padded.shape[0] // 4, padded.shape[1] // data)
    np.testing.assert_array_equal(place.trim(padded), leaf)


def test_shapes_inside_a_stage():
    _, _, layouts = spread("tensor parts")
    tokens, kernel = layouts["embedding"]["tokens"], layouts["layers"]["kernel"]
    assert tokens.padded_shape == (4, 8, 6)
    assert tokens.spec() == PartitionSpec(ACROSS_SITES, ("tensor", "data", "expert"))
    assert tokens.model_spec() == PartitionSpec(("tensor", "data", "expert"))
    assert kernel.spec() == PartitionSpec(ACROSS_SITES, ("tensor", "data", "expert"))
    assert tokens.shard_shape == (1, 4, 6)
    assert tokens.model_shard_shape == tokens.gathered_shape == (4, 6)
    assert kernel.padded_shape == (8, 6, 4)
    assert kernel.shard_shape == kernel.model_shard_shape == (2, 3, 4)
    assert kernel.of_layer().shape == (6, 4)
    assert kernel.of_layer().stages is None


@pytest.mark.parametrize("name", SPREAD)
def test_the_norm_counts_every_number_of_the_model_once(name):
    mesh, whole, layouts = spread(name)
    specs = jax.tree.map(lambda place: place.spec(), layouts)
    norm = jax.jit(
        jax.shard_map(
            lambda shards: global_norm(shards, layouts),
            mesh=mesh,
            in_specs=(specs,),
            out_specs=PartitionSpec(),
            check_vma=True,
        )
    )
    numbers = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(whole)])
    actual = norm(whole_state.pad(whole, layouts, mesh))
    np.testing.assert_allclose(actual, np.linalg.norm(numbers), rtol=1e-6)
