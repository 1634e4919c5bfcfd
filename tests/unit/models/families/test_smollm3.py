"""SmolLM3: layers without positions."""

import jax
import jax.numpy as jnp
import numpy as np
import pydantic
import pytest
from support.small_models import make_batch

from geojax.models import ModelConfig, init_parameters, logits, parameter_count
from geojax.models.families.smollm3 import SmolLM3

SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}


def test_the_preset_has_the_published_count():
    model = ModelConfig.load("smollm3-3b")
    assert isinstance(model, SmolLM3)
    assert parameter_count(model) == 3_075_098_624
    assert model.no_rope_layers == 9 * (1, 1, 1, 0)


def test_each_layer_is_told():
    with pytest.raises(pydantic.ValidationError, match="3 entries for 2 layers"):
        SmolLM3(**SIZES, no_rope_layers=(1, 0, 1))


def test_layers_without_positions_do_not_see_them():
    batch = {name: jnp.asarray(each) for name, each in make_batch(SmolLM3(**SIZES)).items()}
    moved = batch | {"positions": 3 * batch["positions"]}

    def change(no_rope_layers):
        model = SmolLM3(**SIZES, no_rope_layers=no_rope_layers)
        parameters = init_parameters(model, jax.random.key(0))
        before, after = (logits(parameters, each, model) for each in (batch, moved))
        return float(np.abs(before - after).max())

    assert change((0, 0)) == 0
    assert change((0, 1)) > 1e-4
