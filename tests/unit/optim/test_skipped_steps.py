"""On a step that is not finite parameters and state stay as they are, whatever the optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from geojax.optim import OPTIMIZERS, OptimizerSettings, make_optimizer
from geojax.optim.optimizer_state import apply_updates, keep_on_skipped_steps

RATE = optax.linear_schedule(1e-2, 1e-3, 5)
FOREIGN = {
    "lion": optax.lion(RATE),
    "adafactor": optax.adafactor(RATE, min_dim_size_to_factor=2),
    "sgd": optax.sgd(RATE, momentum=0.9, nesterov=True),
    "adamw": optax.adamw(RATE),
    "clipped rmsprop": optax.chain(optax.clip_by_global_norm(1.0), optax.rmsprop(RATE)),
    "noise": optax.noisy_sgd(RATE, key=jax.random.key(0)),
}
OURS = {
    "adamw with an average": make_optimizer(OptimizerSettings(ema_decay=0.9, warmup_steps=2), 10),
} | {
    name: make_optimizer(OptimizerSettings(name=name, warmup_steps=2, schedule="constant"), 10)
    for name in OPTIMIZERS
}
ALL = FOREIGN | {f"geojax {name}": optimizer for name, optimizer in OURS.items()}


def gradients_of(step):
    generator = np.random.default_rng(step)
    return {
        "kernel": jnp.asarray(generator.normal(size=(3, 4)), jnp.float32),
        "scale": jnp.asarray(generator.normal(size=4), jnp.float32),
    }


def train(optimizer, steps, wrecked=()):
    """Return the parameters and states after each step; `wrecked` ones have NaN gradients."""
    optimizer = keep_on_skipped_steps(optimizer)

    @jax.jit
    def update(parameters, state, gradients, finite):
        updates, state = optimizer.update(gradients, state, parameters, finite=finite)
        return apply_updates(parameters, updates, finite), state

    parameters = {"kernel": jnp.full((3, 4), -0.0), "scale": jnp.ones(4)}
    state, after = optimizer.init(parameters), []
    for step in steps:
        gradients = gradients_of(step)
        if step in wrecked:
            gradients = jax.tree.map(lambda leaf: leaf * jnp.nan, gradients)
        parameters, state = update(parameters, state, gradients, step not in wrecked)
        after.append((parameters, state))
    return after


def assert_same_bits(one, other):
    for pair in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        a, b = (
            jax.random.key_data(leaf) if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf
            for leaf in pair
        )
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize("name", ALL)
def test_a_skipped_step_leaves_no_trace(name):
    with_it = train(ALL[name], [0, 1, 2, 3, 4], wrecked=[2])
    assert_same_bits(with_it[2], with_it[1])
    without = train(ALL[name], [0, 1, 3, 4])
    assert_same_bits(with_it[3:], without[2:])


@pytest.mark.parametrize("name", ALL)
def test_the_first_step_may_be_skipped(name):
    after = train(ALL[name], [0, 1], wrecked=[0])
    assert_same_bits(after[1], train(ALL[name], [1])[0])


@pytest.mark.parametrize("name", FOREIGN)
def test_the_state_has_optaxs_structure(name):
    parameters = gradients_of(0)
    own = keep_on_skipped_steps(FOREIGN[name]).init(parameters)
    assert jax.tree.structure(own) == jax.tree.structure(FOREIGN[name].init(parameters))
