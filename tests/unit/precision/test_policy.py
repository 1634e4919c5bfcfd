import jax.numpy as jnp
import pytest

from geojax.errors import UserError
from geojax.precision import policy


def test_policies():
    mixed = policy("bf16")
    assert (mixed.compute_dtype, mixed.master_dtype) == (jnp.bfloat16, jnp.float32)
    assert mixed.reduce_dtype == jnp.float32
    half = policy("fp16")
    assert (half.compute_dtype, half.master_dtype) == (jnp.float16, jnp.float32)
    assert half.reduce_dtype == jnp.float32
    assert half.scales_loss
    assert not mixed.scales_loss
    for name, dtype in (("fp32", jnp.float32), ("fp64", jnp.float64)):
        plain = policy(name)
        assert (plain.compute_dtype, plain.master_dtype, plain.reduce_dtype) == (dtype,) * 3


def test_unknown_policy_names_the_nearest():
    with pytest.raises(UserError, match="no precision policy is called 'fp23'; did you mean"):
        policy("fp23")
