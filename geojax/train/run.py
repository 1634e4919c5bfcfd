"""A whole run of `geojax train`, from its config to the summary."""

import contextlib
import functools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import rich.console
from jax.sharding import Mesh

import geojax
from geojax import runtime
from geojax.cache import cache_folder
from geojax.checkpoint import Checkpointer, RunDirectory
from geojax.checkpoint.reading.base_weights import BASE_WEIGHTS, fingerprint, refuse_other_base
from geojax.checkpoint.reading.compatibility import refuse_other_model
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.config.run_config import RunConfig
from geojax.config.vocabulary import padding_note
from geojax.data import Corpus, Loader
from geojax.data.corpus import check_sources
from geojax.data.verification import verify
from geojax.errors import UserError
from geojax.islands.exchange import Exchange
from geojax.islands.island_plan import (
    island_plan,
    make_site_mesh,
    own_stages,
    sequences_of_site,
)
from geojax.islands.site_state import SiteState
from geojax.islands.stage_transport import between_sites
from geojax.mesh import leads_site, site_names
from geojax.models.huggingface import HuggingFaceWeights, other_settings
from geojax.quantities import quantity
from geojax.runtime.advice.link_advice import advice_of_process
from geojax.runtime.compilation import CompilationCounter
from geojax.runtime.environment.cluster_env import complete
from geojax.runtime.environment.island_env import IslandSettings, island_settings
from geojax.step.batches import sequences_of_process
from geojax.step.config_plan import make_run_mesh, step_plan
from geojax.step.program import STEP_NAME
from geojax.step.resolved import MemoryVerdict, Step
from geojax.step.state import TrainState
from geojax.step.step_file import origin_of, write_step
from geojax.topology import Process, Topology
from geojax.train.adapt.comparison import PlanComparison, plan_of_step
from geojax.train.adapt.replan import (
    LinkAgreement,
    LinksOfIslands,
    LinksOfOneProgram,
    Replanning,
)
from geojax.train.agreed_step import KeptStep, agreed_step, kept_or_resolved
from geojax.train.compiled_run import CompiledRun
from geojax.train.islands.island_run import UPDATE_NAME, IslandRun
from geojax.train.joined_sites import (
    joined_sites,
    refuse_other_weights,
    require_sites,
    saves_of_sites,
)
from geojax.train.metrics import MetricsWriter
from geojax.train.planning import Planning
from geojax.train.report import Progress, draw_loss_curve, summary_table
from geojax.train.sample import sample_texts
from geojax.train.saved.resume import (
    changed_settings,
    jump_note,
    refuse_earlier_version,
    refuse_other_schedule,
    schedule_note,
    warmup_note,
    with_saved_model,
    with_saved_schedule,
)
from geojax.train.training_loop import TrainingLoop
from geojax.train.writing.background_writer import BackgroundWriter
from geojax.train.writing.console import run_console
from geojax.transport import Transport


def train(
    config: RunConfig,
    processes: runtime.ProcessSettings,
    planning: Planning,
    *,
    require_checkpoint: bool = False,
) -> int:
    """Train a model on all processes of the run together.

    A run directory that holds a checkpoint is resumed; the same steps follow as if it had never
    stopped.

    Args:
        config: the run.
        processes: which process of the run this is.
        planning: makes the run's choices.
        require_checkpoint: refuse to start from scratch.

    Returns:
        The exit code: 0 at the end of the run, 130 after Ctrl-C.

    Raises:
        UserError: the config does not fit the devices, the data or the checkpoint.
        RunError: the run diverged or lost its peers.
    """
    started = time.monotonic()
    _require_known_site(config, complete(processes, os.environ).site)
    island = _island_of(config, processes)
    everyone = runtime.start(processes)
    why_no_cache = runtime.enable_compilation_cache(cache_folder() / "xla")
    jax.config.update("jax_enable_x64", config.precision == "fp64")
    first = jax.process_index() == 0
    with (
        run_console(quiet=not first) as console,
        runtime.translate_collective_errors(),
        contextlib.ExitStack() as stack,
    ):
        if why_no_cache is not None:
            console.print(why_no_cache)
        code = _train(
            config,
            processes,
            planning,
            island,
            everyone,
            console,
            stack,
            started,
            require_checkpoint,
        )
    runtime.finish()
    return code


