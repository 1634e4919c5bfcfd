"""Tensor and sequence parallelism: the same numbers, and no byte that the formula does not name."""

import jax
import jax.numpy as jnp
import pytest
from model_families import FAMILIES
from spread_model import assert_close, mesh_of, spread, spread_step

from geojax.models import loss_sum
from geojax.models.parallelism import Parallelism

_KEY = jax.random.PRNGKey(7)


def _wide(family):
    """Eight heads, so that eight ranks can share them; with dropout."""
    return FAMILIES[family].model_copy(update={"heads": 8, "dropout": 0.1})


@pytest.fixture(scope="module")
def alone():
    """A function of config, parameters and batch: sums and gradients on one device, kept."""
    kept = {}

    def compute(family, parameters, batch):
        if family not in kept:
            config = _wide(family)

            def loss(parameters):
                return loss_sum(parameters, batch, config, dropout_key=_KEY)

            kept[family] = jax.jit(jax.value_and_grad(loss, has_aux=True))(parameters)
        return kept[family]

    return compute


@pytest.mark.parametrize("sequence", [False, True], ids=["whole", "sequence"])
@pytest.mark.parametrize("tensor", [2, 4, 8])
@pytest.mark.parametrize("family", list(FAMILIES))
def test_loss_and_every_gradient_equal_one_devices(
    family, tensor, sequence, alone, x64, random_parameters, packed_batch
):
    # Keys and values have 8, 2 and 1 heads, and 37 tokens divide by none of the sizes.
    config, parallelism = _wide(family), Parallelism(tensor=tensor, sequence=sequence)
    parameters = random_parameters(config, jnp.float64)
    batch = packed_batch(config, rows=4, sequence=16)
    data = min(8 // tensor, 4)
    step = spread_step(config, parallelism, mesh_of(parallelism, data=data), _KEY)
    got = step(*spread(parameters, batch, config, parallelism))
    assert_close(got, alone(family, parameters, batch))
