"""Messages of numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.collectives import BFLOAT16, FLOAT32, INT8, wire_format

BLOCK = 256


def there_and_back(wire, x):
    def both(x):
        message = wire.encode(x)
        return message, wire.decode(message, x.shape[-1], x.dtype)

    message, back = jax.jit(both)(x)
    assert jnp.issubdtype(message.dtype, jnp.integer), "nothing widens or rounds integers"
    assert message.nbytes == x.size // x.shape[-1] * wire.message_bytes(x.shape[-1])
    return np.asarray(back)


@pytest.mark.parametrize("count", [1, 256, 1000])
def test_a_block_is_wrong_by_half_a_step_at_most(count):
    x = np.random.default_rng(0).normal(size=(3, count)).astype(np.float32)
    x[:, :BLOCK] *= 1000  # the other blocks do not suffer from it
    back = there_and_back(INT8, x)
    assert back.dtype == x.dtype
    for start in range(0, count, BLOCK):
        own, block = back[:, start : start + BLOCK], x[:, start : start + BLOCK]
        largest = np.abs(block).max(axis=1, keepdims=True)
        assert (np.abs(own - block) <= largest / 127 / 2 * (1 + 1e-5)).all()
        held = np.abs(block) == largest
        np.testing.assert_allclose(own[held], block[held], rtol=1e-6)


def test_an_int8_message_has_a_scale_for_each_block():
    assert [INT8.message_bytes(count) for count in (1, 256, 257, 1024)] == [5, 260, 265, 1040]


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
def test_what_is_not_finite_stays_so_and_takes_its_block_along(bad):
    x = np.ones((1, 3 * BLOCK), np.float32)
    x[0, BLOCK] = bad
    back = there_and_back(INT8, x)
    assert np.isnan(back[0, BLOCK : 2 * BLOCK]).all()
    assert (np.delete(back[0], np.s_[BLOCK : 2 * BLOCK]) == 1).all()
    np.testing.assert_array_equal(there_and_back(BFLOAT16, x), x)


@pytest.mark.parametrize("size", [0.0, 1e-44, 1e-37])
def test_blocks_of_next_to_nothing_are_zero(size):
    x = np.full((1, BLOCK), size, np.float32)
    assert not there_and_back(INT8, x).any()


def test_float32_is_as_it_was_and_rounds_what_is_wider():
    x = np.random.default_rng(0).normal(size=(2, 100))
    message = FLOAT32.encode(jax.numpy.asarray(x, np.float32))
    assert message.dtype == np.float32
    assert message.nbytes == 2 * FLOAT32.message_bytes(100)
    np.testing.assert_array_equal(FLOAT32.decode(message, 100, np.float32), x.astype(np.float32))
    assert not FLOAT32.needs_error_feedback


def test_bfloat16_rounds_to_nearest():
    x = np.random.default_rng(0).normal(size=(2, 100)).astype(np.float32)
    np.testing.assert_array_equal(
        there_and_back(BFLOAT16, x), x.astype(jnp.bfloat16).astype(np.float32)
    )


def test_formats_have_names():
    assert wire_format("none") is None
    assert (wire_format("bf16"), wire_format("int8")) == (BFLOAT16, INT8)
