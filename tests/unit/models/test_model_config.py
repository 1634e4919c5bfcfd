import pytest

from geojax import UserError
from geojax.models import ModelConfig
from geojax.settings import validate

_VALID = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "feed_forward": 64,
    "vocabulary": 100,
    "maximum_positions": 16,
}


def test_loads_a_preset_and_a_file(tmp_path):
    preset = ModelConfig.load("llama3-8b")
    assert (preset.kv_heads, preset.head_size, preset.rotary_dim) == (8, 128, 128)
    assert preset.rotary_scaling is not None
    assert preset.rotary_scaling.factor == 8
    assert ModelConfig.load("nemotron4-15b").rotary_dim == 64

    path = tmp_path / "small.yaml"
    path.write_text("\n".join(f"{key}: {value}" for key, value in _VALID.items()))
    loaded = ModelConfig.load(path)
    assert loaded == ModelConfig.load(str(path)) == ModelConfig(**_VALID)
    assert loaded.kv_heads == 4
    assert hash(loaded) == hash(ModelConfig(**_VALID))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "hidden 32 is not a multiple of heads 5; choose one that is, or give head"),
        ({"key_value_heads": 3}, "not a multiple of key_value_heads 3; .* can be 1, 2, 4"),
        ({"rotary_fraction": 0.4}, "0.4 of a head of 8 dims is 3.2 dims; .* must be even"),
        ({"rotary_fraction": 0.375}, "is 3 dims; rotary positions turn pairs"),
        ({"positions": "learned", "rotary_fraction": 0.5}, "need positions: rotary, and"),
        ({"layers": 0}, "layers: input should be greater than 0, not 0"),
        ({"dropout": 1.0}, "dropout: input should be less than 1"),
        ({"norm": "batchnorm"}, "norm: input should be 'layernorm', 'rmsnorm' or 'layernorm1p'"),
        ({"head": 5}, "head: unknown key; did you mean 'heads'"),
        (
            {
                "rotary_scaling": {
                    "factor": 8,
                    "low_frequency_factor": 4,
                    "high_frequency_factor": 1,
                    "original_positions": 8192,
                }
            },
            "rotary_scaling: high_frequency_factor 1 must be above low_frequency_factor 4",
        ),
    ],
)
def test_refuses_in_one_line(change, message):
    with pytest.raises(UserError, match=message) as refusal:
        validate(ModelConfig, _VALID | change, "model")
    assert "\n" not in str(refusal.value)


def test_unknown_preset_names_the_nearest():
    with pytest.raises(UserError, match="did you mean 'llama3-8b'"):
        ModelConfig.load("llama3-8")