def _train(
    config: RunConfig,
    processes: runtime.ProcessSettings,
    planning: Planning,
    island: IslandSettings | None,
    everyone: Sequence[Process],
    console: rich.console.Console,
    stack: contextlib.ExitStack,
    started: float,
    require_checkpoint: bool,
) -> int:
    """Train on the processes that have come together; `stack` is left at the end."""
    first = jax.process_index() == 0
    # Errors of config, layout and data are raised before there is a run directory, and those that
    # need no device before the step is traced.
    check_sources(config.data)
    # A run that goes on from a checkpoint needs no weights but frozen ones.
    fresh = not RunDirectory.is_there(config.run_directory)
    weights = None
    if fresh or config.model.lora is not None:
        weights = _open_initial_weights(config)
    if island is None and jax.process_count() == 1 and _is_trained(config):
        console.print(_nothing_to_train(config.steps, config))
        return 0
    topology = config.load_topology()
    own_path = config.run_directory if island is None else config.run_directory / island.site
    with _status(console, "resolving the step"):
        resolved, kept = _resolved_step(config, topology, own_path, planning, console)
    show_memory(config, resolved.memory, console.print)
    if island is None:
        mesh = make_run_mesh(config)
        plan = step_plan(config, resolved, mesh)
        sequences = sequences_of_process(plan, config.batch.global_batch_size)
    else:
        mesh = make_site_mesh(config)
        plan = island_plan(config, resolved.layout, mesh)
        sequences = sequences_of_site(config, plan, island.sites.index(island.site))
    if topology is not None and island is None:
        for line in advice_of_process(topology, everyone, jax.process_index(), os.environ):
            print(line, flush=True)
    corpus = Corpus.open(config.data, progress=first)
    loader = _open_loader(config, corpus, sequences)
    directory = stack.enter_context(_run_directory(config, island))
    if first:
        directory.lock()
    files = stack.enter_context(BackgroundWriter(directory.path, console.print))
    # It is left last but for the writer: a hang at the end is one too.
    watchdog = stack.enter_context(runtime.Watchdog(config.watchdog))
    transport = None
    if island is not None:
        transport = stack.enter_context(
            joined_sites(
                config,
                resolved,
                plan,
                island,
                complete(processes, os.environ),
                corpus.contents,
            )
        )
        watchdog.missing = transport.missing_from_peer
    watchdog.begin("start")
    if leads_site(mesh):  # where it fails, the processes of all sites are told
        verify([source.prepared for source in corpus.sources], progress=first)
    checkpointer = stack.enter_context(
        _open_checkpoints(config, directory, mesh, topology, console, transport)
    )
    newest = checkpointer.newest()
    refuse_earlier_version(directory.checkpoints, newest)
    if newest is not None and int(newest["step"]) > config.steps:
        raise UserError(_nothing_to_train(int(newest["step"]), config))
    if newest is None and weights is None and not fresh:
        weights = _open_initial_weights(config)
    config = with_saved_model(config, newest)
    if newest is None and weights is not None and transport is not None:
        to_sites = between_sites(transport, config.mesh.dc)
        refuse_other_weights(to_sites, mesh, fingerprint(weights))
    if newest is not None:
        model = config.model.model_dump(mode="json")
        refuse_other_model(directory.checkpoints / str(newest["step"]), newest["model"], model)
    given, config = config, with_saved_schedule(config, newest)
    counted, programs = STEP_NAME, 1
    if island is not None:
        counted, programs = UPDATE_NAME, len(own_stages(mesh))
    compilations = stack.enter_context(CompilationCounter(counted, programs))
    validate = bool(loader.validation_names)
    trainer: CompiledRun | IslandRun
    if transport is None:
        with _status(console, "compiling the step"):
            trainer = CompiledRun.build(config, resolved, plan, validate=validate)
    else:
        trainer = IslandRun.build(
            config,
            resolved,
            plan,
            transport,
            planning.draw_timeline,
            console.print,
            files.put,
        )
    if first and (programs_in_fp8 := trainer.fp8_programs):
        unread = planning.check_products(programs_in_fp8, config.model, plan)
        if unread is not None:
            console.print(f"note: the step's FP8 products were not checked: {unread}")
    # A process that compiles reaches the first collective long after one with a warm cache, and
    # the collective times out after half a minute.
    runtime.barrier("compiled", timeout_seconds=config.watchdog.first_step_seconds)
    layout, *choices = trainer.describe()
    console.print(f"geojax {geojax.__version__}: {layout}", *choices, sep="\n")
    for note in (padding_note(config.model.vocab_size, corpus.tokenizer), warmup_note(config)):
        if note is not None:
            console.print(note)

    metadata = _metadata(config, loader)
    if config.model.lora is not None:
        assert weights is not None, "adapters have weights to adapt"
        metadata[BASE_WEIGHTS] = fingerprint(weights)
    state, start, consumed = _restore_or_start(
        trainer,
        given,
        checkpointer,
        newest,
        directory,
        metadata,
        console,
        require_checkpoint,
        weights,
    )
    if start >= config.steps:
        console.print(_nothing_to_train(start, config))
    # Some collectives time out when their ranks start far apart: all compile, then wait here.
    runtime.barrier("ready to train", timeout_seconds=config.watchdog.first_step_seconds)
    if first:
        if kept is not None and kept.is_new:
            _write_step(kept, directory, console)
        files.put(
            directory.config.name,
            functools.partial(directory.write_config, config.model_dump(mode="json")),
        )
    with contextlib.ExitStack() as training:
        writer = MetricsWriter(directory, start, files) if first else None
        own_site = island.site if island is not None else site_names(mesh, topology)[0]
        comparison = _comparison(trainer, topology, own_site, writer, console)
        loop: TrainingLoop[Any] = TrainingLoop(
            trainer=trainer,
            config=config,
            loader=loader,
            checkpointer=checkpointer,
            writer=writer,
            directory=directory if first else None,
            progress=training.enter_context(Progress(console, config.steps, start)),
            stop_signals=training.enter_context(runtime.StopSignals()),
            watchdog=watchdog,
            log=console.print,
            metadata=metadata,
            compilations=compilations,
            comparison=comparison,
            replanning=_replanning(trainer, topology, own_site, comparison, planning, console),
        )
        before_training = time.monotonic()
        state = loop.run(state, start, consumed)
        training_seconds = time.monotonic() - before_training
        watchdog.begin("end", int(state.step))
    if loop.stopped_early:
        console.print(
            f"stopped at step {int(state.step)}, which is saved in {directory.path}; the same "
            "command goes on from there"
        )
    else:
        seconds = (training_seconds, time.monotonic() - started)
        trained_by = loop.trainer
        assert isinstance(trained_by, CompiledRun | IslandRun), "it is planned anew as it was"
        _show_result(trained_by, loop, state, corpus, directory, files, console, seconds)
    return loop.exit_code


