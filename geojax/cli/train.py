"""`geojax train CONFIG`: train a transformer."""

import dataclasses
import os
from collections.abc import Sequence
from typing import Annotated

import tyro

from geojax.cli.config_file import ConfigFile
from geojax.settings import validate


@dataclasses.dataclass(frozen=True)
class TrainCommand:
    """Train the transformer that CONFIG describes.

    Options change settings of the config: `--optimizer.peak_learning_rate 1e-3`. `geojax settings`
    lists all settings. Under `jax.distributed`, every process runs this same command. If SLURM or
    Kubernetes started the processes, nothing else is needed.
    """

    config: ConfigFile
    """YAML file of the run."""

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


def run(command: TrainCommand, overrides: Sequence[str]) -> int:
    """Train, and return the exit code: 0 at the end, 130 after Ctrl-C."""
    # Imported here, so that `geojax --help` need not wait for JAX.
    from geojax.config.run_config import RunConfig
    from geojax.job.cluster_env import VARIABLES
    from geojax.runtime import ProcessSettings

    config = RunConfig.load(command.config, overrides)
    from geojax.train.run import train
    from geojax.trainer import SERVICES

    given = dataclasses.asdict(command)
    # A launcher that spreads a run over more processes says how many devices each simulates.
    if not os.environ.get(VARIABLES["simulated_devices"]):
        given["simulated_devices"] = config.simulate_devices
    fields = {
        name: given[name] for name in ProcessSettings.model_fields if given.get(name) is not None
    }
    processes = validate(ProcessSettings, fields, "geojax train")
    return train(config, processes, SERVICES, require_checkpoint=command.resume)
