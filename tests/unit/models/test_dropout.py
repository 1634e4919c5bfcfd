"""Dropout: rate, independence, and equal masks on every layout."""

import jax
import jax.numpy as jnp
import numpy as np
from model_families import FAMILIES

from geojax.models import loss_sum
from geojax.models.layers import dropout

_RATE = 0.3


def _mask(key, rows=(0, 1, 2, 3), columns=range(64), hidden=128):
    ones = jnp.ones((len(rows), len(columns), hidden))
    return np.asarray(dropout(ones, key, jnp.asarray(rows, jnp.int32), jnp.asarray(columns), _RATE))


def test_drops_the_rate_and_keeps_the_mean():
    mask = _mask(jax.random.key(0))
    np.testing.assert_allclose(np.unique(mask), [0, 1 / (1 - _RATE)], rtol=1e-6)
    noise = np.sqrt(_RATE * (1 - _RATE) / mask.size)
    assert abs((mask == 0).mean() - _RATE) < 4 * noise
    # No row, position or element is favored: each mean is as noisy as its count makes it.
    for dims in ((1, 2), (0, 2), (0, 1)):
        means = (mask == 0).mean(dims)
        spread = np.sqrt(_RATE * (1 - _RATE) * means.size / mask.size)
        assert np.abs(means - _RATE).max() < 5 * spread
        if means.size > 8:
            assert 0.7 < means.std() / spread < 1.3


def test_masks_of_different_places_are_independent():
    keys = jax.random.split(jax.random.key(0))
    first, second = (_mask(key) - 1 for key in keys)
    variance, noise = _RATE / (1 - _RATE), 1 / np.sqrt(first.size)
    pairs = [
        (first, second),
        (first[:-1], first[1:]),  # neighboring rows, positions, elements
        (first[:, :-1], first[:, 1:]),
        (first[..., :-1], first[..., 1:]),
        (first[:, ::2], first[:, 1::2]),
    ]
    for left, right in pairs:
        assert abs((left * right).mean() / variance) < 5 * np.sqrt(2) * noise


def test_a_row_keeps_its_mask_wherever_it_is():
    key = jax.random.key(5)
    rows = (7, 3, 12)
    whole = _mask(key, range(16))
    np.testing.assert_array_equal(_mask(key, rows), whole[list(rows)])


def test_a_column_keeps_its_mask_wherever_it_is():
    key = jax.random.key(5)
    columns = (7, 3, 12)
    np.testing.assert_array_equal(_mask(key, columns=columns), _mask(key)[:, list(columns)])


def test_nothing_is_drawn_without_a_key_or_a_rate():
    x, rows, columns = jnp.ones((2, 3, 4)), jnp.arange(2), jnp.arange(3)
    assert dropout(x, None, rows, columns, 0.5) is x
    assert dropout(x, jax.random.key(0), rows, columns, 0.0) is x


def test_the_models_dropout_is_seen_by_loss_and_reproducible(random_parameters, packed_batch):
    config = FAMILIES["gpt3"].model_copy(update={"dropout": 0.2})
    parameters, batch = random_parameters(config, jnp.float32), packed_batch(config)

    @jax.jit
    def losses(key, batch=batch):
        return loss_sum(parameters, batch, config, dropout_key=key)[0]

    assert losses(jax.random.key(0)) == losses(jax.random.key(0))
    assert losses(jax.random.key(0)) != losses(jax.random.key(1))
    without = jax.jit(lambda p: loss_sum(p, batch, FAMILIES["gpt3"])[0])(parameters)
    assert losses(None) == without
    # Rows in another order lose the same.
    order = np.array([2, 0, 1])
    shuffled = jax.tree.map(lambda leaf: leaf[order], batch)
    np.testing.assert_allclose(
        losses(jax.random.key(0)), losses(jax.random.key(0), shuffled), rtol=1e-6
    )


def test_every_layer_and_branch_draws_its_own_mask(x64, random_parameters, packed_batch):
    # With all branches switched off but one, the loss tells which mask was applied to it.
    config = FAMILIES["gpt3"].model_copy(update={"dropout": 0.5})
    batch = packed_batch(config)
    loss = jax.jit(lambda p: loss_sum(p, batch, config, dropout_key=jax.random.key(0))[0])
    seen = set()
    for block, output in (("attention", "output"), ("feed_forward", "down")):
        for index in range(config.num_hidden_layers):
            parameters = random_parameters(config, jnp.float64)
            for name, last in (("attention", "output"), ("feed_forward", "down")):
                branch = parameters["layers"][name][last]
                branch["kernel"] = jnp.zeros_like(branch["kernel"])
                only = jnp.zeros_like(branch["bias"])
                if (name, last) == (block, output):
                    only = only.at[index].set(1 + jnp.arange(config.hidden_size) / 7)
                branch["bias"] = only
            seen.add(float(loss(parameters)))
    assert len(seen) == 2 * config.num_hidden_layers
