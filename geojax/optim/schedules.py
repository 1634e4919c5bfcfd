"""Every learning-rate schedule by name: the rate of each update, from a linear warm-up on.

    cosine          peak ─╮ half a cosine     linear        peak ─╲ a line
                          ╰─ final at the end                      ╲─ final at the end
    wsd             peak ────────╲ a line     constant      peak ──────────
                                  ╲─ final at the end
    inverse_sqrt    peak · √(warmup / update), at least final

Those with an end keep the rate that they have there, so that a longer run goes on with it; the
others do not depend on the length of the run. Rates are continuous over any extension.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated

import jax.numpy as jnp
import optax
import pydantic

from geojax.quantities import StepCount
from geojax.settings import Settings
from geojax.suggestions import entry_called

ScheduleName = Annotated[str, pydantic.AfterValidator(lambda name: schedule_entry(name).name)]
"""The name of an entry in `geojax.optim.schedules`."""

_DECAY_SHARE = 10
"""One update in so many is in the decay of `wsd`, unless the config says otherwise."""


class ScheduleSettings(Settings):
    """The learning rate of each update."""

    schedule: ScheduleName = "cosine"
    """Learning rate after the warm-up. "cosine" (arXiv 1608.03983), "linear" and "wsd" fall to
    `final_learning_rate`; "wsd" is constant before a linear decay (arXiv 2404.06395). "constant"
    keeps the peak. "inverse_sqrt" falls with the root of the step (arXiv 1706.03762)."""

    peak_learning_rate: float = pydantic.Field(default=3e-4, ge=1e-12, le=1e6)
    """Learning rate at the end of the warm-up."""

    final_learning_rate: float = pydantic.Field(default=3e-5, ge=0, le=1e6)
    """Learning rate at the end of the decay and afterwards; with "inverse_sqrt" the lowest rate.
    "constant" ignores this key."""

    warmup_steps: int = pydantic.Field(default=100, ge=0, le=10**9)
    """Steps over which the learning rate rises linearly from zero."""

    decay_steps: StepCount | None = None
    """Step at which the decay ends. null: the run's last step, `steps`. A run resumed with other
    `steps` keeps its checkpoint's value, unless `schedule` changes; set this key to plan the decay
    anew. "constant" and "inverse_sqrt" have no end."""

    wsd_decay_steps: StepCount | None = None
    """Steps of the decay of "wsd", which ends at `decay_steps`. null: a tenth of `decay_steps`."""

    @pydantic.model_validator(mode="after")
    def _final_is_below_peak(self) -> "ScheduleSettings":
        if self.final_learning_rate > self.peak_learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate:g} is above peak_learning_rate "
                f"{self.peak_learning_rate:g}"
            )
        return self

    @pydantic.model_validator(mode="after")
    def _decay_is_of_wsd(self) -> "ScheduleSettings":
        if self.wsd_decay_steps is not None and self.schedule != "wsd":
            raise ValueError(
                f"wsd_decay_steps requires schedule=wsd; got {self.schedule}. Remove "
                "wsd_decay_steps, or set schedule"
            )
        return self


@dataclasses.dataclass(frozen=True)
class RateScheduleEntry:
    """One schedule."""

    name: str
    rate: Callable[[ScheduleSettings, int], optax.Schedule]
    """Make the schedule of the settings that ends at an update, if it ends."""
    has_end: bool = True
    """True if the rates depend on the update at which the schedule ends."""


def learning_rate_schedule(settings: ScheduleSettings, steps: int) -> optax.Schedule:
    """Return the learning rate as a function of the update, counted from 1, in a run of `steps`."""
    return schedule_entry(settings.schedule).rate(settings, settings.decay_steps or steps)


def schedule_entry(name: str) -> RateScheduleEntry:
    """Return the entry of the schedule `name`.

    Raises:
        UserError: there is none.
    """
    return entry_called(name, SCHEDULES, "schedule")


def _cosine(settings: ScheduleSettings, end: int) -> optax.Schedule:
    warmup = min(settings.warmup_steps, end)
    planned = optax.warmup_cosine_decay_schedule(
        init_value=0.0 if warmup else settings.peak_learning_rate,
        peak_value=settings.peak_learning_rate,
        warmup_steps=warmup,
        decay_steps=max(end, warmup + 1),
        end_value=settings.final_learning_rate,
    )
    # With a warm-up as long as the decay Optax would fall to the final rate in one step.
    return lambda step: planned(jnp.minimum(step, end))


def _linear(settings: ScheduleSettings, end: int) -> optax.Schedule:
    return _line_at_the_end(settings, end, end)


def _wsd(settings: ScheduleSettings, end: int) -> optax.Schedule:
    return _line_at_the_end(settings, end, settings.wsd_decay_steps or -(-end // _DECAY_SHARE))


def _line_at_the_end(settings: ScheduleSettings, end: int, decay_steps: int) -> optax.Schedule:
    """Rise to the peak, stay there, and fall in a line over the last `decay_steps` of `end`."""
    peak = settings.peak_learning_rate
    warmup = min(settings.warmup_steps, end)
    decay = min(decay_steps, end - warmup)
    if decay == 0:
        return _constant(settings.model_copy(update={"warmup_steps": warmup}), end)
    return optax.join_schedules(
        [
            _constant(settings, end),
            optax.linear_schedule(peak, settings.final_learning_rate, decay),
        ],
        [end - decay],
    )


def _constant(settings: ScheduleSettings, _: int) -> optax.Schedule:
    peak = settings.peak_learning_rate
    if settings.warmup_steps == 0:
        return optax.constant_schedule(peak)
    return optax.linear_schedule(0.0, peak, settings.warmup_steps)


def _inverse_sqrt(settings: ScheduleSettings, end: int) -> optax.Schedule:
    peak, warmup = settings.peak_learning_rate, max(settings.warmup_steps, 1)
    rising = _constant(settings, end)

    def rate(step: optax.ScalarOrSchedule) -> optax.ScalarOrSchedule:
        falling = peak * jnp.sqrt(warmup / jnp.maximum(step, warmup))
        falling = jnp.maximum(falling, settings.final_learning_rate)
        return jnp.where(step < warmup, rising(step), falling)

    return rate


_ENTRIES = (
    RateScheduleEntry("cosine", _cosine),
    RateScheduleEntry("linear", _linear),
    RateScheduleEntry("wsd", _wsd),
    RateScheduleEntry("constant", _constant, has_end=False),
    RateScheduleEntry("inverse_sqrt", _inverse_sqrt, has_end=False),
)

SCHEDULES = {entry.name: entry for entry in _ENTRIES}
"""All schedules by name."""
