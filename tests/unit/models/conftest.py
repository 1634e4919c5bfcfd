"""Random parameters, batches of packed documents, and float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from model_families import FAMILIES
from support.small_models import drawn_parameters


@pytest.fixture(params=list(FAMILIES))
def config(request):
    return FAMILIES[request.param]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


@functools.cache
def _initial_parameters(config, dtype, seed):
    return jax.device_get(drawn_parameters(config, dtype, seed))


@pytest.fixture
def random_parameters():
    """A function of config and dtype: parameters far from their initial values, biases included."""

    def draw(config, dtype, seed=0):
        initial = _initial_parameters(config, dtype, seed)
        random = np.random.default_rng(seed)
        return jax.tree.map(
            lambda leaf: jnp.asarray(leaf + 0.2 * random.standard_normal(leaf.shape), dtype),
            initial,
        )

    return draw


@pytest.fixture
def packed_batch():
    """A function of config: rows of several documents, with padding and uneven masks."""

    def make(config, rows=3, sequence=13, seed=0):
        random = np.random.default_rng(seed)
        tokens = random.integers(0, config.vocab_size, (rows, sequence + 1))
        segments = np.ones((rows, sequence), int)
        segments[0, 4:], segments[0, 9:] = 2, 3
        segments[1, 7:] = 2
        segments[-1, sequence - 3 :] = 0
        positions = np.zeros_like(segments)
        for row, column in np.ndindex(rows, sequence):
            continues = column > 0 and segments[row, column] == segments[row, column - 1]
            positions[row, column] = positions[row, column - 1] + 1 if continues else 0
        mask = (segments > 0) * (random.random((rows, sequence)) < 0.8)
        return {
            "tokens": tokens[:, :-1].astype(np.int32),
            "targets": tokens[:, 1:].astype(np.int32),
            "loss_mask": mask.astype(np.float32),
            "segment_ids": segments.astype(np.int32),
            "positions": positions.astype(np.int32),
            "row": (10 + np.arange(rows)).astype(np.int32),
        }

    return make
