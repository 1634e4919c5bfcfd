"""A resumed run: the settings that it takes from its checkpoint, and those that have changed."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from geojax.checkpoint.reading.compatibility import with_later_keys
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.models import OwnModel
from geojax.optim import OptimizerSettings, learning_rate_schedule
from geojax.optim.schedules import schedule_entry
from geojax.settings import leaves_by_key


class Change(NamedTuple):
    """A setting that is not the checkpoint's."""

    key: str
    """Dotted key of the config."""
    saved: str
    """Value in the checkpoint, as JSON; "absent" where it has none."""
    given: str
    """Value in this run."""

    def __str__(self) -> str:
        return f"{self.key} {self.saved} -> {self.given}"


def with_saved_schedule(config: RunConfig, saved: Mapping[str, Any] | None) -> RunConfig:
    """Return `config` with `optimizer.decay_steps` filled in.

    It is what the config says, else what the run's checkpoint was trained with, else the run's
    steps: a run that is extended keeps its learning rates, and then the final one. A run that takes
    another `schedule` than its checkpoint, as a decay that branches off a constant rate, ends it at
    its own last step.

    Args:
        config: the run.
        saved: metadata of the checkpoint that will be resumed; None for a new run.
    """
    if config.optimizer.decay_steps is not None:
        return config
    decay_steps = config.steps
    if saved is not None and _saved_schedule(saved["config"]) == config.optimizer.schedule:
        decay_steps = saved["config"]["optimizer"]["decay_steps"]
    optimizer = config.optimizer.model_copy(update={"decay_steps": decay_steps})
    return config.model_copy(update={"optimizer": optimizer})


def with_saved_model(config: RunConfig, saved: Mapping[str, Any] | None) -> RunConfig:
    """Return `config` with `model.latent_norm_eps` of its checkpoint, if it does not set it itself.

    Runs that were saved before there was the key have another value than its default, and keep it.

    Args:
        config: the run.
        saved: metadata of the checkpoint that will be resumed; None for a new run.
    """
    key = "latent_norm_eps"
    model = with_later_keys((saved or {}).get("model") or {})
    if key not in model or key in config.model.model_fields_set:
        return config
    kept = config.model.model_copy(update={key: model[key]})
    return config.model_copy(update={"model": kept})


def refuse_other_schedule(
    folder: Path, saved: Mapping[str, Any], given: RunConfig, config: RunConfig
) -> None:
    """Check that the step was compiled with the schedule of the checkpoint that was restored.

    Args:
        folder: folder of the checkpoints.
        saved: metadata of the checkpoint that was restored.
        given: the run as its user describes it.
        config: the run as it was compiled, from `with_saved_schedule`.

    Raises:
        UserError: it was not: a newer checkpoint, since found damaged, was planned otherwise.
    """
    if with_saved_schedule(given, saved).optimizer != config.optimizer:
        raise UserError(
            f"{folder}: the restored step {saved['step']} ends the learning rate's decay at step "
            f"{saved['config']['optimizer']['decay_steps']}, but a newer, damaged checkpoint ends "
            f"it at step {config.optimizer.decay_steps}. Choose one with --optimizer.decay_steps"
        )


def changed_settings(saved: Mapping[str, Any], config: RunConfig) -> list[Change]:
    """List the settings of `config` that differ from the resolved config of the checkpoint."""
    known = {**saved, "model": with_later_keys(saved.get("model") or {})}
    there, here = (
        {key: json.dumps(value) for key, value in leaves_by_key(each)}
        for each in (known, config.model_dump(mode="json"))
    )
    shown = ((key, there.get(key, "absent"), here.get(key, "absent")) for key in there | here)
    return [Change(*each) for each in shown if each[1] != each[2]]


def differences(
    saved: Mapping[str, Any], config: RunConfig, metadata: Mapping[str, Any]
) -> list[str]:
    """List in lines for a person what differs in a run that goes on from a checkpoint.

    Args:
        saved: metadata of the checkpoint.
        config: the run, from `with_saved_schedule`.
        metadata: those of the run's own checkpoints.
    """
    changes = changed_settings(saved["config"], config)
    notes = (
        schedule_note(saved["config"], config),
        jump_note(saved, config),
        module_note(saved, config),
    )
    lines = [f"changed since step {saved['step']}: {change}" for change in changes]
    lines += [note for note in notes if note is not None]
    if saved["data"] != metadata["data"]:
        lines.append(
            "note: the data, the seed or the sequence length differ from the checkpoint's; "
            "from this step on the run uses the new ones"
        )
    return lines


def schedule_note(saved: Mapping[str, Any], config: RunConfig) -> str | None:
    """Say how the learning rate goes on where the run's length is not that of its schedule."""
    end = config.optimizer.decay_steps
    if end == config.steps or end != saved["optimizer"]["decay_steps"]:
        return None
    if not schedule_entry(config.optimizer.schedule).has_end:
        return None
    return (
        f"the learning rate keeps its schedule, which ends at step {end}; "
        f"--optimizer.decay_steps {config.steps} plans it anew"
    )


def jump_note(saved: Mapping[str, Any], config: RunConfig) -> str | None:
    """Say that the learning rate of the checkpoint's step is another one in this run's schedule.

    Args:
        saved: metadata of the checkpoint.
        config: the run, from `with_saved_schedule`.
    """
    step = int(saved["step"])
    rates = (OptimizerSettings(**saved["config"]["optimizer"]), config.optimizer)
    before, after = (float(learning_rate_schedule(each, config.steps)(step)) for each in rates)
    if math.isclose(before, after, rel_tol=1e-5):
        return None
    return (
        f"the learning rate jumps at step {step}, from {before:.3g} to {after:.3g}; a decay that "
        "begins there would be continuous"
    )


def warmup_note(config: RunConfig) -> str | None:
    """Say that the learning rate never falls, where the warm-up takes its whole schedule."""
    optimizer = config.optimizer
    end = optimizer.decay_steps or config.steps
    if optimizer.warmup_steps < end or not schedule_entry(optimizer.schedule).has_end:
        return None
    return (
        f"the warm-up of {optimizer.warmup_steps} steps takes the whole learning-rate schedule of "
        f"{end}: the rate rises to its end; optimizer.warmup_steps below {end} would let it fall"
    )


def ramp_note(config: RunConfig, sequences: int) -> str | None:
    """Say how the batch grows, where the next step's has so many `sequences` and not yet all."""
    ramp = config.batch.sizes
    if sequences == ramp.full:
        return None
    return (
        f"batch.ramp: a batch has {sequences} sequences, and grows by {ramp.increment} to "
        f"{ramp.full} in the first {ramp.sequences:,} of the run"
    )


def _saved_schedule(saved: Mapping[str, Any]) -> str:
    """Return the schedule of a checkpoint; before there were several it was the default one."""
    name: str = saved["optimizer"].get("schedule", OptimizerSettings().schedule)
    return name


def module_note(saved: Mapping[str, Any], config: RunConfig) -> str | None:
    """Say that the file of a model of your own is another than the one that trained so far."""
    if not isinstance(config.model, OwnModel) or config.model.digest == saved["module_digest"]:
        return None
    return f"changed since step {saved['step']}: the file of model.module {config.model.module}"
