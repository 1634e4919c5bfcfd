import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from geojax import make_mesh
from geojax.collectives import all_gather, reduce_scatter
from geojax.errors import UserError


def gradient_shards(cast_first):
    """The gradient of a sum over 8 rows, through weights that do or do not vary over dc."""
    mesh = make_mesh(dc=2, data=4)

    def local(shard, rows):
        weights = all_gather(shard, "data", dims=0, shapes=(8,))
        if cast_first:
            weights = jax.lax.pcast(weights, "dc", to="varying")
        gradient = jax.grad(lambda weights: jnp.sum(rows @ weights))(weights)
        return reduce_scatter(gradient, "data", "dc", dims=0)

    spec = PartitionSpec("data")
    run = jax.shard_map(
        local, mesh=mesh, in_specs=(spec, PartitionSpec(("dc", "data"))), out_specs=spec
    )
    return jax.jit(run)(jnp.ones(8), jnp.arange(64.0).reshape(8, 8))


def test_weights_cast_to_varying_give_each_rank_its_own_gradient():
    np.testing.assert_allclose(gradient_shards(True), jnp.arange(64.0).reshape(8, 8).sum(axis=0))


def test_a_gradient_that_was_summed_over_the_sites_already_is_refused():
    with pytest.raises(UserError, match=r"not along dc.*pcast\(weights, \('dc',\), to='varying'\)"):
        gradient_shards(False)
