import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from support.xla_flags import AS_IN_A_RUN

from geojax.optim.algorithms.adam import scale_by_adam
from geojax.optim.optimizer_state import keep_on_skipped_steps

NUMBERS = (0.9, 0.95, 1e-8)


def gradients_of(step):
    generator = np.random.default_rng(step)
    return {"kernel": generator.normal(size=(3, 4)), "scale": generator.normal(size=4)}


def steps(optimizer, count, **extra):
    state = optimizer.init(gradients_of(0))
    for step in range(count):
        updates, state = optimizer.update(gradients_of(step), state, **extra)
    return updates, state


def test_it_is_adam():
    with jax.enable_x64():
        ours, theirs = steps(scale_by_adam(*NUMBERS), 5), steps(optax.scale_by_adam(*NUMBERS), 5)
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    for own, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(own, other, rtol=1e-14)


def test_bf16_moments_are_rounded_once_a_step_and_computed_in_full():
    ours, state = steps(scale_by_adam(*NUMBERS, moment_dtype=jnp.bfloat16), 5)
    mean = square = jnp.zeros((3, 4))
    for step in range(5):
        gradient = jnp.asarray(gradients_of(step)["kernel"], jnp.float32)
        mean = (0.9 * mean.astype(jnp.float32) + 0.1 * gradient).astype(jnp.bfloat16)
        square = 0.95 * square.astype(jnp.float32) + 0.05 * gradient**2
        square = square.astype(jnp.bfloat16)
    assert {leaf.dtype for leaf in jax.tree.leaves((state.mu, state.nu))} == {
        jnp.dtype(jnp.bfloat16)
    }
    np.testing.assert_array_equal(state.mu["kernel"], mean)
    np.testing.assert_array_equal(state.nu["kernel"], square)
    root = np.sqrt(square.astype(np.float32) / (1 - 0.95**5))
    direction = mean.astype(np.float32) / (1 - 0.9**5) / (root + 1e-8)
    np.testing.assert_allclose(ours["kernel"], direction, rtol=1e-5)


def test_the_state_stays_where_the_gradient_is_not_finite():
    optimizer = scale_by_adam(*NUMBERS)
    _, state = steps(optimizer, 2)
    bad = jax.tree.map(lambda leaf: leaf * jnp.nan, gradients_of(3))
    _, after = optimizer.update(bad, state, finite=False)
    jax.tree.map(np.testing.assert_array_equal, after, state)


IN_PLACE = {
    "ours": (scale_by_adam(*NUMBERS), True),
    "ours, in bf16": (scale_by_adam(*NUMBERS, moment_dtype=jnp.bfloat16), True),
    "optax's": (optax.scale_by_adam(*NUMBERS), False),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_weights_and_moments_are_updated_where_they_lie(name):
    """No second copy of anything: the only temporary bytes are a few scalars. Optax's has two."""
    optimizer, in_place = IN_PLACE[name]
    optimizer = keep_on_skipped_steps(optimizer)
    weights = {"kernel": jnp.zeros((256, 512)), "scale": jnp.zeros(512)}

    def update(weights, state, gradients, finite):
        directions, state = optimizer.update(gradients, state, finite=finite)
        return jax.tree.map(lambda leaf, step: leaf - 1e-3 * step, weights, directions), state

    state = jax.eval_shape(optimizer.init, weights)
    lowered = jax.jit(update, donate_argnums=(0, 1)).lower(weights, state, weights, True)
    step = lowered.compile(compiler_options=AS_IN_A_RUN)
    copies = step.memory_analysis().temp_size_in_bytes / (4 * (256 + 1) * 512)
    assert copies < 0.01 if in_place else copies >= 2
