"""Every optimizer by name: how it turns clipped gradients into directions.

Each rank updates its own shards; what an entry needs of others stays inside the site. Clipping,
decoupled weight decay and the learning rate are common to all (`geojax.optim.make_optimizer`), and
so is the rule for skipped steps.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, Literal, TypeAlias

import jax.numpy as jnp
import optax
import pydantic

from geojax.models.declaration import Kind, KindOf
from geojax.optim.algorithms.adafactor import scale_by_adafactor
from geojax.optim.algorithms.adam import scale_by_adam
from geojax.optim.algorithms.muon import scale_by_muon
from geojax.optim.optimizer_state import store_moments_in
from geojax.settings import Settings
from geojax.suggestions import entry_called

OptimizerName = Annotated[str, pydantic.AfterValidator(lambda name: optimizer_entry(name).name)]
"""The name of an entry."""

Statistics: TypeAlias = Literal["none", "matrices", "means"]
"""Statistics that cross shards, each by exchanges inside a site that `geojax.planner.traffic`
counts: "none", as the optimizer works element by element; "matrices", whole ones
(`geojax.optim.algorithms.matrix_shares`); "means" of rows and columns
(`geojax.optim.algorithms.adafactor`)."""

FALLBACK = "adamw"
"""The optimizer of the parameters that an entry does not take."""

_LARGEST_BETA2_IN_BF16 = 0.99


class MomentSettings(Settings):
    """The settings from which an entry makes its transformation."""

    beta1: float = pydantic.Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""

    beta2: float = pydantic.Field(default=0.95, ge=0, lt=1)
    """Decay of the second moment."""

    epsilon: float = pydantic.Field(default=1e-8, ge=1e-20, le=1)
    """Added to the root of the second moment."""

    muon_momentum: float = pydantic.Field(default=0.95, ge=0, lt=1)
    """Decay of Muon's momentum."""

    moment_dtype: Literal["master", "bf16"] = "master"
    """Dtype of the stored moments. "master": the dtype of the master weights. "bf16": half the
    bytes. The update computes moments in the dtype of the gradients either way. Adafactor's moments
    are few and change ever less, and stay in "master"."""

    @property
    def stored_dtype(self) -> Any:
        """The dtype of the stored moments; None: that of the parameters."""
        return jnp.bfloat16 if self.moment_dtype == "bf16" else None

    @pydantic.model_validator(mode="after")
    def _bf16_can_follow(self) -> "MomentSettings":
        if self.moment_dtype == "bf16" and self.beta2 > _LARGEST_BETA2_IN_BF16:
            raise ValueError(
                f"moment_dtype=bf16 requires beta2 of {_LARGEST_BETA2_IN_BF16} or less; got "
                f"{self.beta2:g}, with which a step changes a moment by less than bf16 resolves. "
                "Set beta2, or moment_dtype to master"
            )
        return self


@dataclasses.dataclass(frozen=True)
class OptimizerEntry:
    """One optimizer."""

    name: str
    description: str
    """One sentence for help texts, with the settings that it reads."""

    directions: Callable[[MomentSettings, KindOf], optax.GradientTransformation]
    """The transformation between clipping and weight decay."""

    takes: Kind | None = None
    """The kind of parameters that it updates; `FALLBACK` updates the others. None: all."""

    statistics: Statistics = "none"
    """Statistics of leaves that it needs from the other ranks of a site that hold shards of them,
    beside the norm of all gradients."""

    averages: bool = False
    """True if `geojax.optim.averages.schedule_free` follows the learning rate."""


def optimizer_entry(name: str) -> OptimizerEntry:
    """Return the entry of the optimizer `name`.

    Raises:
        UserError: there is none.
    """
    return entry_called(name, OPTIMIZERS, "optimizer")


def _adamw(settings: MomentSettings, _: KindOf) -> optax.GradientTransformation:
    return scale_by_adam(
        settings.beta1, settings.beta2, settings.epsilon, moment_dtype=settings.stored_dtype
    )


def _lion(settings: MomentSettings, _: KindOf) -> optax.GradientTransformation:
    return store_moments_in(
        settings.stored_dtype, optax.scale_by_lion(settings.beta1, settings.beta2)
    )


def _sgd(settings: MomentSettings, _: KindOf) -> optax.GradientTransformation:
    return store_moments_in(settings.stored_dtype, optax.trace(settings.beta1))


def _muon(settings: MomentSettings, _: KindOf) -> optax.GradientTransformation:
    return scale_by_muon(
        settings.muon_momentum, settings.epsilon, moment_dtype=settings.stored_dtype
    )


def _adam_without_momentum(settings: MomentSettings, _: KindOf) -> optax.GradientTransformation:
    squares = optax.scale_by_rms(
        settings.beta2, settings.epsilon, eps_in_sqrt=False, bias_correction=True
    )
    return store_moments_in(settings.stored_dtype, squares)


_ENTRIES = (
    OptimizerEntry("adamw", "AdamW (arXiv 1711.05101) with beta1, beta2 and epsilon.", _adamw),
    OptimizerEntry(
        "lion",
        "Lion (arXiv 2302.06675) with beta1 and beta2: one moment, half of AdamW's state.",
        _lion,
    ),
    OptimizerEntry(
        "muon",
        "Muon (arXiv 2502.16982) with muon_momentum for matrices of layers, AdamW for the rest.",
        _muon,
        takes="matrix",
        statistics="matrices",
    ),
    OptimizerEntry(
        "adafactor",
        "Adafactor (arXiv 1804.04235): second moments of matrices by row and column, no momentum.",
        lambda _, kind_of: scale_by_adafactor(kind_of),
        statistics="means",
    ),
    OptimizerEntry(
        "schedule_free_adamw",
        "AdamW that averages its weights (arXiv 2405.15682) with beta1, beta2 and epsilon.",
        _adam_without_momentum,
        averages=True,
    ),
    OptimizerEntry("sgd", "Stochastic gradient descent with the momentum beta1.", _sgd),
)

OPTIMIZERS = {entry.name: entry for entry in _ENTRIES}
"""All optimizers by name."""
