"""Dynamic loss scaling: gradients of a small loss stay within what float16 can hold.

float16 has no number between 0 and 6e-8 and nothing above 65,504. The backward pass starts from S
times the loss, every gradient in it is S times as large, and the sums are divided by S in float32,
before they are clipped. S finds its level by itself:

    start large
    an inf or NaN in the gradients, on any rank of any site    skip the step, S <- S / 2
    N steps in a row without                                   S <- 2 S

("Mixed Precision Training", Micikevicius et al. 2018, section 3.2; the rule and its numbers are
those of NVIDIA's guide "Train With Mixed Precision".) S is a power of two at all times, so that
scaling and unscaling round nothing: where nothing overflows or vanishes, S does not show.

A skipped step is a step, but no update: its batch does not come again, and neither the learning
rate's schedule nor Adam's bias correction moves (Megatron-LM counts in the same way).
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import pydantic

from geojax.quantities import StepCount
from geojax.settings import Settings


class LossScaleSettings(Settings):
    """Dynamic loss scale of fp16."""

    initial: float = pydantic.Field(default=2.0**16, ge=2.0**-24, le=2.0**64)
    """Scale of the first step, a power of two. Start large: a skipped step costs little, and a
    small scale takes long to grow."""

    grow_after_steps: StepCount = 2000
    """Consecutive steps with finite gradients after which the scale doubles."""

    minimum: float = pydantic.Field(default=1.0, ge=2.0**-24, le=2.0**64)
    """Smallest scale, a power of two. Gradients that overflow at this scale have another problem,
    so `skip_limit` begins to count."""

    @pydantic.field_validator("initial", "minimum")
    @classmethod
    def _power_of_two(cls, value: float) -> float:
        if math.frexp(value)[0] != 0.5:
            near = 2.0 ** round(math.log2(value))
            raise ValueError(f"{value:g} is not a power of two; {near:g} is, and is near")
        return value

    @pydantic.model_validator(mode="after")
    def _minimum_is_below_initial(self) -> "LossScaleSettings":
        if self.minimum > self.initial:
            raise ValueError(f"minimum {self.minimum:g} is above initial {self.initial:g}")
        return self


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The loss scale as part of the training state: the same on every rank, and in a checkpoint."""

    scale: Any
    """float32 []: S."""

    clean_steps: Any
    """int32 []: steps without overflow since the scale last changed."""

    @classmethod
    def start(cls, settings: LossScaleSettings) -> "LossScale":
        """Return the scale before the first step."""
        return cls(jnp.float32(settings.initial), jnp.int32(0))

    def after(self, finite: jax.Array, settings: LossScaleSettings) -> "LossScale":
        """Return the scale after a step.

        Args:
            finite: bool [], true if the gradients of all ranks hold neither inf nor NaN.
            settings: how the scale moves.
        """
        clean = jnp.where(finite, self.clean_steps + 1, 0)
        grown = 2 * self.scale
        # Gradients that are all zero overflow at no scale: growth ends below inf, from which there
        # is no way back.
        grows = finite & (clean >= settings.grow_after_steps) & jnp.isfinite(grown)
        # (A run may go on with other settings, and be below their minimum.)
        floor = jnp.minimum(self.scale, settings.minimum)
        halved = jnp.maximum(self.scale / 2, floor)
        scale = jnp.where(finite, jnp.where(grows, grown, self.scale), halved)
        return LossScale(scale, jnp.where(grows, 0, clean))


@jax.custom_vjp
def scale_gradient(value: jax.Array, factor: jax.Array) -> jax.Array:
    """Return `value`; gradients through it are multiplied by `factor`, a scalar."""
    return value


def _forward(value: jax.Array, factor: jax.Array) -> tuple[jax.Array, jax.Array]:
    return value, factor


def _backward(factor: jax.Array, cotangent: jax.Array) -> tuple[jax.Array, jax.Array]:
    return cotangent * factor.astype(cotangent.dtype), jnp.zeros_like(factor)


scale_gradient.defvjp(_forward, _backward)
