"""Every optimizer by name: how it turns clipped gradients into directions.

Each rank updates its own shards, so an entry works element by element; what needs a whole matrix
(Adafactor, LAMB, Muon) cannot be entered. Clipping, decoupled weight decay and the learning rate
are common to all (`geojax.optim.make_optimizer`), and so is the rule for skipped steps.
"""

import dataclasses
from collections.abc import Callable

import optax
import pydantic

from geojax.errors import UserError
from geojax.optim.adam import scale_by_adam
from geojax.settings import Settings


class MomentSettings(Settings):
    """The settings from which an entry makes its transformation."""

    beta1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = pydantic.Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""

    epsilon: float = pydantic.Field(default=1e-8, ge=1e-20, le=1)
    """Added to the root of the second moment."""


@dataclasses.dataclass(frozen=True)
class OptimizerEntry:
    """One optimizer."""

    name: str
    description: str
    """One sentence for help texts, with the settings that it reads."""

    directions: Callable[[MomentSettings], optax.GradientTransformation]
    """The transformation between clipping and weight decay."""


def optimizer_entry(name: str) -> OptimizerEntry:
    """Return the entry of the optimizer `name`.

    Raises:
        UserError: there is none.
    """
    if name not in OPTIMIZERS:
        raise UserError(f"no optimizer is called '{name}'; choose one of {', '.join(OPTIMIZERS)}")
    return OPTIMIZERS[name]


_ENTRIES = (
    OptimizerEntry(
        "adamw",
        "AdamW (arXiv 1711.05101) with beta1, beta2 and epsilon.",
        lambda settings: scale_by_adam(settings.beta1, settings.beta2, settings.epsilon),
    ),
    OptimizerEntry(
        "lion",
        "Lion (arXiv 2302.06675) with beta1 and beta2: one moment, half of AdamW's state.",
        lambda settings: optax.scale_by_lion(settings.beta1, settings.beta2),
    ),
    OptimizerEntry(
        "sgd",
        "Stochastic gradient descent with the momentum beta1.",
        lambda settings: optax.trace(settings.beta1),
    ),
)

OPTIMIZERS = {entry.name: entry for entry in _ENTRIES}
"""All optimizers by name."""
