"""Buckets between sites: lossless as they are, and with error feedback in a wire format."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.islands import data_islands, shares, site_plans, step_all
from support.small_models import make_batch, model_of

from geojax import make_mesh
from geojax.collectives import BFLOAT16, INT8
from geojax.islands.programs.buckets import add, encode
from geojax.precision import policy
from geojax.sharding import LeafLayout

SHAPES = {"layers": (3, 20, 19), "table": (7, 41)}
LAYOUTS = {name: LeafLayout(shape, jnp.dtype("float32")) for name, shape in SHAPES.items()}


def drawn(seed):
    generator = np.random.default_rng(seed)
    return {name: generator.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def in_shard_map(function, *arguments):
    mesh = make_mesh(devices=jax.devices()[:1])
    specs = {"mesh": mesh, "in_specs": PartitionSpec(), "out_specs": PartitionSpec()}
    return jax.jit(jax.shard_map(function, **specs))(*arguments)


@pytest.mark.parametrize("wire", [None, BFLOAT16, INT8], ids=str)
def test_total_and_errors_make_the_exact_sum(wire):
    own = [drawn(seed) for seed in range(3)]
    errors = jax.tree.map(lambda leaf: leaf[:, None] * 0, own[0])
    made = [in_shard_map(functools.partial(encode, wire=wire), each, errors) for each in own]
    parts = [each.messages for each in made]
    total = in_shard_map(lambda *parts: add(parts, LAYOUTS, wire, jnp.float32), *parts)
    for name in SHAPES:
        exact = sum(each[name] for each in own)
        if wire is not None:
            exact -= sum(np.asarray(each.error_feedback[name])[:, 0] for each in made)
            assert not np.array_equal(total[name], sum(each[name] for each in own))
        np.testing.assert_allclose(total[name], exact, rtol=1e-6, atol=1e-6)


def test_blocks_of_a_layer_do_not_depend_on_the_layers_of_its_bucket():
    whole = {"layers": drawn(0)["layers"]}
    encoded = in_shard_map(lambda tree: encode(tree, None, INT8).messages, whole)
    for layer in range(3):
        one = {"layers": whole["layers"][layer : layer + 1]}
        alone = in_shard_map(lambda tree: encode(tree, None, INT8).messages, one)
        np.testing.assert_array_equal(alone["layers"][0], encoded["layers"][layer])


def test_sites_that_send_int8_stay_equal_to_the_bit():
    model = model_of("llama")
    plans = site_plans(2, {"data": 2}, policy("fp32"), wire_format=INT8)
    islands = data_islands(model, plans, chunks=2, held=1)
    batches = shares(make_batch(model), 2)
    losses = [step_all(islands, batches)[0]["loss"] for _ in range(4)]
    assert losses[-1] < losses[0]
    first, second = (island.whole() for island in islands)
    jax.tree.map(np.testing.assert_array_equal, first.parameters, second.parameters)
    own, others = (jax.tree.leaves(state.error_feedback) for state in (first, second))
    assert all(np.abs(leaf).max() > 0 for leaf in own)
    assert not any(map(np.array_equal, own, others))
