"""Phi-3 and Phi-4: fused kernels, and longrope."""

import json

import pytest

from geojax.errors import UserError
from geojax.models import ModelConfig, parameter_count
from geojax.models.families.phi3 import PHI3, Phi3
from geojax.models.huggingface.checkpoint import model_of, read_model_fields

CONTENT = {
    "model_type": "phi3",
    "num_hidden_layers": 2,
    "hidden_size": 24,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "vocab_size": 37,
    "max_position_embeddings": 64,
}
ONES = {"short_factor": [1.0] * 3, "long_factor": [1.0] * 3}


def test_the_preset_has_the_published_count():
    model = ModelConfig.load("phi4-14b")
    assert isinstance(model, Phi3)
    assert parameter_count(model) == 14_659_507_200


def read(folder, **changes):
    (folder / "config.json").write_text(json.dumps(CONTENT | changes))
    return read_model_fields(folder)


def test_it_is_written_as_itself(tmp_path):
    model = model_of(read(tmp_path))
    written = PHI3.write_config(model)
    assert written["model_type"] == "phi3"
    assert model_of(read(tmp_path, **written)) == model


@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_longrope_is_refused_unless_its_factors_are_1(tmp_path, key):
    longrope = {"type": "longrope", **ONES}
    assert "factor" not in read(tmp_path, **{key: longrope})["rope_parameters"]
    with pytest.raises(UserError, match=f"{key} has longrope, whose factors change"):
        read(tmp_path, **{key: longrope | {"long_factor": [1.0, 2.0, 4.0]}})
    with pytest.raises(UserError, match=f"{key} has longrope"):
        read(tmp_path, original_max_position_embeddings=32, **{key: longrope})
