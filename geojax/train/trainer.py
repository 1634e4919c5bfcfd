"""The trainer of a run: data, state, checkpoints and the loop, over one runtime or another."""

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

import jax

from geojax import runtime
from geojax.config.run_config import RunConfig
from geojax.config.vocabulary import padding_note
from geojax.errors import UserError
from geojax.islands.island_plan import own_stages
from geojax.job.cluster_env import ProcessSettings, complete
from geojax.job.island_env import IslandSettings
from geojax.mesh import leads_site, site_names
from geojax.runtime.compilation import CompilationCounter
from geojax.step.program import STEP_NAME
from geojax.step.resolved import Step
from geojax.step.step_file import Devices
from geojax.topology import Topology
from geojax.train import run_state
from geojax.train.adapt.comparison import PlanComparison, plan_of_step
from geojax.train.adapt.replan import Replanning
from geojax.train.agreed_step import agreed_step
from geojax.train.attempt import Attempt, StartSeconds
from geojax.train.compiled_run import CompiledRun
from geojax.train.events import EventKind
from geojax.train.facts import run_facts
from geojax.train.goodput import process_began
from geojax.train.islands.island_run import UPDATE_NAME, IslandRun
from geojax.train.islands.membership import begin_membership, open_door
from geojax.train.islands.running import RunningFacts
from geojax.train.islands.time_outs import time_outs
from geojax.train.local_product import agreed_count, local_product
from geojax.train.metrics import MetricsWriter
from geojax.train.opened_run import opened_run
from geojax.train.report import Progress, draw_loss_curve
from geojax.train.resume import ramp_note, warmup_note
from geojax.train.run_checkpoints import run_metadata
from geojax.train.run_origin import RunOrigin, first_weights, nothing_to_train
from geojax.train.runtime import Batch, Runtime
from geojax.train.services import Log, Services
from geojax.train.step_profiler import StepProfiler
from geojax.train.training_loop import StartPoint, TrainingLoop, mean_loss, resized


@dataclasses.dataclass(frozen=True)
class Summary:
    """The result of a run so far."""

    step: int
    """Steps done."""
    stopped_early: bool
    """True if a signal ended the run before its last step."""
    exit_code: int
    """Exit code for the shell."""
    training_seconds: float
    tokens_per_second: float
    """Median over the steps."""
    skipped: int
    """Steps with a loss or gradient that was not finite."""
    compilations: int
    """Compilations of the step."""
    validation: Mapping[str, list[tuple[int, float]]]
    """Steps and losses of each validation set, by its name."""
    links: Mapping[str, str]
    """Traffic with each other site, by its name."""
    texts: tuple[str, ...] = ()
    """Samples, with their prompts."""
    unsampled: str | None = None
    """Reason why no sample was written."""