def _resolved_step(
    config: RunConfig,
    topology: Topology | None,
    directory: Path,
    planning: Planning,
    console: rich.console.Console,
) -> tuple[Step, KeptStep | None]:
    """Agree on the run's step; process 0 also learns what becomes of the file in `directory`."""
    kept = None

    def resolve() -> Step:
        nonlocal kept
        devices = jax.devices()
        kept = kept_or_resolved(
            RunDirectory.step_file(directory),
            origin_of(config, topology, devices),
            lambda: planning.resolve(config, topology, devices, console.print),
        )
        return kept.step

    return agreed_step(resolve, config.watchdog.first_step_seconds), kept


def show_memory(config: RunConfig, verdict: MemoryVerdict, log: Callable[[str], None]) -> None:
    """Log the comparison of a step's memory with its devices'.

    Raises:
        UserError: it does not fit, and `config.preflight` says to refuse it.
    """
    if verdict.kind == "fits":
        log(f"memory: {verdict.line}")
    elif verdict.kind == "does not fit":
        if config.preflight == "refuse":
            raise UserError(f"preflight: {verdict.line}; --preflight warn would start it anyway")
        log(f"warning: preflight: {verdict.line}")


def _write_step(kept: KeptStep, directory: RunDirectory, console: rich.console.Console) -> None:
    earlier = write_step(kept.step, directory.step)
    if earlier is not None:
        console.print(
            f"{_shown(directory.step)}: resolved anew, for other {kept.replaces}; the earlier one "
            f"is {earlier.name}"
        )


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
        raise UserError(_nothing_to_train(newest.step, config))
    return newest.step == config.steps


def _nothing_to_train(step: int, config: RunConfig) -> str:
    return (
        f"nothing to train: the run is at step {step}, and steps is {config.steps}; raise it to go "
        "on"
    )


def _open_initial_weights(config: RunConfig) -> HuggingFaceWeights | None:
    if config.initial_weights is None:
        return None
    return HuggingFaceWeights(config.initial_weights, config.model.base)


def _has_islands(config: RunConfig) -> bool:
    return config.dc.join == "islands"


def _run_directory(config: RunConfig, island: IslandSettings | None) -> RunDirectory:
    """Make the run's directory, or an island's, whose checkpoints are parts of the run's.

    Raises:
        UserError: it cannot be made.
    """
    if island is None:
        return RunDirectory(config.run_directory)
    return RunDirectory(config.run_directory / island.site, config.run_directory / "checkpoints")


