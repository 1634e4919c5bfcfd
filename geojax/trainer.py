"""`geojax.Trainer`: a run from Python, which resolves its step and then trains."""

import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import geojax
from geojax import runtime
from geojax.checkpoint import RunDirectory
from geojax.config.run_config import RunConfig
from geojax.data.corpus import check_sources
from geojax.data.preparation.standard_library import open_standard_library
from geojax.errors import UserError
from geojax.inference.samples import sample_texts
from geojax.job.cluster_env import ProcessSettings
from geojax.models import Decoder
from geojax.planner.fp8_products import check_fp8_products
from geojax.planner.measured_timeline import draw
from geojax.planner.resolve.resolve import resolve
from geojax.runtime.advice.link_advice import advice_of_process
from geojax.settings import validate
from geojax.train import trainer
from geojax.train.agreed_step import keep
from geojax.train.opened_run import own_directory
from geojax.train.run_step import step_of_run
from geojax.train.services import Log, Services
from geojax.train.start import start

SERVICES = Services(
    resolve,
    check_fp8_products,
    draw,
    sample_texts,
    open_standard_library,
    advice_of_process,
)
"""The services of every run."""


class Trainer(trainer.Trainer):
    """A run of a config, from Python.

    It trains as `geojax train` does, with the same directory, data and checkpoints. It raises
    errors, prints nothing unless asked, and leaves signals alone. Sites with `dc.join: islands`
    need the environment of the command. A program makes one of them at a time.

    Example:
        >>> with geojax.Trainer("run.yaml", {"steps": 50}) as trainer:  # doctest: +SKIP
        ...     summary = trainer.fit()
        ...     print(summary.validation, trainer.state.step)

    Args:
        config: YAML file of the run, its settings as a mapping, or a `RunConfig`.
        settings: changes by dotted names, such as {"optimizer.peak_learning_rate": 1e-3}.
        model: function at the top of a module that returns a `geojax.models.Decoder`; the config's
            section `model` holds its arguments. None: the config says it.
        log: takes each line of what the command prints, such as `print`; None: nothing is said.

    Raises:
        UserError: the config does not fit the devices, the data or the checkpoint.
        RunError: other processes are lost.
    """

    def __init__(
        self,
        config: RunConfig | Mapping[str, Any] | str | Path,
        settings: Mapping[str, Any] | None = None,
        *,
        model: Callable[..., Decoder] | None = None,
        log: Log | None = None,
    ):
        of_model = {} if model is None else {"model.module": _function_name(model)}
        config = _loaded(config, {**(settings or {}), **of_model})
        processes = ProcessSettings(simulated_devices=config.simulate_devices)
        place = start(config, processes)
        check_sources(config.data)
        said = log or (lambda line: None)
        said(f"geojax {geojax.__version__}: {place.mesh_line}")
        island, topology = place.island, config.load_topology()
        path = RunDirectory.step_file(own_directory(config, island))
        step, kept = step_of_run(config, topology, path, SERVICES, said, island, processes)
        super().__init__(config, step, SERVICES, island=island, processes=processes, log=log)
        keep(kept, self.directory.step, said)

    def close(self) -> None:
        """Wait for what is being written, and for the other processes of the run."""
        super().close()
        runtime.finish()


def _loaded(
    config: RunConfig | Mapping[str, Any] | str | Path, settings: Mapping[str, Any]
) -> RunConfig:
    if isinstance(config, str | Path):
        overrides = [f"--{name}={json.dumps(value)}" for name, value in settings.items()]
        return RunConfig.load(Path(config), overrides)
    if isinstance(config, RunConfig):
        config = config.model_dump(exclude_unset=True)
    content = dict(config)
    for name, value in settings.items():
        *sections, last = name.split(".")
        place = content
        for section in sections:
            place[section] = dict(place.get(section, {}))
            place = place[section]
        place[last] = value
    return validate(RunConfig, content, "config")


def _function_name(function: Callable[..., Any]) -> str:
    """Return the `module` of a function at the top of its module.

    Raises:
        UserError: it stands elsewhere, or is no function.
    """
    name = getattr(function, "__qualname__", type(function).__name__)
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    if getattr(module, name, None) is not function:
        raise UserError(
            f"model: {name} is no function at the top of a module; one that returns the Decoder "
            "would do, so that each process can call it"
        )
    return f"{function.__module__}:{name}"
