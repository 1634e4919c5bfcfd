"""A whole run, from its config to the summary."""

import os
import time
from pathlib import Path
from typing import Any

import jax
import rich.console

import geojax
from geojax import runtime
from geojax.checkpoint import Checkpointer, RunDirectory
from geojax.data import Corpus, Loader
from geojax.data.standard_library import cache_folder
from geojax.errors import UserError
from geojax.optim import layout
from geojax.train.config import RunConfig
from geojax.train.loop import Loop
from geojax.train.metrics import MetricsWriter
from geojax.train.program import Program
from geojax.train.report import Progress, draw_loss_curve, quantity, summary_table
from geojax.train.sample import sample_texts, whole_weights
from geojax.train.state import TrainState

def train(
    config: RunConfig, processes: runtime.ProcessSettings, *, require_checkpoint: bool = False
) -> int:
    """Train as `config` says, on all processes of the run together.

    A run directory that holds a checkpoint is resumed; the same steps follow as if it had never
    stopped.

    Args:
        config: the run.
        processes: which process of the run this is.
        require_checkpoint: refuse to start from scratch.

    Returns:
        The exit code: 0 at the end of the run, 130 after Ctrl-C.

    Raises:
        UserError: the config does not fit the devices, the data or the checkpoint.
        RunError: the run diverged or lost its peers.
    """
    started = time.monotonic()
    runtime.start(processes)
    runtime.enable_compilation_cache(cache_folder() / "xla")
    jax.config.update("jax_enable_x64", config.precision == "fp64")
    first = jax.process_index() == 0
    console = rich.console.Console(quiet=not first, soft_wrap=True)

    directory = RunDirectory(config.run_directory)
    with directory:
        if first:
            directory.lock()
        # The first process prepares a built-in corpus, the others find it prepared.
        corpus = Corpus.open(config.data, progress=first)
        with console.status("compiling the step"):
            program = Program.build(config)
        loader = Loader(
            corpus,
            sequence=config.batch.sequence,
            global_rows=config.batch.rows,
            rows=program.local_rows,
            seed=config.seed,
            vocabulary_size=config.model.vocabulary,
            validation_rows=config.evaluation.rows,
        )
        console.print(f"geojax {geojax.__version__}: {program.describe()}", highlight=False)
        console.print(runtime.flags_in_force(), highlight=False)

        def say(line: str) -> None:
            console.print(line, highlight=False)

        with Checkpointer(
            directory.checkpoints,
            keep=config.checkpoint.keep,
            every_steps=config.checkpoint.every_steps,
            every_minutes=config.checkpoint.every_minutes,
            report=say,
        ) as checkpointer:
            metadata = _metadata(config, loader)
            state, start = _restore_or_start(
                program, checkpointer, directory, metadata, say, require_checkpoint
            )
            if first:
                directory.write_config(config.model_dump(mode="json"))
            # Some collectives die when ranks come far apart: all compile, then meet.
            runtime.barrier("ready to train", timeout_seconds=config.watchdog.first_step_seconds)
            writer = (
                MetricsWriter(directory.metrics, directory.tensorboard, start) if first else None
            )
            progress = Progress(console, config.steps, start)
            with (
                runtime.StopSignals() as stop_signals,
                runtime.Watchdog(config.watchdog) as watchdog,
            ):
                loop = Loop(
                    program=program,
                    loader=loader,
                    checkpointer=checkpointer,
                    writer=writer,
                    progress=progress,
                    watchdog=watchdog,
                    stop_signals=stop_signals,
                    say=say,
                    metadata=metadata,
                )
                before_training = time.monotonic()
                try:
                    with progress.running():
                        state = loop.run(state, start)
                finally:
                    if writer is not None:
                        writer.close()
                training_seconds = time.monotonic() - before_training
            checkpointer.wait()
        _finish(program, loop, state, corpus, directory, console, training_seconds, started)
    runtime.finish()
    return loop.exit_code


def _metadata(config: RunConfig, loader: Loader) -> dict[str, Any]:
    return {
        "model": config.model.model_dump(mode="json"),
        "data": loader.fingerprint,
        "seed": config.seed,
        "mesh": config.mesh.model_dump(),
        "version": geojax.__version__,
    }


def _restore_or_start(
    program: Program,
    checkpointer: Checkpointer,
    directory: RunDirectory,
    metadata: dict[str, Any],
    say: Any,
    require_checkpoint: bool,
) -> tuple[TrainState, int]:
    """The state to train from, and its step."""
    if not checkpointer.latest_steps():
        if require_checkpoint:
            raise UserError(f"{directory.path}: there is no checkpoint to resume from")
        return program.initial_state(), 0
    wanted = layout.abstract_whole(program.layouts, program.mesh)
    whole, saved = checkpointer.restore(wanted, model=metadata["model"])
    step = int(saved["step"])
    say(f"resuming from step {step} in {directory.path}")
    if saved["data"] != metadata["data"]:
        say(
            "note: data, seed or batch differ from those of the checkpoint; the run goes on with "
            "the new ones from this step"
        )
    return layout.pad(whole, program.layouts, program.mesh), step


def _finish(
    program: Program,
    loop: Loop,
    state: TrainState,
    corpus: Corpus,
    directory: RunDirectory,
    console: rich.console.Console,
    training_seconds: float,
    started: float,
) -> None:
    """What is left to show at the end; weights for the sample are gathered by all processes."""
    config, step = program.config, int(state.step)
    if loop.stopped_early:
        console.print(
            f"stopped at step {step}, which is saved in {directory.path}; the same command goes on "
            "from there",
            highlight=False,
        )
        return
    weights = whole_weights(state, program.layouts, program.plan) if config.sample.prompts else None
    if jax.process_index() != 0:
        return
    curve = directory.path / "loss.png"
    draw_loss_curve(directory.metrics, curve)
    if config.sample.prompts:
        with console.status("writing a sample"):
            texts = sample_texts(
                weights, config.model, corpus.tokenizer, config.sample, config.seed
            )
        (directory.path / "sample.txt").write_text("\n\n".join(texts) + "\n", encoding="utf-8")
        console.print(f"\n{texts[0]}\n", highlight=False, markup=False)
    console.print(
        summary_table(
            f"step {step} of {config.steps}",
            {
                "trained": f"{training_seconds:.0f} s of {time.monotonic() - started:.0f} s, "
                f"median {quantity(loop.median_tokens_per_second, 'tokens/s')}",
                **_validation_rows(loop),
                "skipped": f"{int(state.skipped)} steps",
                "cross-site": f"{quantity(program.bytes_across_sites, 'B')} a step and direction",
                "loss curve": _shown(curve),
                "metrics": f"{_shown(directory.metrics)}, tensorboard --logdir "
                f"{_shown(directory.tensorboard)}",
                "checkpoint": _shown(directory.checkpoints / str(step)),
            },
        )
    )


def _validation_rows(loop: Loop) -> dict[str, str]:
    rows = {}
    for name, points in loop.validation.items():
        (_, before), (_, after) = points[0], points[-1]
        rows[f"validation '{name}'"] = f"{before:.4f} -> {after:.4f} ({after / before - 1:+.1%})"
    return rows


def _shown(path: Path) -> str:
    """Relative to where the command was given, if it lies below."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