def _open_loader(config: RunConfig, corpus: Corpus, sequences: Sequence[int]) -> Loader:
    return Loader(
        corpus,
        sequence_length=config.batch.sequence_length,
        global_batch_size=config.batch.global_batch_size,
        sequences=sequences,
        seed=config.seed,
        vocab_size=config.model.vocab_size,
        validation_sequences=config.evaluation.sequences,
    )


def _island_of(config: RunConfig, processes: runtime.ProcessSettings) -> IslandSettings | None:
    """Return this process's site among islands; None in one program."""
    if not _has_islands(config):
        return None
    island = island_settings(os.environ, processes.site)
    require_sites(config, island)
    return island


def _require_known_site(config: RunConfig, site: str | None) -> None:
    topology = config.load_topology()
    if site is not None and topology is not None:
        topology.site(site)  # refuses a name that it does not know


def _open_checkpoints(
    config: RunConfig,
    directory: RunDirectory,
    mesh: Mesh,
    topology: Topology | None,
    console: rich.console.Console,
    transport: Transport | None,
) -> Checkpointer:
    sites, own, held = None, None, None
    if transport is not None:
        to_sites = between_sites(transport, config.mesh.dc)
        sites, own = to_sites.site_names, to_sites.site_names[to_sites.site]
        held = saves_of_sites(to_sites, mesh)
    elif config.checkpoint.per_site:
        sites = site_names(mesh, topology)
    links = topology.links if topology is not None else ()
    bandwidths = [link.towards(site).bytes_per_second for link in links for site in link.sites]
    return Checkpointer(
        directory.checkpoints,
        mesh,
        sites=sites,
        island=own,
        saves_of_sites=held,
        keep=config.checkpoint.keep,
        interval=config.checkpoint.interval,
        interval_minutes=config.checkpoint.interval_minutes,
        link_bytes_per_second=min(bandwidths, default=None),
        report=console.print,
    )


def _comparison(
    trainer: CompiledRun | IslandRun,
    topology: Topology | None,
    site: str,
    writer: MetricsWriter | None,
    console: rich.console.Console,
) -> PlanComparison | None:
    """Compare the run's steps with its plan; None: it has none, or another process does."""
    plan = None if writer is None else plan_of_step(trainer.resolved, topology, site)
    if plan is None or writer is None:
        return None
    interval = trainer.config.adapt.interval
    return PlanComparison(plan, interval, trainer.measured_links, console.print, writer.write)


def _replanning(
    trainer: CompiledRun | IslandRun,
    topology: Topology | None,
    site: str,
    comparison: PlanComparison | None,
    planning: Planning,
    console: rich.console.Console,
) -> Replanning | None:
    """Plan anew for links that change; None: nobody asked for it, or no plan is made by a link.

    Raises:
        UserError: the topology does not describe a link.
    """
    config, mesh = trainer.config, trainer.plan.mesh
    if topology is None or not config.adapt.replan or config.mesh.dc == 1:
        return None
    timeout = config.watchdog.first_step_seconds

    def resolve(changed: Topology, done: int) -> Step:
        devices = jax.devices()
        return agreed_step(
            lambda: planning.resolve(config, changed, devices, console.print),
            timeout,
            f"step after {done}",
        )

    links: LinkAgreement
    if isinstance(trainer, IslandRun):
        names = tuple(trainer.transport.site_names)
        links = LinksOfIslands(Exchange(trainer.transport, "links"), mesh, names)
    else:
        links = LinksOfOneProgram(mesh, site_names(mesh, topology), topology)
    return Replanning(topology, site, links, resolve, comparison, console.print, timeout)


def _metadata(config: RunConfig, loader: Loader) -> dict[str, Any]:
    return {
        "model": config.model.model_dump(mode="json"),
        "data": loader.fingerprint,
        "config": config.model_dump(mode="json"),
        "version": geojax.__version__,
    }


class _Start(NamedTuple):
    """State to train from, and how far that training has come."""

    state: TrainState | SiteState
    step: int
    consumed_sequences: int


