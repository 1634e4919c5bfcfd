"""Collectives that the data of a program do not order."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from geojax.collectives import after
from geojax.collectives.axes import varying_axes
from geojax.collectives.order import together_backwards


def test_a_leaf_keeps_its_type_and_value_and_waits_for_the_token(mesh_of):
    mesh = mesh_of(data=4, tensor=2)

    def own(x, token):
        ordered = after({"x": x}, token)["x"]
        assert varying_axes(ordered) == {"data"}
        return ordered

    def program(x, token):
        specs = (P("data"), P("tensor"))
        return jax.shard_map(own, mesh=mesh, in_specs=specs, out_specs=P("data"))(x, token)

    x = np.random.default_rng(0).normal(size=8).astype(np.float32)
    run = jax.jit(program)
    np.testing.assert_array_equal(run(x, jnp.ones(4)), x)
    np.testing.assert_array_equal(run(x, jnp.full(4, jnp.nan)), x)


@pytest.mark.parametrize(("platform", "waits"), [("cpu", True), ("cuda", False)])
def test_only_a_program_for_cpus_is_changed(platform, waits):
    traced = jax.jit(lambda x, token: lax.neg(after(x, token))).trace(jnp.ones(3), jnp.ones(3))
    written = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("select" in written) == waits


def scaled(x, weight):
    x, weight = together_backwards((x, weight))
    return jnp.sum(x * jnp.sin(weight))


@pytest.mark.parametrize(("platform", "waits"), [("cpu", False), ("cuda", True)])
def test_on_gpus_gradients_wait_for_each_other(platform, waits):
    traced = jax.jit(jax.grad(scaled, argnums=(0, 1))).trace(jnp.ones(3), jnp.ones(3))
    written = traced.lower(lowering_platforms=(platform,)).as_text()
    assert ("optimization_barrier" in written) == waits
    forward = jax.jit(scaled).trace(jnp.ones(3), jnp.ones(3))
    assert "optimization_barrier" not in forward.lower(lowering_platforms=(platform,)).as_text()


def test_gradients_that_wait_are_the_same():
    x, weight = jnp.arange(3.0), jnp.ones(3)
    made = jax.grad(scaled, argnums=(0, 1))(x, weight)
    np.testing.assert_array_equal(made[0], jnp.sin(weight))
    np.testing.assert_array_equal(made[1], x * jnp.cos(weight))
