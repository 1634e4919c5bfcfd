"""A whole run of `geojax train`, from its config to the summary."""

import contextlib
import os
import time
from typing import Any

import jax
import rich.console

from geojax import runtime
from geojax.checkpoint import RunDirectory
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.config.run_config import RunConfig
from geojax.data.corpus import check_sources
from geojax.errors import UserError
from geojax.paths import shown_path
from geojax.quantities import quantity
from geojax.train.agreed_step import keep
from geojax.train.islands.running import facts_of_running
from geojax.train.opened_run import own_directory
from geojax.train.report import Progress, summary_table
from geojax.train.run_origin import nothing_to_train
from geojax.train.run_step import step_of_run
from geojax.train.services import Services
from geojax.train.start import Started, start
from geojax.train.trainer import Summary, Trainer
from geojax.train.writing.console import run_console


def train(
    config: RunConfig,
    processes: runtime.ProcessSettings,
    services: Services,
    *,
    require_checkpoint: bool = False,
) -> int:
    """Train a model on all processes of the run together.

    A run directory that holds a checkpoint is resumed; the same steps follow as if it had never
    stopped.

    Args:
        config: the run.
        processes: which process of the run this is.
        services: makes the run's choices.
        require_checkpoint: refuse to start from scratch.

    Returns:
        The exit code: 0 at the end of the run, 130 after Ctrl-C.

    Raises:
        UserError: the config does not fit the devices, the data or the checkpoint.
        RunError: the run diverged or lost its peers.
    """
    started = time.monotonic()
    with runtime.ProfileSignal() as profile_signal:
        place = start(config, processes)
        first = jax.process_index() == 0
        with (
            run_console(quiet=not first) as console,
            runtime.translate_collective_errors(),
            contextlib.ExitStack() as stack,
        ):
            console.print(place.mesh_line)
            if place.why_no_cache is not None:
                console.print(place.why_no_cache)
            code = _train(
                config,
                processes,
                services,
                place,
                console,
                stack,
                started,
                require_checkpoint,
                profile_signal,
            )
        runtime.finish()
    return code


def _train(
    config: RunConfig,
    processes: runtime.ProcessSettings,
    services: Services,
    place: Started,
    console: rich.console.Console,
    stack: contextlib.ExitStack,
    started: float,
    require_checkpoint: bool,
    profile_signal: runtime.ProfileSignal,
) -> int:
    """Train on the processes that have come together; `stack` is left at the end."""
    island = place.island
    # Errors of config, layout and data are raised before there is a run directory, and those that
    # need no device before the step is traced.
    check_sources(config.data)
    if island is None and jax.process_count() == 1 and _is_trained(config):
        console.print(nothing_to_train(config.steps, config))
        return 0
    topology = config.load_topology()
    running = None
    if island is not None and (running := facts_of_running(config, island)) is not None:
        console.print(f"the run goes on without site {island.site}, which returns to it")
    with _status(console, "resolving the step"):
        path = RunDirectory.step_file(own_directory(config, island))
        told = None if running is None else running.resolved()
        resolved, kept = step_of_run(
            config, topology, path, services, console.print, island, processes, told
        )
    if topology is not None and island is None:
        own = jax.process_index()
        for line in services.link_advice(topology, place.everyone, own, os.environ):
            print(line, flush=True)
    trainer = stack.enter_context(
        Trainer(
            config,
            resolved,
            services,
            island=island,
            processes=processes,
            log=console.print,
            status=lambda doing: _status(console, doing),
            require_checkpoint=require_checkpoint,
            running=running,
        )
    )
    keep(kept, trainer.directory.step, console.print)
    consumed = trainer.consumed_sequences
    end = config.batch.sizes.consumed_after(config.steps - trainer.step_number, consumed)
    with (
        Progress(console, config.steps, trainer.step_number, consumed, end) as progress,
        runtime.StopSignals() as stop_signals,
    ):
        summary = trainer.fit(progress, stop_signals, profile_signal)
    if summary.stopped_early:
        console.print(
            f"stopped at step {summary.step}, which is saved in {trainer.directory.path}; the same "
            "command goes on from there"
        )
    elif jax.process_index() == 0:
        _show_result(trainer, summary, console, time.monotonic() - started)
    return summary.exit_code


def _is_trained(config: RunConfig) -> bool:
    """Return True if the newest checkpoint is that of the last step, and undamaged.

    Raises:
        UserError: it is of a later step.
    """
    try:
        newest = SavedModel.open(config.run_directory, log=lambda line: None)
        if newest.step == config.steps:
            newest.verify()
    except (OSError, UserError):
        return False  # the restore will say why
    if newest.step > config.steps:
        raise UserError(nothing_to_train(newest.step, config))
    return newest.step == config.steps


def _show_result(
    trainer: Trainer, summary: Summary, console: rich.console.Console, seconds: float
) -> None:
    """Show samples and summary, on the first process."""
    directory = trainer.directory
    if summary.unsampled is not None:
        console.print(f"note: no sample is written: {summary.unsampled}")
    elif summary.texts:
        console.print("\nThe model writes:\n", *summary.texts, "", sep="\n")
    count = summary.compilations
    console.print(
        summary_table(
            f"after step {summary.step}",
            {
                **_pace(summary, seconds),
                **_validation_entries(summary),
                "steps skipped": summary.skipped,
                "step compiled": "once" if count == 1 else f"{count} times",
                **_cross_site(trainer.runtime.links.sent_bytes),
                **{f"link to {site}": totals for site, totals in summary.links.items()},
                "loss curve": shown_path(directory.loss_curve),
                "metrics": _metrics(trainer),
                "checkpoint": f"step {summary.step} in {shown_path(directory.checkpoints)}",
            },
        )
    )


def _metrics(trainer: Trainer) -> str:
    directory = trainer.directory
    if "tensorboard" not in trainer.config.trackers:
        return shown_path(directory.metrics)
    return (
        f"{shown_path(directory.metrics)}, tensorboard --logdir {shown_path(directory.tensorboard)}"
    )


def _pace(summary: Summary, seconds: float) -> dict[str, str]:
    if not summary.tokens_per_second:
        return {}
    pace = quantity(summary.tokens_per_second, "tokens/s")
    return {"trained": f"{summary.training_seconds:.0f} s of {seconds:.0f} s, median {pace}"}


def _validation_entries(summary: Summary) -> dict[str, str]:
    entries = {}
    for name, points in summary.validation.items():
        (first, before), (last, after) = points[0], points[-1]
        change = f"{before:.4f} -> {after:.4f} ({after / before - 1:+.1%})"
        entries[f"validation '{name}'"] = change if last > first else f"{after:.4f}"
    return entries


def _cross_site(sent: float | None) -> dict[str, str]:
    if sent is None:
        return {}
    return {
        "cross-site": f"predicted {quantity(sent, 'B')} over dc, a step of a site in each direction"
    }


def _status(console: rich.console.Console, doing: str) -> contextlib.AbstractContextManager[Any]:
    """Show what takes long until it is done; a log has a line about it at its beginning."""
    if not console.is_terminal:  # where a status would end with an empty line
        console.print(doing)
        return contextlib.nullcontext()
    return console.status(doing)
