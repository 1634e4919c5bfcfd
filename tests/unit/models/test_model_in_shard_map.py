"""The model inside a shard_map that is manual over all six axes, and in its Linen shell."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from model_families import FAMILIES

import geojax
from geojax.models import Transformer, init_parameters, logits, loss_sum

_ROWS = PartitionSpec(("dc", "data"))


def _step(config, remat="none", key=None, vary_first=False):
    """Loss and gradients, summed over the two axes that hold the rows."""

    def step(parameters, batch):
        if vary_first:
            parameters = jax.tree.map(
                lambda leaf: jax.lax.pcast(leaf, ("dc", "data"), to="varying"), parameters
            )

        def loss(parameters):
            return loss_sum(parameters, batch, config, remat=remat, dropout_key=key)

        (total, count), gradients = jax.value_and_grad(loss, has_aux=True)(parameters)
        if vary_first:
            gradients = jax.lax.psum(gradients, ("dc", "data"))
        return jax.lax.psum((total, count), ("dc", "data")), gradients

    return step


@pytest.mark.parametrize(
    ("remat", "vary_first"),
    [("none", False), ("none", True), ("selective", True), ("full", False)],
)
def test_eight_devices_equal_one(config, remat, vary_first, x64, random_parameters, packed_batch):
    # With dropout: the masks must be the same on both layouts too.
    config = config.model_copy(update={"dropout": 0.1})
    parameters = random_parameters(config, jnp.float64)
    batch = packed_batch(config, rows=8)
    key = jax.random.key(7)

    def alone(parameters):
        return loss_sum(parameters, batch, config, dropout_key=key)

    want = jax.jit(jax.value_and_grad(alone, has_aux=True))(parameters)
    got = jax.jit(
        jax.shard_map(
            _step(config, remat, key, vary_first),
            mesh=geojax.make_mesh(dc=2, data=4),
            in_specs=(PartitionSpec(), _ROWS),
            out_specs=PartitionSpec(),
        )
    )(parameters, batch)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert np.abs(mine - theirs).max() <= 1e-10 * max(np.abs(theirs).max(), 1e-3)


def test_layers_may_vary_over_an_axis_that_the_batch_does_not(x64, random_parameters, packed_batch):
    config = FAMILIES["llama"]
    parameters, batch = random_parameters(config, jnp.float64), packed_batch(config)
    layers = jax.tree.map(lambda leaf: jnp.stack([leaf, leaf]), parameters["layers"])

    def loss(rest, layers):
        own = jax.tree.map(lambda leaf: leaf[0], layers)
        total = loss_sum({**rest, "layers": own}, batch, config)[0]
        return jax.lax.pmean(total, "stage")

    rest = {name: tree for name, tree in parameters.items() if name != "layers"}
    mesh = geojax.make_mesh(stage=2, data=4)
    sharded = jax.shard_map(
        loss, mesh=mesh, in_specs=(PartitionSpec(), PartitionSpec("stage")),
        out_specs=PartitionSpec(),
    )  # fmt: skip
    want = loss_sum(parameters, batch, config)[0]
    np.testing.assert_allclose(jax.jit(sharded)(rest, layers), want, rtol=1e-12)


def test_the_linen_shell_is_the_same_model(config, packed_batch):
    batch, model = packed_batch(config), Transformer(config)
    variables = model.init(jax.random.key(4), batch)
    parameters = init_parameters(config, jax.random.key(4))
    assert set(variables) == {"params"}
    jax.tree.map(np.testing.assert_array_equal, variables["params"], parameters)
    np.testing.assert_array_equal(
        jax.jit(model.apply)(variables, batch),
        jax.jit(lambda p: logits(p, batch, config))(parameters),
    )
    sums = model.apply(variables, batch, method="loss_sum")
    np.testing.assert_array_equal(sums, loss_sum(parameters, batch, config))
