"""What a model is: sizes and choices that make one decoder-only transformer a GPT-3 or a Llama."""

import math
from pathlib import Path
from typing import Literal, Self

import pydantic

from geojax.settings import Settings, load_yaml, preset_path, validate


class RotaryScaling(Settings):
    """Llama 3.1's stretch of the rotary frequencies for contexts longer than it was trained on.

    Wavelengths above `original_positions / low_frequency_factor` are stretched by `factor`, those
    below `original_positions / high_frequency_factor` are kept, and those between are blended.
    Source: "The Llama 3 Herd of Models" (2024) and the model code that Meta released with it.
    """

    factor: float = pydantic.Field(gt=0)
    """How many times longer the low frequencies' wavelengths become."""
    low_frequency_factor: float = pydantic.Field(gt=0)
    """Fewer turns than this in `original_positions` make a frequency low."""
    high_frequency_factor: float = pydantic.Field(gt=0)
    """More turns than this in `original_positions` make a frequency high."""
    original_positions: int = pydantic.Field(gt=0)
    """Context length of the training that is being stretched."""

    @pydantic.model_validator(mode="after")
    def _factors_in_order(self) -> Self:
        if self.high_frequency_factor <= self.low_frequency_factor:
            raise ValueError(
                f"high_frequency_factor {self.high_frequency_factor:g} must be above "
                f"low_frequency_factor {self.low_frequency_factor:g}"
            )
        return self


class MixtureSettings(Settings):
    """Experts in the place of each layer's feed-forward block, a few of which each token meets."""

    experts: int = pydantic.Field(gt=1)
    """Experts of a layer among which its router chooses, each of the width `feed_forward`."""
    experts_per_token: int = pydantic.Field(gt=0)
    """How many of them a token goes to (k)."""
    shared_experts: int = pydantic.Field(default=0, ge=0)
    """Experts of the same width that every token goes to besides, without a gate."""
    normalised_gates: bool = True
    """Whether a token's k gates sum to 1, as in Mixtral; else they are its k largest probabilities
    among all experts, as in DeepSeekMoE."""
    capacity_factor: float | None = pydantic.Field(default=None, gt=0)
    """An expert takes at most ceil(capacity_factor * sequence * k / experts) tokens of a row, the
    first ones, and drops the others; null: it takes all."""
    balance_coefficient: float = pydantic.Field(default=0.01, ge=0)
    """What the sum over layers of the load-balancing loss is multiplied by in a row's loss."""

    @pydantic.model_validator(mode="after")
    def _enough_experts(self) -> Self:
        if self.experts_per_token > self.experts:
            raise ValueError(
                f"experts_per_token {self.experts_per_token} is more than the {self.experts} "
                f"experts; it can be 1 to {self.experts}"
            )
        return self


