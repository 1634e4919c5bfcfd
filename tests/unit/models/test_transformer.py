"""Logits, losses and gradients against an independent model in numpy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_families import FAMILIES
from plain_transformer import plain_logits, plain_loss

from geojax.errors import UserError
from geojax.models import logits, loss_sum


def _numpy(tree):
    return jax.tree.map(np.asarray, tree)


def _value_and_gradients(parameters, batch, config, remat="none"):
    differentiated = jax.value_and_grad(
        lambda p: loss_sum(p, batch, config, remat=remat), has_aux=True
    )
    return jax.jit(differentiated)(parameters)


def test_logits_equal_the_plain_model(config, x64, random_parameters, packed_batch):
    parameters, batch = random_parameters(config, jnp.float64), packed_batch(config)
    got = jax.jit(lambda p: logits(p, batch, config))(parameters)
    want = plain_logits(_numpy(parameters), batch, config)
    assert got.dtype == jnp.float64
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-10 * np.abs(want).max())


@pytest.mark.parametrize("remat", ["none", "selective", "full"])
def test_loss_and_every_gradient_equal_the_plain_models(
    config, remat, x64, random_parameters, packed_batch
):
    parameters, batch = random_parameters(config, jnp.float64), packed_batch(config)
    (loss, count), gradients = _value_and_gradients(parameters, batch, config, remat)
    plain = _numpy(parameters)
    want = plain_loss(plain, batch, config)
    assert loss.dtype == jnp.float64
    assert abs(loss - want) <= 1e-10 * abs(want)
    assert count == batch["loss_mask"].sum()

    # Each leaf along a random direction that touches all of its elements.
    random = np.random.default_rng(1)
    leaves, structure = jax.tree.flatten(plain)
    for place, leaf in enumerate(leaves):
        direction = random.standard_normal(leaf.shape)
        stepped = [*leaves[:place], leaf + 1e-30j * direction, *leaves[place + 1 :]]
        slope = plain_loss(jax.tree.unflatten(structure, stepped), batch, config).imag / 1e-30
        gradient = np.asarray(jax.tree.leaves(gradients)[place])
        error = abs((gradient * direction).sum() - slope)
        # The gradient of a key's bias is 0: softmax does not see what all scores share.
        assert error <= 1e-10 * max(np.abs(gradient * direction).sum(), 1e-4 * want)


def test_a_segment_does_not_see_its_neighbors(config, x64, random_parameters, packed_batch):
    parameters, batch = random_parameters(config, jnp.float64), packed_batch(config)
    other = {**batch, "tokens": batch["tokens"].copy()}
    other["tokens"][0, :4] = (other["tokens"][0, :4] + 1) % config.vocab_size
    read = jax.jit(lambda batch: logits(parameters, batch, config))
    before, after = read(batch), read(other)
    np.testing.assert_array_equal(before[0, 4:], after[0, 4:])
    assert np.abs(before[0, :4] - after[0, :4]).max() > 1e-3


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_narrow_parameters_compute_narrow_and_sum_wide(
    config, dtype, random_parameters, packed_batch
):
    parameters, batch = random_parameters(config, jnp.float32), packed_batch(config)
    narrow = jax.tree.map(lambda leaf: leaf.astype(dtype), parameters)
    (loss, _), gradients = _value_and_gradients(narrow, batch, config)
    widened = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), narrow)
    want = plain_loss(widened, batch, config)
    assert loss.dtype == jnp.float32
    assert abs(loss - want) <= 4 * jnp.finfo(dtype).eps * abs(want)
    assert all(leaf.dtype == dtype for leaf in jax.tree.leaves(gradients))


def test_no_tokens_that_count_give_zero_and_finite_gradients(random_parameters, packed_batch):
    config = FAMILIES["llama"]
    batch = packed_batch(config)
    batch["loss_mask"] = np.zeros_like(batch["loss_mask"])
    parameters = random_parameters(config, jnp.float32)
    (loss, count), gradients = _value_and_gradients(parameters, batch, config)
    assert loss == 0
    assert count == 0
    assert all((leaf == 0).all() for leaf in jax.tree.leaves(gradients))


def test_remat_keeps_less(random_parameters, packed_batch):
    config = FAMILIES["llama"].model_copy(update={"num_hidden_layers": 8, "intermediate_size": 512})
    parameters = random_parameters(config, jnp.float32)
    batch = packed_batch(config, rows=4, sequence=128)

    def temporaries(remat):
        step = jax.jit(jax.grad(lambda p: loss_sum(p, batch, config, remat=remat)[0]))
        return step.lower(parameters).compile().memory_analysis().temp_size_in_bytes

    none, selective, full = map(temporaries, ("none", "selective", "full"))
    assert full < selective < none
    assert full < none / 2


def test_refusals(random_parameters, packed_batch):
    config = FAMILIES["gpt3"]
    parameters = random_parameters(config, jnp.float32)
    with pytest.raises(UserError, match="17 tokens is longer than the model's 16 learned"):
        loss_sum(parameters, packed_batch(config, sequence=17), config)
    with pytest.raises(UserError, match="remat 'some' is unknown; it can be none, selective or"):
        loss_sum(parameters, packed_batch(config), config, remat="some")
