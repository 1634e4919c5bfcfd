"""A small model of each family: every feature on, odd sizes."""

from geojax.models import MixtureSettings, ModelConfig, RotaryScaling

_SMALL = {"layers": 3, "hidden": 24, "heads": 4, "feed_forward": 40, "vocabulary": 37}
_STRETCHED = RotaryScaling(
    factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=16
)
FAMILIES = {
    "gpt3": ModelConfig(
        **_SMALL,
        maximum_positions=16,
        norm="layernorm",
        activation="gelu",
        positions="learned",
        biases=True,
        tied_head=True,
    ),
    "llama": ModelConfig(
        **_SMALL,
        key_value_heads=2,
        maximum_positions=64,
        rotary_base=100.0,
        head_dim=8,
        rotary_scaling=_STRETCHED,
    ),
    "nemotron": ModelConfig(
        **_SMALL,
        key_value_heads=1,
        head_dim=8,
        maximum_positions=64,
        norm="layernorm1p",
        activation="squared_relu",
        rotary_fraction=0.5,
    ),
    "mixture": ModelConfig(
        **_SMALL | {"feed_forward": 12},
        head_dim=8,
        maximum_positions=64,
        activation="squared_relu",
        mixture=MixtureSettings(
            experts=8,
            experts_per_token=3,
            shared_experts=2,
            normalised_gates=False,
            balance_coefficient=0.5,
        ),
    ),
}