class ModelConfig(Settings):
    """One decoder-only transformer; the presets in `configs/model/` are values of this class."""

    layers: int = pydantic.Field(gt=0)
    """Transformer layers, each an attention block and a feed-forward block."""
    hidden: int = pydantic.Field(gt=0)
    """Width of the residual stream."""
    heads: int = pydantic.Field(gt=0)
    """Query heads."""
    key_value_heads: int | None = pydantic.Field(default=None, gt=0)
    """Key and value heads, each shared by heads / key_value_heads query heads; default: `heads`."""
    head_dim: int | None = pydantic.Field(default=None, gt=0)
    """Width of one head; default: hidden / heads."""
    feed_forward: int = pydantic.Field(gt=0)
    """Width between the two matrix products of the feed-forward block (of each half of SwiGLU); in
    a mixture that of each expert."""
    mixture: MixtureSettings | None = None
    """Experts in place of the feed-forward block, in every layer; null: a dense model."""
    vocabulary: int = pydantic.Field(gt=0)
    """Number of tokens."""
    maximum_positions: int = pydantic.Field(gt=0)
    """Longest sequence; the number of learned positions, if positions are learned."""
    norm: Literal["layernorm", "rmsnorm", "layernorm1p"] = "rmsnorm"
    """LayerNorm has a bias. LayerNorm1p is LayerNorm whose stored scale is the scale minus 1, so
    that weight decay, where it is applied, pulls the scale to 1."""
    norm_epsilon: float = pydantic.Field(default=1e-5, gt=0)
    """Added to the variance before its root is taken."""
    activation: Literal["gelu", "squared_relu", "swiglu"] = "swiglu"
    """GELU is the tanh approximation that GPT-2 and GPT-3 use."""
    positions: Literal["learned", "rotary"] = "rotary"
    """Learned positions are added to the embedding; rotary ones turn queries and keys."""
    rotary_fraction: float = pydantic.Field(default=1.0, gt=0, le=1)
    """Share of each head that is turned (its first dims); the rest carries no position."""
    rotary_base: float = pydantic.Field(default=10_000.0, gt=1)
    """Wavelengths run from 2 pi to almost 2 pi times this."""
    rotary_scaling: RotaryScaling | None = None
    """Llama 3.1's stretch of the frequencies, if any."""
    biases: bool = False
    """Whether matrix products have a bias; those of a mixture have none."""
    tied_head: bool = False
    """Whether the output head is the transpose of the token embedding."""
    dropout: float = pydantic.Field(default=0.0, ge=0, lt=1)
    """Rate on the embedding and on both residual branches; attention weights have none."""
    initial_deviation: float = pydantic.Field(default=0.02, gt=0)
    """Standard deviation of the initial matrices; residual outputs get 1/sqrt(2 layers) of it."""

    @property
    def kv_heads(self) -> int:
        """Key and value heads: `key_value_heads`, or `heads` where that is not given."""
        return self.key_value_heads or self.heads

    @property
    def head_size(self) -> int:
        """Width of one head: `head_dim`, or hidden / heads where that is not given."""
        return self.head_dim or self.hidden // self.heads

    @property
    def shared_width(self) -> int:
        """Width of the feed-forward block that every token meets: all of it, or a mixture's shared
        experts side by side."""
        return self.feed_forward * (self.mixture.shared_experts if self.mixture else 1)

    @property
    def rotary_dim(self) -> int:
        """How many of a head's dims the rotary positions turn."""
        return round(self.rotary_fraction * self.head_size)

    @property
    def gated(self) -> bool:
        """Whether the feed-forward block has a gate beside its up projection."""
        return self.activation == "swiglu"

    @pydantic.model_validator(mode="after")
    def _sizes_fit(self) -> Self:
        if self.head_dim is None and self.hidden % self.heads:
            raise ValueError(
                f"hidden {self.hidden} is not a multiple of heads {self.heads}; "
                "choose one that is, or give head_dim"
            )
        if self.heads % self.kv_heads:
            fitting = [n for n in range(1, self.heads + 1) if self.heads % n == 0]
            raise ValueError(
                f"heads {self.heads} is not a multiple of key_value_heads {self.kv_heads}; "
                f"key_value_heads can be {', '.join(map(str, fitting))}"
            )
        if self.positions == "rotary":
            turned = self.rotary_fraction * self.head_size
            if not math.isclose(turned, round(turned)) or round(turned) % 2:
                raise ValueError(
                    f"rotary_fraction {self.rotary_fraction:g} of a head of {self.head_size} dims "
                    f"is {turned:g} dims; rotary positions turn pairs, so it must be even"
                )
        elif self.rotary_scaling is not None or self.rotary_fraction != 1:
            raise ValueError(
                "rotary_scaling and rotary_fraction need positions: rotary, and positions is "
                f"{self.positions}"
            )
        return self

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """The preset of that name in `configs/model/`, or the YAML file at that path.

        What ends in .yaml or .yml or holds a slash is a path; everything else is a name.

        Raises:
            UserError: no such preset or file, or a setting in it is wrong.
        """
        text = str(name_or_path)
        is_path = isinstance(name_or_path, Path) or "/" in text or text.endswith((".yaml", ".yml"))
        path = Path(text) if is_path else preset_path("model", text)
        return validate(cls, load_yaml(path), str(path) if is_path else f"model preset '{text}'")