class Trainer:
    """A run on the processes that have come together.

    All processes of the run make one and call its methods together, in the same order. It raises
    errors, and says nothing but to `log`.

    Example:
        >>> with Trainer(config, step) as trainer:  # doctest: +SKIP
        ...     summary = trainer.fit()

    Args:
        config: the run of all sites.
        step: its choices.
        services: functions for links that change, FP8, timelines, samples and builtin data; None:
            the run does without.
        island: place of this process among sites with runtimes of their own; None: there are none.
        processes: settings of this process among those of the run.
        log: shows a line to the user; None: nothing is said.
        status: returns a context in which something takes long, from a line about it.
        require_checkpoint: refuse to start from scratch.
        running: facts of the run that goes on without this site, which returns; None: all start.

    Raises:
        UserError: the config does not fit the devices, the data or the checkpoint.
        RunError: other processes are lost.
    """

    def __init__(
        self,
        config: RunConfig,
        step: Step,
        services: Services | None = None,
        *,
        island: IslandSettings | None = None,
        processes: ProcessSettings | None = None,
        log: Log | None = None,
        status: Callable[[str], contextlib.AbstractContextManager[Any]] = (
            lambda line: contextlib.nullcontext()
        ),
        require_checkpoint: bool = False,
        running: RunningFacts | None = None,
    ):
        self.config, self.resolved, self._services = config, step, services
        self._island, self._status = island, status
        self._running = running
        """Facts of the run, until this site, which returns, takes part again."""
        self._log = log or (lambda line: None)
        self._log_of_process = self._log
        if log is not None and jax.process_index() > 0:  # whose console is quiet
            self._log_of_process = functools.partial(print, flush=True)
        self._shows_progress = log is not None and jax.process_index() == 0
        self._processes = complete(processes or ProcessSettings(), os.environ)
        self._first = jax.process_index() == 0
        _check_profiled(config, jax.process_count())
        self._start_seconds = StartSeconds(process_began())
        self._attempt: Attempt | None = None
        with contextlib.ExitStack() as stack:
            self._open(stack, require_checkpoint)
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: Any) -> None:
        if exception[0] is None:
            self.close()
        else:
            self._stack.__exit__(*exception)

    def close(self) -> None:
        """Wait for what is being written, and leave the other sites."""
        self._stack.close()

    def _open(self, stack: contextlib.ExitStack, require_checkpoint: bool) -> None:
        """Open what the run needs, join the sites, compile, and begin or restore."""
        weights = first_weights(self.config)
        opened = self._opened = stack.enter_context(
            opened_run(
                self.config,
                self.resolved,
                self._services,
                self._island,
                self._processes,
                log=self._log,
                tell=self._tell,
                shows_progress=self._shows_progress,
                returns=self._running is not None,
            )
        )
        self.loader, self.directory = opened.loader, opened.directory
        # A site that returns takes that of the others, who may have other ones.
        running = self._running
        newest = opened.checkpointer.newest() if running is None else running.saved
        origin = RunOrigin.of(
            self.config, opened, weights, newest, require_checkpoint=require_checkpoint
        )
        self.config = origin.config
        self._compile(stack, self.config.batch.sizes.size_at(origin.consumed_sequences))
        self.metadata = run_metadata(self.config, self.loader.fingerprint) | origin.base_weights
        self.state, self.step_number, self.consumed_sequences = self._begun(origin)
        if opened.membership is not None:
            run = self.runtime
            assert opened.joined is not None, "a site with a membership has joined others"
            assert isinstance(run, IslandRun), "islands go on"
            self._apply_time_outs(run)
            if running is None:
                begin_membership(
                    run,
                    opened.membership,
                    opened.joined,
                    self.metadata,
                    self.step_number,
                    self.consumed_sequences,
                    opened.checkpointer.membership_id,
                )
        # Some collectives time out when their ranks start far apart: all compile, then wait here.
        timeout = self.config.watchdog.first_step_seconds
        with self._start_seconds.timed("waiting"):
            runtime.barrier("ready to train", timeout_seconds=timeout)
        if self._first:
            write = self.directory.write_config
            opened.files.put(
                self.directory.config.name,
                functools.partial(write, self.config.model_dump(mode="json")),
            )

    def _apply_time_outs(self, run: IslandRun) -> None:
        """Check, show and apply the times after which a site that goes on acts."""
        topology, watchdog = self._opened.topology, self._opened.watchdog
        planned = {} if topology is None else topology.links_of(self._site)
        measured, handed = run.links.measured(), run.handed_bytes
        lines, seconds = time_outs(self.config, self._processes, measured, planned, handed)
        self._log("\n".join(lines))
        watchdog.settings = watchdog.settings.model_copy(update={"minimum_seconds": seconds})

    def _compile(self, stack: contextlib.ExitStack, sequences: int) -> None:
        """Build the runtime on all processes, check its products, and describe it."""
        counted, programs = STEP_NAME, 1
        if self._island is not None:
            counted, programs = UPDATE_NAME, len(own_stages(self._opened.mesh))
        self.compilations = stack.enter_context(CompilationCounter(counted, programs))
        with self._start_seconds.timed("compiling"):
            self.runtime: Runtime[Any] = self._compiled(sequences)
        self._check_products()
        # A process that compiles reaches the first collective long after one with a warm cache,
        # and the collective times out after half a minute.
        timeout = self.config.watchdog.first_step_seconds
        with self._start_seconds.timed("waiting"):
            runtime.barrier("compiled", timeout_seconds=timeout)
        self._describe()

    def _compiled(self, sequences: int) -> Runtime[Any]:
        opened = self._opened
        if opened.transport is None:
            validate = bool(self.loader.validation_names)
            with self._status("compiling the step"):
                return CompiledRun.build(
                    self.config, self.resolved, opened.plan, validate=validate, sequences=sequences
                )
        return IslandRun.build(
            self.config,
            self.resolved,
            opened.plan,
            opened.transport,
            None if self._services is None else self._services.draw_timeline,
            self._log,
            opened.files.put,
            sequences=sequences,
            membership=opened.membership,
        )

    def _check_products(self) -> None:
        """Check on the first process that XLA multiplies in FP8 what the recipe asks for."""
        if not self._first or self._services is None:
            return
        if programs := self.runtime.fp8_programs:
            unread = self._services.check_products(programs, self.config.model, self._opened.plan)
            if unread is not None:
                self._log(f"note: the step's FP8 products were not checked: {unread}")

    def _describe(self) -> None:
        self._log("\n".join(self.runtime.describe()))
        vocabulary = padding_note(self.config.model.vocab_size, self._opened.corpus.tokenizer)
        ramp = ramp_note(self.config, self.runtime.sequences)
        for note in (vocabulary, warmup_note(self.config), ramp):
            if note is not None:
                self._log(note)

    def _begun(self, origin: RunOrigin) -> StartPoint[Any]:
        """Restore or begin; a site that returns takes the state of the others."""
        if self._running is None:
            return origin.restored(self.runtime, self._opened, self.metadata, self._log)
        run, running = self.runtime, self._running
        assert isinstance(run, IslandRun), "islands go on"
        batch = next(self.loader.iterate(running.consumed_sequences))
        with self._status("taking the state of the other sites"):
            state = run.take_state(run_state.begin(run), batch, running.save_name)
        step = int(state.step)
        self._log(f"the state of step {step} is here")
        return StartPoint(state, step, running.consumed_at(step, self.config.batch.sizes))

    def _take_part(self) -> StartPoint[Any]:
        """Catch up with a run that goes on without this site, if it returns; return the start."""
        if self._running is not None:
            running, self._running = self._running, None
            self._catch_up(running)
        return StartPoint(self.state, self.step_number, self.consumed_sequences)

    def _catch_up(self, running: RunningFacts) -> None:
        """Do the steps that the other sites have done since their state was taken."""
        run, membership, joined = self.runtime, self._opened.membership, self._opened.joined
        assert isinstance(run, IslandRun), "islands go on"
        assert membership is not None, "islands go on"
        assert joined is not None, "a site with a membership has joined others"
        self._opened.watchdog.begin("start", self.step_number)

        def come_to(step: int) -> None:
            self.consumed_sequences = running.consumed_at(step, self.config.batch.sizes)
            self.loader.read_ahead(self.consumed_sequences)  # all sites wait for the first batch

        come_to(self.step_number)
        self.state = run.catch_up(self.state, come_to)
        self.step_number = int(self.state.step)
        open_door(membership, joined, running)

    def fit(
        self,
        progress: Progress | None = None,
        stop_signals: runtime.StopSignals | None = None,
        profile_signal: runtime.ProfileSignal | None = None,
    ) -> Summary:
        """Train to the last step of the config, validating and saving on the way.

        Args:
            progress: shows the figures of each step; None: nothing does.
            stop_signals: the requests to stop early; None: there are none.
            profile_signal: the requests to profile the next steps; None: there are none.

        Raises:
            RunError: the loss was not finite for too long, no checkpoint could be saved for too
                long, or other processes are lost.
        """
        config, first = self.config, self._first
        if self.step_number >= config.steps:
            self._log(nothing_to_train(self.step_number, config))
        writer = self._writer()
        start, self._start_seconds = self._start_seconds, StartSeconds(time.time())
        if first:
            self._attempt = Attempt.begin(
                self.directory.path, self._opened.files.put, self.step_number, start
            )
        attempt = self._attempt
        comparison = self._comparison(writer)
        loop: TrainingLoop[Any] = TrainingLoop(
            runtime=self.runtime,
            facts=run_facts(
                config,
                self.runtime.plan,
                self.resolved.flops_per_token,
                self.runtime.links.sent_bytes,
                self.runtime.sequences,
            ),
            config=config,
            opened=self._opened,
            save=self._save,
            writer=writer,
            directory=self.directory if first else None,
            progress=progress,
            profiler=StepProfiler(
                self.directory.profile,
                config.profile,
                jax.process_index(),
                self._opened.watchdog,
                self._log_of_process,
                profile_signal,
            ),
            stop_signals=stop_signals,
            log=self._log,
            metadata=self.metadata,
            compilations=self.compilations,
            comparison=comparison,
            replanning=self._replanning(comparison),
            ledger=None if attempt is None else attempt.ledger,
            events=None if attempt is None else attempt.events,
            product=self._product(),
            site=self._site,
        )
        before = time.monotonic()
        with contextlib.nullcontext() if attempt is None else attempt.ending(loop):
            self.state = loop.run(self._take_part)
        seconds = time.monotonic() - before
        self.runtime = loop.runtime
        self.step_number, self.consumed_sequences = int(self.state.step), loop.consumed
        self._opened.watchdog.begin("end", self.step_number)
        if self._opened.trackers is not None:
            self._opened.trackers.exit_code = loop.exit_code
        texts: tuple[str, ...] = ()
        unsampled = None
        if not loop.stopped_early:
            texts, unsampled = self._sampled()
            curve = functools.partial(
                draw_loss_curve, self.directory.metrics, self.directory.loss_curve
            )
            if first:
                self._opened.files.put(self.directory.loss_curve.name, curve)
        return Summary(
            step=self.step_number,
            stopped_early=loop.stopped_early,
            exit_code=loop.exit_code,
            training_seconds=seconds,
            tokens_per_second=loop.median_tokens_per_second,
            skipped=int(self.state.skipped),
            compilations=self.compilations.count,
            validation=loop.validation,
            links={site: str(totals) for site, totals in loop.links.items()},
            texts=texts,
            unsampled=unsampled,
        )

    def _tell(self, kind: EventKind, step: int, text: str) -> None:
        """Show an event of a step to the user, and note it."""
        self._log(f"step {step}: {text}")
        if self._attempt is not None:
            self._attempt.events.note(step, kind, text)

    def _writer(self) -> MetricsWriter | None:
        """Open this process's metrics if it writes any, and start the trackers on the first one."""
        config, process = self.config, jax.process_index()
        if self._opened.trackers is None:
            if config.metrics.processes == "first" and not leads_site(self._opened.mesh):
                return None
            step = self.step_number
            return MetricsWriter(
                self.directory, step, self._opened.files, process=process, tensorboard=False
            )
        writer = MetricsWriter(
            self.directory,
            self.step_number,
            self._opened.files,
            tensorboard="tensorboard" in config.trackers,
            trackers=self._opened.trackers,
        )
        name = config.run_directory.name
        self._opened.trackers.start(
            name if self._island is None else f"{name}/{self._island.site}",
            config.model_dump(mode="json"),
            self.step_number,
            self._site,
        )
        return writer

    def _product(self) -> Callable[[Any], Any] | None:
        """Agree on the timed product; None: no process waits for others in one program."""
        if self._island is not None or jax.process_count() == 1:
            return None
        seconds = self.config.watchdog.first_step_seconds
        return local_product(lambda count: agreed_count(count, seconds), jax.process_index())

    def _sampled(self) -> tuple[tuple[str, ...], str | None]:
        """Write the samples that the config asks for; all processes gather the weights."""
        config = self.config
        if not config.sample.prompts:
            return (), None
        services, model = self._services, config.model.base
        if services is None:
            return (), "the trainer has nothing to write one with"
        if (reason := self.runtime.ungathered_reason()) is not None:
            return (), reason
        weights = self.runtime.whole_weights(self.state)
        if not self._first:
            return (), None
        with self._status("writing a sample"):
            texts = services.sample_texts(
                weights, model, self._opened.corpus.tokenizer, config.sample, config.seed
            )
        samples = self.directory.samples
        self._opened.files.put(
            samples.name,
            functools.partial(samples.write_text, "\n\n".join(texts) + "\n", encoding="utf-8"),
        )
        return tuple(texts), None

    def step(self, batch: Batch) -> dict[str, float]:
        """Train one step on a batch of the caller's, and return its metrics.

        Args:
            batch: this process's sequences of the global batch, as the loader has them behind
                `consumed_sequences`: tokens,
                targets, segment_ids and positions [sequences, S] in int32, loss_mask [sequences, S]
                in float32, row [sequences].
        """
        self._take_part()
        sequences = self.config.batch.sizes.size_at(self.consumed_sequences)
        if sequences != self.runtime.sequences:
            timeout = self.config.watchdog.first_step_seconds
            self.runtime = resized(self.runtime, sequences, self.step_number, self._log, timeout)
        requests = {"stop": False, "save": False}
        others = functools.partial(
            self._opened.site_batches.training, consumed=self.consumed_sequences
        )
        self.state, metrics = self.runtime.step(self.state, batch, requests, others)
        self.step_number += 1
        self.consumed_sequences += sequences
        return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}

    def evaluate(self) -> dict[str, float]:
        """Return the loss on each validation set, by its name."""
        return {
            name: mean_loss(
                [
                    jax.device_get(
                        self.runtime.evaluate(
                            self.state,
                            batch,
                            functools.partial(
                                self._opened.site_batches.validation, name=name, number=number
                            ),
                        )
                    )
                    for number, batch in enumerate(self.loader.validation(name))
                ]
            )
            for name in self.loader.validation_names
        }

    def save(self) -> None:
        """Save the state as the checkpoint of the newest step, and wait for it."""
        metadata = {**self.metadata, "consumed_sequences": self.consumed_sequences}
        self._save(self.runtime, self.step_number, self.state, metadata)
        self._opened.checkpointer.wait()

    def _save(
        self, computes: Runtime[Any], step: int, state: Any, metadata: Mapping[str, Any]
    ) -> None:
        run_state.save(computes, self._opened.checkpointer, step, state, metadata)

    def _comparison(self, writer: MetricsWriter | None) -> PlanComparison | None:
        """Compare the steps with their plan; None: there is none, or another process does."""
        plan = None
        if self._first:
            step = self.resolved.of_batch(self.runtime.sequences)
            plan = plan_of_step(step, self._opened.topology, self._site)
        if plan is None or writer is None:
            return None
        interval, measured = self.config.adapt.interval, self.runtime.links.measured
        tell = functools.partial(self._tell, "deviation")
        return PlanComparison(plan, interval, measured, tell, writer.write)

    @property
    def _site(self) -> str:
        if self._island is not None:
            return self._island.site
        return site_names(self._opened.mesh, self._opened.topology)[0]

    def _replanning(self, comparison: PlanComparison | None) -> Replanning | None:
        """Plan anew for links that change; None: nobody asked for it, or no plan is made by a link.

        Raises:
            UserError: the topology does not describe a link.
        """
        config, topology, services = self.config, self._opened.topology, self._services
        if topology is None or services is None or not config.adapt.replan or config.mesh.dc == 1:
            return None
        timeout = config.watchdog.first_step_seconds
        devices: Devices = jax.devices()
        if self._island is not None:  # of all sites
            devices = [each for own in self.resolved.origin.devices for each in own.described]

        def resolve(changed: Topology, done: int) -> Step:
            return agreed_step(
                lambda: services.resolve(config, changed, devices, self._log),
                timeout,
                f"step after {done}",
            )

        links = self.runtime.links.agreement(topology)
        return Replanning(topology, self._site, links, resolve, comparison, self._log, timeout)


def _check_profiled(config: RunConfig, processes: int) -> None:
    """Check that the processes to profile are there.

    Raises:
        UserError: one is not.
    """
    if (last := max(config.profile.processes)) >= processes:
        raise UserError(
            f"profile.processes: there is no process {last}; processes 0 to {processes - 1} would "
            "do"
        )
