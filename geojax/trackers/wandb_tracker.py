"""Weights & Biases as a tracker."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from geojax.trackers.tracker import TrackedRun

_INIT_SECONDS = 90


class WandbTracker:
    """A run of wandb, which a resumed run goes on with.

    wandb takes no step before the last that it has, so that steps which a run repeats keep the
    values of the first time.
    """

    def __init__(
        self,
        project: str,
        entity: str | None,
        group: str | None,
        tags: Sequence[str],
        mode: str,
        url: str | None,
    ):
        self._place = {
            "project": project,
            "entity": entity,
            "group": group,
            "tags": tuple(tags) or None,
            "mode": mode,
        }
        self._url = url
        self._run: Any = None

    def start(self, run: TrackedRun) -> None:
        """Begin the run of wandb, or go on with it."""
        os.environ["WANDB_ERROR_REPORTING"] = "false"
        import wandb

        of_server = {} if self._url is None else {"base_url": self._url}
        settings = wandb.Settings(
            console="off",
            disable_code=True,
            disable_git=True,
            init_timeout=_INIT_SECONDS,
            **of_server,
        )
        folder = run.directory / "trackers"
        folder.mkdir(exist_ok=True)
        self._run = wandb.init(
            **self._place,
            id=run.id,
            name=run.name,
            dir=str(folder),
            config=dict(run.config),
            resume="allow",
            allow_val_change=True,
            settings=settings,
        )

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Add numbers to the row of a step."""
        self._run.log(dict(values), step=step)

    def finish(self, exit_code: int) -> None:
        """Upload what is left."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
