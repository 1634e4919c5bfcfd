"""The sum over sites as a link of an optax chain: its values, its error feedback, refusals."""

import doctest
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from jax.sharding import PartitionSpec as P

import geojax
from geojax.collectives import INT8
from geojax.errors import UserError
from geojax.optim import sync_across_sites

pytestmark = pytest.mark.usefixtures("float64")

SHAPES = {"matrix": (5, 7), "vector": (300,)}
BY_DEVICE = P(("dc", "data"))


def numbers(leading, seed):
    generator = np.random.default_rng(seed)
    return {name: generator.uniform(-1, 1, (*leading, *shape)) for name, shape in SHAPES.items()}


def of_device(tree):
    return jax.tree.map(lambda x: x[0], tree)


@pytest.mark.parametrize("sites", [2, 4])
@pytest.mark.parametrize("mean", [False, True])
def test_adamw_behind_it_is_adamw_behind_a_plain_psum(mesh_of, sites, mean):
    mesh = mesh_of(dc=sites, data=8 // sites)
    weights, gradients = numbers((), seed=0), numbers((8,), seed=1)
    adamw = optax.adamw(1e-2)
    chained = optax.chain(sync_across_sites(mean=mean, bucket_bytes=512), adamw)

    def synced(weights, gradients):
        updates, _ = chained.update(of_device(gradients), chained.init(weights), weights)
        return optax.apply_updates(weights, updates)

    def plain(weights, gradients):
        total = (lax.pmean if mean else lax.psum)(of_device(gradients), ("dc", "data"))
        updates, _ = adamw.update(total, adamw.init(weights), weights)
        return optax.apply_updates(weights, updates)

    made = [
        jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), BY_DEVICE), out_specs=P()))(
            weights, gradients
        )
        for step in (synced, plain)
    ]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), *made)


@pytest.mark.parametrize("sites", [2, 4])
def test_what_int8_takes_away_is_in_its_state(mesh_of, sites):
    """Sums over steps telescope: exact sums minus the last errors of all sites."""
    mesh = mesh_of(dc=sites, data=8 // sites)
    sync = sync_across_sites(wire=INT8)
    start = jax.jit(jax.shard_map(sync.init, mesh=mesh, in_specs=P(), out_specs=P("dc")))
    step = jax.jit(
        jax.shard_map(
            lambda gradients, state: sync.update(of_device(gradients), state),
            mesh=mesh,
            in_specs=(BY_DEVICE, P("dc")),
            out_specs=(P(), P("dc")),
        )
    )
    state = start(numbers((), seed=0))
    assert state.error_feedback["vector"].shape == (sites, 300)
    totals = jax.tree.map(np.zeros_like, numbers((), seed=0))
    exact = totals
    for seed in range(5):
        gradients = numbers((8,), seed)
        updates, state = step(gradients, state)
        totals = jax.tree.map(np.add, totals, updates)
        exact = jax.tree.map(lambda sums, own: sums + own.sum(0), exact, gradients)
    for name in SHAPES:
        owed = np.asarray(state.error_feedback[name]).sum(0)
        assert np.abs(owed).max() > 0
        np.testing.assert_allclose(totals[name] + owed, exact[name], atol=1e-12)


def test_an_nnx_state_is_summed_with_its_errors_and_updated(mesh_of):
    weights, gradients = numbers((), seed=0), numbers((8,), seed=1)
    wrapped, summands = (nnx.State(jax.tree.map(nnx.Param, tree)) for tree in (weights, gradients))
    chained = optax.chain(sync_across_sites(wire=INT8), optax.sgd(1.0))

    def step(weights, gradients):
        state = chained.init(weights)
        updates, state = chained.update(of_device(gradients), state, weights)
        return optax.apply_updates(weights, updates), state[0]

    program = jax.shard_map(
        step, mesh=mesh_of(dc=2, data=4), in_specs=(P(), BY_DEVICE), out_specs=(P(), P("dc"))
    )
    made, kept = jax.jit(program)(wrapped, summands)
    assert jax.tree.structure(made) == jax.tree.structure(wrapped)
    for name in SHAPES:
        owed = np.asarray(kept.error_feedback[name][...]).sum(0)
        exact = weights[name] - gradients[name].sum(0)
        np.testing.assert_allclose(made[name][...] - owed, exact, atol=1e-12)


def test_gradients_that_are_summed_already_are_refused(mesh_of):
    def step(weights, x):
        gradients = jax.grad(lambda own: jnp.sum(own * x))(weights)
        return sync_across_sites().update(gradients, None)[0]

    program = jax.shard_map(
        step, mesh=mesh_of(dc=2, data=4), in_specs=(P(), BY_DEVICE), out_specs=P()
    )
    with pytest.raises(UserError, match=r"the same along 'data'.*pcast\(weights, \('data', 'dc'\)"):
        jax.eval_shape(program, jnp.ones(1), jnp.arange(8.0))


def test_errors_are_made_inside_a_shard_map():
    assert sync_across_sites().init(jnp.ones(3)).error_feedback is None
    with pytest.raises(UserError, match=r"call inside a jax\.shard_map"):
        sync_across_sites(wire=INT8).init(jnp.ones(3))


def test_the_example_prints_what_it_says():
    names = {"geojax": geojax, "jax": jax, "jnp": jnp, "optax": optax, "P": P}
    module = sys.modules["geojax.optim.sync_across_sites"]
    (example,) = (
        found for found in doctest.DocTestFinder().find(module, extraglobs=names) if found.examples
    )
    doctest.DebugRunner().run(example)
