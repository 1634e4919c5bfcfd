"""Modules for later tokens: loss and gradients against a plain model in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
from model_families import FAMILIES
from plain_transformer import plain_loss

from geojax.models import loss_sum
from geojax.models.multi_token_prediction import later_tokens


def test_loss_and_every_gradient_equal_the_plain_models(x64, random_parameters, packed_batch):
    config = FAMILIES["mixture"].replace(
        num_hidden_layers=1,
        num_experts=4,
        num_experts_per_tok=2,
        num_nextn_predict_layers=2,
        mtp_loss_scaling_factor=0.3,
        tie_word_embeddings=True,
    )
    parameters, batch = (
        random_parameters(config, jnp.float64),
        packed_batch(config, rows=2, sequence=10),
    )
    both = jax.jit(jax.value_and_grad(lambda p: loss_sum(p, batch, config)[0]))
    loss, gradients = both(parameters)
    plain = jax.tree.map(np.asarray, parameters)
    want = plain_loss(plain, batch, config)
    assert abs(loss - want) <= 1e-10 * abs(want)
    without = plain_loss(plain, batch, config.replace(num_nextn_predict_layers=0))
    assert want > 1.01 * without

    # Each leaf along a random direction that touches all of its elements.
    random = np.random.default_rng(1)
    leaves, structure = jax.tree.flatten(plain)
    for place, gradient in enumerate(jax.tree.leaves(gradients)):
        direction = random.standard_normal(gradient.shape)
        stepped = [*leaves[:place], leaves[place] + 1e-30j * direction, *leaves[place + 1 :]]
        slope = plain_loss(jax.tree.unflatten(structure, stepped), batch, config).imag / 1e-30
        error = abs((gradient * direction).sum() - slope)
        assert error <= 1e-10 * np.abs(gradient * direction).sum()


def test_they_predict_nothing_behind_the_end_of_a_document():
    batch = {
        "targets": np.array([[1, 2, 3, 4, 5, 6]]),
        "loss_mask": np.array([[1.0, 1, 1, 1, 0.5, 1]]),
        "segment_ids": np.array([[1, 1, 1, 2, 2, 2]]),
    }
    first, second = (later_tokens(batch, depth) for depth in (1, 2))
    np.testing.assert_array_equal(first.mask, [[1, 1, 0, 0.5, 1, 0]])
    np.testing.assert_array_equal(first.segment_ids, [[1, 1, 0, 2, 2, 0]])
    np.testing.assert_array_equal(first.tokens[0, :2], [1, 2])
    np.testing.assert_array_equal(first.targets[0, :2], [2, 3])
    np.testing.assert_array_equal(second.mask, [[1, 0, 0, 1, 0, 0]])
    np.testing.assert_array_equal(second.tokens[0, [0, 3]], [2, 5])
    np.testing.assert_array_equal(second.targets[0, [0, 3]], [3, 6])
