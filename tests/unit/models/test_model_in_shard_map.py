"""The model inside a shard_map that is manual over all six axes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec
from model_families import FAMILIES

import geojax
from geojax.models import loss_sum

_ROWS = PartitionSpec(("dc", "data"))


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