def _restore_or_start(
    trainer: CompiledRun | IslandRun,
    given: RunConfig,
    checkpointer: Checkpointer,
    newest: dict[str, Any] | None,
    directory: RunDirectory,
    metadata: dict[str, Any],
    console: rich.console.Console,
    require_checkpoint: bool,
    weights: HuggingFaceWeights | None,
) -> _Start:
    """Restore the newest checkpoint and log what differs in this run, or begin from scratch."""
    if newest is None:
        if require_checkpoint:
            raise UserError(f"{directory.path}: there is no checkpoint to resume from")
        if weights is not None:
            console.print(f"starting from the weights in {weights.folder}")
            if others := other_settings(weights.folder, trainer.config.model):
                console.print(
                    f"note: the config.json there has other values of {', '.join(others)}, which "
                    "the weights were trained with"
                )
        return _Start(trainer.initial_state(weights), 0, 0)
    config = trainer.config
    frozen = weights if config.model.lora is not None else None
    state, saved = trainer.restore(checkpointer, metadata["model"], frozen)
    if frozen is not None:
        refuse_other_base(frozen.folder, saved[BASE_WEIGHTS], metadata[BASE_WEIGHTS])
    step = int(saved["step"])
    refuse_earlier_version(directory.checkpoints / str(step), saved)
    refuse_other_schedule(directory.checkpoints, saved, given, config)
    console.print(f"resuming from step {step} in {directory.path}")
    for change in changed_settings(saved["config"], config):
        console.print(f"changed since step {step}: {change}")
    for note in (schedule_note(saved["config"], config), jump_note(saved, config)):
        if note is not None:
            console.print(note)
    if saved["data"] != metadata["data"]:
        console.print(
            "note: the data, the seed or the sequence length differ from the checkpoint's; from "
            "this step on the run uses the new ones"
        )
    return _Start(state, step, int(saved["consumed_sequences"]))


def _show_result(
    trainer: CompiledRun | IslandRun,
    loop: TrainingLoop[Any],
    state: Any,
    corpus: Corpus,
    directory: RunDirectory,
    files: BackgroundWriter,
    console: rich.console.Console,
    seconds: tuple[float, float],
) -> None:
    """Show sample, loss curve and summary; every process takes part in gathering the weights."""
    config, step = trainer.config, int(state.step)
    reason = trainer.unsampled_reason() if config.sample.prompts else "no prompt is given"
    weights = trainer.gather_full_params(state) if reason is None else None
    if jax.process_index() != 0:
        return
    files.put(
        directory.loss_curve.name,
        functools.partial(draw_loss_curve, directory.metrics, directory.loss_curve),
    )
    if config.sample.prompts and reason is not None:
        console.print(f"note: no sample is written: {reason}")
    elif config.sample.prompts:
        with _status(console, "writing a sample"):
            texts = sample_texts(
                weights, config.model.base, corpus.tokenizer, config.sample, config.seed
            )
        sample = "\n\n".join(texts) + "\n"
        files.put(
            directory.samples.name,
            functools.partial(directory.samples.write_text, sample, encoding="utf-8"),
        )
        console.print("\nThe model writes:\n", *texts, "", sep="\n")
    console.print(
        summary_table(
            f"after step {step}",
            {
                **_pace(loop, seconds),
                **_validation_entries(loop),
                "steps skipped": int(state.skipped),
                "step compiled": "once"
                if (count := loop.compilations.count) == 1
                else f"{count} times",
                **_cross_site(trainer.facts.cross_site_bytes),
                **{f"link to {site}": totals for site, totals in loop.links.items()},
                "loss curve": _shown(directory.loss_curve),
                "metrics": f"{_shown(directory.metrics)}, tensorboard --logdir "
                f"{_shown(directory.tensorboard)}",
                "checkpoint": f"step {step} in {_shown(directory.checkpoints)}",
            },
        )
    )


def _pace(loop: TrainingLoop[Any], seconds: tuple[float, float]) -> dict[str, str]:
    if not loop.median_tokens_per_second:
        return {}
    pace = quantity(loop.median_tokens_per_second, "tokens/s")
    return {"trained": f"{seconds[0]:.0f} s of {seconds[1]:.0f} s, median {pace}"}


def _cross_site(sent: float | None) -> dict[str, str]:
    if sent is None:
        return {}
    return {
        "cross-site": f"predicted {quantity(sent, 'B')} over dc, a step of a site in each direction"
    }


def _validation_entries(loop: TrainingLoop[Any]) -> dict[str, str]:
    entries = {}
    for name, points in loop.validation.items():
        (first, before), (last, after) = points[0], points[-1]
        change = f"{before:.4f} -> {after:.4f} ({after / before - 1:+.1%})"
        entries[f"validation '{name}'"] = change if last > first else f"{after:.4f}"
    return entries


def _status(console: rich.console.Console, doing: str) -> contextlib.AbstractContextManager[Any]:
    """Show what takes long until it is done; a log has a line about it at its beginning."""
    if not console.is_terminal:  # where a status would end with an empty line
        console.print(doing)
        return contextlib.nullcontext()
    return console.status(doing)


def _shown(path: Path) -> str:
    """Make a path relative to the current folder, if it lies below."""
    return os.path.relpath(path) if path.resolve().is_relative_to(Path.cwd()) else str(path)
