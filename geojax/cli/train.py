"""`geojax train CONFIG`: train a transformer."""

import contextlib
import dataclasses
import os
from collections.abc import Sequence
from typing import Annotated

import tyro

import geojax
from geojax.cli.config_file import ConfigFile
from geojax.config.written_config import written_config
from geojax.errors import UserError
from geojax.job.cluster_env import VARIABLES, ProcessSettings, complete
from geojax.paths import resolved_path, shown_path
from geojax.settings import validate


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train the transformer that CONFIG describes.

    Options change keys of the config: `--optimizer.peak_learning_rate 1e-3`. Under
    `jax.distributed`, every process runs this same command. If SLURM or Kubernetes started the
    processes, nothing else is needed.
    """

    config: ConfigFile
    """YAML file of the run."""

    profile: str | None = None
    """Range of steps to profile for XProf and Perfetto: 20:25 profiles steps 20 to 24 on the first
    process."""

    resume: Annotated[bool, tyro.conf.FlagCreatePairsOff] = False
    """Refuse to start from scratch. By default a run directory with a checkpoint is resumed, and an
    empty one starts a new run."""

    coordinator: str | None = None
    """host:port of process 0."""

    process_count: int | None = None
    """Number of processes of the run, in all sites."""

    process_id: int | None = None
    """Index of this process, from 0."""

    site: str | None = None
    """Name of this process's site; default: GEOJAX_SITE."""


def announce(command: TrainCommand, overrides: Sequence[str]) -> None:
    """Print the first line of a run on its first process, before JAX is imported.

    Raises:
        UserError: the config cannot be read, or this process's place in its job is not known.
    """
    content = written_config(command.config, overrides).content
    place = complete(
        validate(ProcessSettings, _process_fields(command), "geojax train"), os.environ
    )
    if place.process_id:
        return
    line = f"geojax {geojax.__version__}: {command.config}"
    with contextlib.suppress(UserError):  # which the config is refused for
        if isinstance(directory := content.get("run_directory"), str):
            line += f" -> {shown_path(resolved_path(directory))}"
    print(line, flush=True)


def run(command: TrainCommand, overrides: Sequence[str]) -> int:
    """Train, and return the exit code: 0 at the end, 130 after Ctrl-C."""
    # Imported here, so that the first line need not wait for JAX.
    from geojax.config.profile_settings import overrides_of
    from geojax.config.run_config import RunConfig

    if command.profile is not None:
        overrides = [*overrides_of(command.profile), *overrides]
    config = RunConfig.load(command.config, overrides)
    from geojax.train.run import train
    from geojax.trainer import SERVICES

    fields = _process_fields(command)
    # A launcher that spreads a run over more processes says how many devices each simulates.
    simulated = config.simulate_devices
    if simulated is not None and not os.environ.get(VARIABLES["simulated_devices"]):
        fields["simulated_devices"] = simulated
    processes = validate(ProcessSettings, fields, "geojax train")
    return train(config, processes, SERVICES, require_checkpoint=command.resume)


def _process_fields(command: TrainCommand) -> dict[str, object]:
    """Return what the command line says of this process's place."""
    given = dataclasses.asdict(command)
    fields = ProcessSettings.model_fields
    return {name: given[name] for name in fields if given.get(name) is not None}
