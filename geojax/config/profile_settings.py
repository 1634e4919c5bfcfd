"""The steps of a run whose timeline and memory are recorded, and the limits of that."""

import re
from typing import Annotated

import pydantic

from geojax.errors import UserError
from geojax.quantities import Count, StepCount
from geojax.settings import Settings
from geojax.suggestions import shortened

MOST_STEPS = 5
"""Most steps of a profile without `allow_large`: a trace holds every operation of each."""

MOST_PROCESSES = 2
"""Most processes that are profiled without `allow_large`: each writes a trace of its own."""


class ProfileSettings(Settings):
    """Profiles: the timeline of some steps and the device memory after them, for XProf and
    Perfetto. SIGUSR1 to a process profiles its next 3 steps at any time."""

    start: StepCount | None = None
    """First step that is profiled, counted from 1. `--profile 20:25` sets it to 20 and `steps` to
    5. null: only SIGUSR1 profiles."""

    steps: Count = MOST_STEPS
    """Number of steps that are profiled."""

    processes: tuple[Annotated[int, pydantic.Field(ge=0, lt=2**20)], ...] = pydantic.Field(
        default=(0,), min_length=1, max_length=2**10
    )
    """Processes that are profiled, by their index in the run. With `dc.join: islands` the index
    counts inside each site."""

    allow_large: bool = False
    """Allow more than 5 steps and 2 processes. A trace may have gigabytes, and other processes wait
    while one writes."""

    @property
    def first_and_last(self) -> tuple[int, int] | None:
        """The first and the last step that the config asks to profile; None: there are none."""
        return None if self.start is None else (self.start, self.start + self.steps - 1)

    @pydantic.model_validator(mode="after")
    def _is_small(self) -> "ProfileSettings":
        if len(set(self.processes)) < len(self.processes):
            raise ValueError(f"processes {list(self.processes)} name one twice; name each once")
        for what, count, most in (
            ("steps", self.steps, MOST_STEPS),
            ("processes", len(self.processes), MOST_PROCESSES),
        ):
            if count > most and not self.allow_large:
                raise ValueError(
                    f"{count} {what} make a large profile; take at most {most}, or set "
                    "profile.allow_large=true"
                )
        return self


def overrides_of(steps: str) -> list[str]:
    """Return the overrides of a config that `--profile A:B` stands for: steps A to B - 1.

    Raises:
        UserError: it is not a range of steps.
    """
    match = re.fullmatch(r"([0-9]{1,10}):([0-9]{1,10})", steps)
    if match is None:
        raise UserError(
            f"--profile: '{shortened(steps)}' is no range of steps; 20:25 would profile steps 20 "
            "to 24"
        )
    start, end = map(int, match.groups())
    if not 0 < start < end:
        raise UserError(
            f"--profile: {steps} has no step from 1 on; 20:25 would profile steps 20 to 24"
        )
    return [f"--profile.start={start}", f"--profile.steps={end - start}"]
