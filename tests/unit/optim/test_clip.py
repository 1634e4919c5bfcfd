import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from geojax import make_mesh
from geojax.optim import clip_by_global_norm, global_norm
from geojax.sharding import SHARD_AXES


@pytest.mark.parametrize("max_norm", [0.5, 1e3])
def test_shards_are_clipped_by_the_norm_of_the_whole_gradient(max_norm):
    mesh = make_mesh(dc=2, data=2, expert=2)
    generator = np.random.default_rng(0)
    gradients = {"a": generator.normal(size=(8, 3)), "b": generator.normal(size=(4,))}
    gradients = jax.tree.map(jnp.float32, gradients)
    spec = PartitionSpec(SHARD_AXES)
    clip = clip_by_global_norm(max_norm)

    def local(shards):
        clipped, _ = clip.update(shards, clip.init(shards))
        return clipped, global_norm(shards)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=(spec, PartitionSpec())))
    clipped, norm = run(gradients)
    np.testing.assert_allclose(norm, optax.tree.norm(gradients), rtol=1e-6)
    whole = optax.clip_by_global_norm(max_norm)
    expected, _ = whole.update(gradients, whole.init(gradients))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), clipped, expected)
    if max_norm > norm:
        jax.tree.map(np.testing.assert_array_equal, clipped, gradients)


def test_a_norm_known_already_is_not_reduced_again():
    mesh = make_mesh(data=8)
    clip = clip_by_global_norm(1.0)
    spec = PartitionSpec(SHARD_AXES)

    def local(shards):
        norm = global_norm(shards)
        return clip.update(shards, clip.init(shards), norm=norm)[0]

    run = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=spec)
    jaxpr = str(jax.make_jaxpr(run)(jnp.ones(8)))
    assert jaxpr.count("psum") == 1
