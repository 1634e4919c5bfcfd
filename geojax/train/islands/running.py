"""Facts of the run that goes on, for a site that returns; every door there tells them."""

import json
import time
from collections.abc import Mapping
from typing import Any

import pydantic

from geojax.config.run_config import RunConfig
from geojax.data.batch_ramp import BatchRamp
from geojax.errors import UserError
from geojax.job.island_env import IslandSettings
from geojax.membership.record import RecordStore, UnreachableStoreError
from geojax.runtime.agreement import told_by_first
from geojax.settings import Settings
from geojax.step.resolved import Step
from geojax.train.agreed_step import step_of_note, step_or_error
from geojax.train.islands.record_store import record_store
from geojax.transport.door import ask_doors

_ASK_SECONDS = 10.0
"""Time in which a site without which the run goes on looks for the others."""


class RunningFacts(Settings):
    """Facts of a run, by which a site that returns computes as the others do."""

    step: str
    """The choices of the run, as `geojax.train.agreed_step` writes them."""
    metadata: str
    """JSON of what a checkpoint says of the run."""
    save_name: str = pydantic.Field(pattern="^[0-9a-f]{32}$")
    """Name of the saves of all sites."""
    begun_at: int = pydantic.Field(ge=0, le=2**53)
    """Steps done when the run was started."""
    consumed_sequences: int = pydantic.Field(ge=0, le=2**53)
    """Sequences of the data that these consumed."""

    @classmethod
    def of(
        cls,
        step: Step,
        metadata: Mapping[str, Any],
        save_name: str,
        begun_at: int,
        consumed_sequences: int,
    ) -> "RunningFacts":
        """Return the facts of a run that begins."""
        return cls(
            step=step_or_error(step),
            metadata=json.dumps(metadata),
            save_name=save_name,
            begun_at=begun_at,
            consumed_sequences=consumed_sequences,
        )

    def resolved(self) -> Step:
        """Return the choices of the run.

        Raises:
            UserError: another version has made them.
        """
        return step_of_note(self.step, "the run that goes on")

    @property
    def saved(self) -> dict[str, Any]:
        """The metadata of a checkpoint of the step at which the run was started."""
        counts = {"step": self.begun_at, "consumed_sequences": self.consumed_sequences}
        return {**json.loads(self.metadata), **counts}

    def consumed_at(self, step: int, sizes: BatchRamp) -> int:
        """Return the sequences that all steps up to one consumed.

        Args:
            step: number of steps done.
            sizes: of the run's batches.
        """
        return sizes.consumed_after(step - self.begun_at, self.consumed_sequences)


def facts_of_running(config: RunConfig, island: IslandSettings) -> RunningFacts | None:
    """Ask the other sites for the run that goes on without this one; None: nobody runs it.

    All processes of the site call it together; the first one asks. Nobody is asked before the first
    start of a run, which leaves a record.

    Args:
        config: the run of all sites.
        island: this site among all.
    """
    if config.islands.lease is None:
        return None
    store = record_store(config.islands.lease, config.run_directory.name)
    name = "facts of the run that goes on"
    facts = told_by_first(name, lambda: _facts_at_doors(store, island), 2 * _ASK_SECONDS)
    if not facts:
        return None
    try:
        return RunningFacts.model_validate_json(facts)
    except pydantic.ValidationError:
        raise UserError(
            "the run goes on at the other sites with another version of geojax; start this site "
            "with theirs"
        ) from None


def _facts_at_doors(store: RecordStore, island: IslandSettings) -> str:
    """Return what a site tells at its door; "": there is no run, or nobody answers."""
    is_out = True
    try:
        record = store.read()
    except UnreachableStoreError:
        pass
    else:
        if record is None:
            return ""
        is_out = island.sites.index(island.site) not in record.members
    deadline = time.monotonic() + (_ASK_SECONDS if is_out else 0.0)
    while not (answers := ask_doors(island)) and time.monotonic() < deadline:
        continue
    return next((answer.facts for answer in answers.values()), "")
