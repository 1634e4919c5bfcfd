"""The origin of a run: a checkpoint, weights from elsewhere, or random ones."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from geojax.checkpoint import RunDirectory
from geojax.checkpoint.reading.base_weights import BASE_WEIGHTS, fingerprint, refuse_other_base
from geojax.checkpoint.reading.compatibility import refuse_earlier_version, refuse_other_model
from geojax.checkpoint.reading.initial_weights import InitialWeights
from geojax.checkpoint.reading.weights_of_folder import open_weights
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.stage_transport import between_sites
from geojax.models.huggingface.checkpoint import other_settings
from geojax.train import run_state
from geojax.train.joined_sites import refuse_other_weights
from geojax.train.opened_run import OpenedRun
from geojax.train.resume import (
    differences,
    refuse_other_schedule,
    with_saved_model,
    with_saved_schedule,
)
from geojax.train.runtime import Runtime
from geojax.train.services import Log
from geojax.train.training_loop import StartPoint


@dataclasses.dataclass(frozen=True)
class RunOrigin:
    """The checkpoint or the weights that a run starts from, and the config that follows."""

    config: RunConfig
    """The run's, with the model and the schedule of its checkpoint."""
    newest: Mapping[str, Any] | None
    """Metadata of the newest checkpoint; None: there is none."""
    weights: InitialWeights | None
    """Weights of a new run, or those that adapters adapt; None: random ones."""
    given: RunConfig
    """The config before the checkpoint's schedule came in."""

    @classmethod
    def of(
        cls,
        config: RunConfig,
        opened: OpenedRun,
        weights: InitialWeights | None,
        newest: Mapping[str, Any] | None,
        *,
        require_checkpoint: bool,
    ) -> "RunOrigin":
        """Return what a run starts from.

        Args:
            config: the run as its user gives it.
            opened: what the run keeps open.
            weights: of `first_weights`.
            newest: metadata of the newest checkpoint; None: there is none.
            require_checkpoint: refuse to start from scratch.

        Raises:
            UserError: there is no checkpoint, it is of another version or model or past the run's
                end, or other sites have other weights.
        """
        if newest is None and require_checkpoint:
            raise UserError(f"{opened.directory.path}: there is no checkpoint to resume from")
        refuse_earlier_version(opened.directory.checkpoints, newest)
        if newest is not None and int(newest["step"]) > config.steps:
            raise UserError(nothing_to_train(int(newest["step"]), config))
        if newest is None and weights is None:
            weights = open_initial_weights(config)
        given = with_saved_model(config, newest)
        if newest is not None:
            model = given.model.model_dump(mode="json")
            place = opened.directory.checkpoints / str(newest["step"])
            refuse_other_model(place, newest["model"], model)
        elif weights is not None and opened.transport is not None:
            to_sites = between_sites(opened.transport, given.mesh.dc)
            refuse_other_weights(to_sites, opened.mesh, fingerprint(weights))
        return cls(with_saved_schedule(given, newest), newest, weights, given)

    @property
    def consumed_sequences(self) -> int:
        """Sequences that the steps of the newest checkpoint consumed.

        Where that checkpoint is damaged, an older one may have consumed less.
        """
        return 0 if self.newest is None else int(self.newest["consumed_sequences"])

    @property
    def base_weights(self) -> dict[str, Any]:
        """Entries of the run's metadata about the weights that its adapters adapt."""
        if self.config.model.lora is None:
            return {}
        assert self.weights is not None, "adapters have weights to adapt"
        return {BASE_WEIGHTS: fingerprint(self.weights)}

    def restored(
        self,
        runtime: Runtime[Any],
        opened: OpenedRun,
        metadata: Mapping[str, Any],
        log: Log,
    ) -> StartPoint[Any]:
        """Restore the newest checkpoint and log what differs in this run, or begin from scratch.

        Args:
            runtime: computes the steps.
            opened: the parts of the run.
            metadata: what a checkpoint says of the run.
            log: shows a line to the user.

        Raises:
            UserError: no checkpoint is whole, or it does not fit the run.
            RunError: another site is lost.
        """
        weights, config, directory = self.weights, self.config, opened.directory
        if self.newest is None:
            if weights is not None:
                log(f"starting from the weights in {weights.folder}")
                if others := other_settings(weights.folder, config.model):
                    log(
                        f"note: the config.json there has other values of {', '.join(others)}, "
                        "which the weights were trained with"
                    )
            return StartPoint(run_state.begin(runtime, weights), 0, 0)
        frozen = weights if config.model.lora is not None else None
        state, saved = run_state.restore(runtime, opened.checkpointer, metadata["model"], frozen)
        if frozen is not None:
            refuse_other_base(frozen.folder, saved[BASE_WEIGHTS], metadata[BASE_WEIGHTS])
        step = int(saved["step"])
        refuse_earlier_version(directory.checkpoints / str(step), saved)
        refuse_other_schedule(directory.checkpoints, saved, self.given, config)
        log(f"resuming from step {step} in {directory.path}")
        for note in differences(saved, config, metadata):
            log(note)
        return StartPoint(state, step, int(saved["consumed_sequences"]))


def first_weights(config: RunConfig) -> InitialWeights | None:
    """Open the weights that a run needs before its checkpoints are known; None: it needs none.

    A run that goes on from a checkpoint needs no weights but frozen ones.

    Raises:
        UserError: they are not there, or not of the model.
    """
    if RunDirectory.is_there(config.run_directory) and config.model.lora is None:
        return None
    return open_initial_weights(config)


def open_initial_weights(config: RunConfig) -> InitialWeights | None:
    """Open the weights that a new run starts from; None: they are random.

    Raises:
        UserError: they are not there, or not of the model.
    """
    if config.initial_weights is None:
        return None
    return open_weights(config.initial_weights, config.model.base)


def nothing_to_train(step: int, config: RunConfig) -> str:
    """Say that a run is at its end."""
    return (
        f"nothing to train: the run is at step {step}, and steps is {config.steps}; raise it to go "
        "on"
    )
