"""A model of one's own in a pipeline has the gradients of one device, with every schedule."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import geojax
from geojax import make_mesh
from geojax.errors import UserError
from geojax.pipeline import SCHEDULES, facade
from geojax.pipeline.facade import Pipeline

MICROBATCHES, LAYERS, WIDTH = 4, 8, 3
WEIGHTS = (
    np.random.default_rng(0).normal(size=(WIDTH,)),
    np.random.default_rng(1).normal(size=(LAYERS, WIDTH, WIDTH)),
    np.random.default_rng(2).normal(size=(WIDTH,)),
)
BATCH = np.random.default_rng(3).normal(size=(MICROBATCHES, 4, WIDTH))
FUNCTIONS = {
    "embed": lambda weights, batch: batch * weights,
    "layer": lambda weights, x: x + jnp.tanh(x @ weights),
    "head": lambda weights, x, batch: jnp.sum(jnp.sin(x * weights) * batch),
}


def on_one_device(weights):
    embed, layers, head = weights
    x = FUNCTIONS["embed"](embed, BATCH)
    for number in range(LAYERS):
        x = FUNCTIONS["layer"](layers[number], x)
    return FUNCTIONS["head"](head, x, BATCH)


def on_pipeline(spec, weights=WEIGHTS, **options):
    mesh = make_mesh(dc=2, stage=2, data=2)
    pipeline = Pipeline(mesh, microbatches=MICROBATCHES, **FUNCTIONS | options)
    program = jax.shard_map(
        pipeline.loss_and_gradients,
        mesh=mesh,
        in_specs=(pipeline.weights_spec, spec),
        out_specs=(jax.P(), pipeline.weights_spec),
    )
    loss, gradients = jax.jit(program)(pipeline.shard(*weights), BATCH)
    return loss, pipeline.unshard(gradients)


def assert_same(made, expected):
    for own, other in zip(jax.tree.leaves(made), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("schedule", ["branch_free", "1f1b", "interleaved", "zbv"])
def test_through_sites(schedule):
    with jax.enable_x64(True):
        virtual_stages = SCHEDULES[schedule].virtual_stages or 2
        options = {"virtual_stages": virtual_stages, "hop_ticks": 2, "sum_dtype": np.float64}
        made = on_pipeline(jax.P(None, "data"), schedule=schedule, **options)
        assert_same(made, jax.value_and_grad(on_one_device)(WEIGHTS))


def test_weights_are_any_tree():
    """An `nnx.State`, `nnx.Param` leaves and None."""
    embed, layers, head = WEIGHTS
    wrapped = (
        nnx.State({"scale": nnx.Param(embed)}),
        {"kernel": nnx.Param(layers), "bias": None},
        (nnx.Param(head),),
    )
    functions = {
        "embed": lambda weights, batch: FUNCTIONS["embed"](weights["scale"][...], batch),
        "layer": lambda weights, x: FUNCTIONS["layer"](weights["kernel"][...], x),
        "head": lambda weights, x, batch: FUNCTIONS["head"](weights[0][...], x, batch),
    }
    with jax.enable_x64(True):
        made = on_pipeline(jax.P(None, "data"), wrapped, sum_dtype=np.float64, **functions)
        assert jax.tree.structure(made[1]) == jax.tree.structure(wrapped)
        assert_same(made, jax.value_and_grad(on_one_device)(WEIGHTS))


def test_a_pipeline_in_each_site_sums_over_sites():
    with jax.enable_x64(True):
        options = {"axes": ("stage",), "sum_dtype": np.float64}
        made = on_pipeline(jax.P(None, ("dc", "data")), **options)
        assert_same(made, jax.value_and_grad(on_one_device)(WEIGHTS))


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_weights_come_back_as_they_went(schedule):
    pipeline = Pipeline(
        make_mesh(dc=2, stage=2, data=2), **FUNCTIONS, microbatches=4, schedule=schedule
    )
    assert_same(pipeline.unshard(pipeline.shard(*WEIGHTS)), jax.tree.map(np.float32, WEIGHTS))


def test_layers_must_divide():
    pipeline = Pipeline(make_mesh(dc=2, stage=2, data=2), **FUNCTIONS, microbatches=4)
    with pytest.raises(UserError, match="6 layers do not divide into 4 chunks; 8 layers would"):
        pipeline.shard(WEIGHTS[0], WEIGHTS[1][:6], WEIGHTS[2])


def test_the_example_of_its_docstring(monkeypatch):
    monkeypatch.setattr(geojax, "Pipeline", Pipeline, raising=False)
    names = {"geojax": geojax, "jax": jax, "jnp": jnp}
    (example,) = (
        found for found in doctest.DocTestFinder().find(facade, extraglobs=names) if found.examples
    )
    doctest.DebugRunner().run(example)
