"""The training loop: dispatch steps, note their ends, read them back, validate, save, stop."""

import collections
import contextlib
import dataclasses
import functools
import itertools
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, Generic, Literal, NamedTuple, Self

import jax
import numpy as np

from geojax.checkpoint import RunDirectory
from geojax.config.run_config import RunConfig
from geojax.errors import RunError, UserError
from geojax.file_lock import LockHeldError
from geojax.islands.traffic import LinkTraffic
from geojax.quantities import duration, quantity
from geojax.runtime import StopSignals, barrier, translate_collective_errors
from geojax.runtime.compilation import CompilationCounter
from geojax.runtime.garbage import long_lived_apart
from geojax.train.adapt.comparison import PlanComparison
from geojax.train.adapt.replan import Replanning
from geojax.train.events import EventKind, EventLog
from geojax.train.facts import RunFacts, peak_memory
from geojax.train.goodput import GoodputLedger
from geojax.train.link_figures import (
    LinkTotals,
    link_metrics,
    link_words,
    planned_metrics,
    planned_words,
)
from geojax.train.metrics import MetricsWriter
from geojax.train.opened_run import OpenedRun
from geojax.train.report import Progress
from geojax.train.runtime import Runtime, State
from geojax.train.site_figures import site_metrics, site_words, told_figures
from geojax.train.slowest import SiteWaits, SlowestWatch
from geojax.train.spikes import SpikeDetector
from geojax.train.step_profiler import StepProfiler
from geojax.train.step_seconds import HostTimes, StepSeconds, split_seconds

# The next step is dispatched before the last one's metrics are read, so that devices never wait for
# the host; a third step in flight would only hold more memory.
STEPS_IN_FLIGHT = 2

_PAUSE_SECONDS = 1.0
"""Part of the pause after a failed save that the watchdog counts by itself."""

_SHOWN_ORIGINS = 4
"""Sequences of a spike's step that are named."""

_POLL_SECONDS = 0.002
"""Between two looks at a step, at least: a step of half a second is timed to half a percent."""
_POLL_SHARE = 1 / 200
"""Share of a long step between two looks near its end, and ten times that before."""
_NEAR_END = 0.8
"""Share of the step before after which a step may end soon."""

OF_SOME_RUNS = ("mtp_loss", "aux_loss", "loss_scale", "membership_id", "batch_share")
"""Metrics that only some runs have: those that predict later tokens, with experts, in fp16, and
where sites go on without a lost one."""


class StartPoint(NamedTuple, Generic[State]):
    """State that a run goes on from, and how far training has come with it."""

    state: State
    step: int
    """Number of steps done."""
    consumed_sequences: int
    """Sequences of the data that those steps consumed."""


class StepEnds:
    """A thread that waits for the steps of a run, one after the other, while it is entered.

    A trainer whose `step` waits for other sites returns when the step before has long ended, so
    that the time at which the host reads that one says little.
    """

    def __init__(self) -> None:
        self._steps: queue.SimpleQueue[tuple[Any, Future[float]] | None] = queue.SimpleQueue()
        self._left = threading.Event()
        self._thread = threading.Thread(target=self._note, name="geojax step ends", daemon=True)
        self.late_seconds = 0.0
        """Sum of the time by which the thread woke later than it had asked for."""

    def of(self, metrics: Any) -> Future[float]:
        """Return the time, on the monotonic clock, at which the metrics of a step are there."""
        end: Future[float] = Future()
        self._steps.put((metrics, end))
        return end

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._left.set()
        self._steps.put(None)
        self._thread.join()

    def _note(self) -> None:
        # The thread looks instead of blocking in XLA: devices that never finish must not keep the
        # process from ending, and a thread that blocks there while Python ends aborts the process.
        usual = 0.0
        while (step := self._steps.get()) is not None:
            metrics, end = step
            arrays = [leaf for leaf in jax.tree.leaves(metrics) if isinstance(leaf, jax.Array)]
            began = now = time.monotonic()
            while not _all_there(arrays):
                pause = _pause(now - began, usual)
                if self._left.wait(pause):
                    return
                before, now = now, time.monotonic()
                self.late_seconds += max(now - before - pause, 0.0)
            end.set_result(now)
            usual = now - began


def _pause(elapsed: float, usual: float) -> float:
    """Return the time until the next look at a step, of which there are less than 60 near `usual`.

    Args:
        elapsed: seconds since the first look.
        usual: seconds that the step before took.
    """
    share = _POLL_SHARE if elapsed >= _NEAR_END * usual else 10 * _POLL_SHARE
    return max(_POLL_SECONDS, share * max(usual, elapsed))


def _all_there(arrays: Sequence[Any]) -> bool:
    """Return True if all arrays are computed or have failed: a reader of these gets the error."""
    return all(array.is_ready() for array in arrays)


class _PendingStep(NamedTuple):
    """A step that may still run."""

    step: int
    consumed: int
    """Sequences of the data that it and all steps before consumed."""
    metrics: Mapping[str, Any]
    links: Mapping[str, LinkTraffic]
    end: Future[float]
    """The time at which the metrics are there."""
    host: HostTimes


@dataclasses.dataclass
class TrainingLoop(Generic[State]):
    """A loop that trains from the state's step on; all processes of a run enter it together.

    Every decision in it (stop, save, give up) follows from the step's metrics, which are the same
    on every process, so that no process is ever alone in a collective.
    """

    runtime: Runtime[State]
    facts: RunFacts
    config: RunConfig
    opened: OpenedRun
    """The data and the checkpoints that it reads and writes, and the watchdog."""
    save: Callable[[Runtime[State], int, State, Mapping[str, Any]], None]
    """Function that saves the state after a step, with metadata."""
    writer: MetricsWriter | None
    directory: RunDirectory | None
    """The run directory, on the process that writes into it."""
    progress: Progress | None
    """Display of the figures of each step; None: there is none."""
    profiler: StepProfiler
    stop_signals: StopSignals | None
    """Requests to stop early; None: there are none."""
    log: Callable[[str], None]
    """Function that shows a line to the user."""
    metadata: Mapping[str, Any]
    """Description of the run, for its checkpoints."""
    compilations: CompilationCounter
    """Count of how often the step was compiled."""
    comparison: PlanComparison | None = None
    """Comparison of the steps with the plan, on the process that logs; None without a plan."""
    replanning: Replanning | None = None
    """Plans for links that change, on every process; None: the plan stays."""
    ledger: GoodputLedger | None = None
    """The ledger of seconds, on the process that writes the run's files."""
    events: EventLog | None = None
    """The log of events, on the same process."""
    product: Callable[[Any], Any] | None = None
    """The timed product of one program of several processes; None: there is none."""
    site: str = ""
    """Name of this process's site."""

    def __post_init__(self) -> None:
        self.validation: dict[str, list[tuple[int, float]]] = {}
        self.stopped_early = False
        self.links: dict[str, LinkTotals] = collections.defaultdict(LinkTotals)
        self._pending: collections.deque[_PendingStep] = collections.deque()
        self._ends = StepEnds()
        self._save_asked = False
        self.consumed = 0
        """Sequences of the data that all steps consumed."""
        self._clock = time.monotonic()
        self._recording = 0.0
        """Seconds in which the last step was recorded."""
        self._tokens_per_second: list[float] = []
        self._apart: dict[str, float] = {}
        self._slowest = None
        if self.product is not None:
            process = jax.process_index()
            self._slowest = SlowestWatch(
                process, functools.partial(self._tell, "late"), self.product
            )
        self._site_waits = SiteWaits(functools.partial(self._tell, "late"))
        self._spikes = {name: SpikeDetector() for name in ("loss", "gradient_norm")}

    @property
    def median_tokens_per_second(self) -> float:
        """Median over the steps so far without the first, which may still be warming up."""
        later = self._tokens_per_second[1:] or self._tokens_per_second
        return float(np.median(later)) if later else 0.0

    @property
    def exit_code(self) -> int:
        """Exit code for the shell: 0, or after a signal 128 and its number (130 for Ctrl-C)."""
        signals = self.stop_signals
        return ((signals and signals.exit_code) or 130) if self.stopped_early else 0

    def run(self, begin: Callable[[], StartPoint[State]]) -> State:
        """Train to the config's last step, or until Ctrl-C; the last state is saved.

        Args:
            begin: returns where training goes on. It is called when all else is ready, because
                other sites may wait for the step after it.

        Raises:
            RunError: the loss or gradient was not finite for `skip_limit` steps in a row, or no
                checkpoint could be saved for too long.
            LostContactError: another process of the run went away.
        """
        slowest = self._slowest or contextlib.nullcontext()
        with (
            translate_collective_errors(),
            self._ends,
            self.profiler,
            slowest,
            long_lived_apart() as leave_apart,
        ):
            begun = begin()
            leave_apart()  # a site that returns has compiled
            return self._train(begun, leave_apart)

    def _train(self, begun: StartPoint[State], leave_apart: Callable[[], None]) -> State:
        state, start, consumed_sequences = begun
        config, done = self.config, start
        self.opened.watchdog.begin("host work", start)
        self.consumed = consumed_sequences
        if start == 0:
            self._validate(state, 0)
        batches = self.opened.loader.iterate(consumed_sequences)
        self._restart_clock()
        while done < config.steps and not self.stopped_early:
            if (size := config.batch.sizes.size_at(self.consumed)) != self.runtime.sequences:
                self._drain()
                if self.stopped_early:
                    break
                self._take_batches_of(size, done)
            stop = self.stop_signals is not None and self.stop_signals.requested
            requests = {"stop": stop, "save": self.opened.checkpointer.due()}
            self.profiler.begin_step(done + 1, self._pending[-1].end if self._pending else None)
            with self.opened.watchdog.data(done + 1):
                batch = next(batches)
            ready = time.monotonic()
            with self.opened.watchdog.dispatch(done + 1):
                others = functools.partial(
                    self.opened.site_batches.training, consumed=self.consumed
                )
                state, metrics = self.runtime.step(state, batch, requests, others)
            host = HostTimes(ready, time.monotonic(), self.profiler.held_until)
            done += 1
            if done == start + 1:
                leave_apart()  # the first step may have compiled
            self.consumed += self.runtime.sequences
            links, ended = self.runtime.links.traffic(), self._ends.of(metrics)
            self._pending.append(_PendingStep(done, self.consumed, metrics, links, ended, host))
            if self._slowest is not None:
                # Process 0 records more than the others, and is no slower for that.
                since = max(self._clock + self._recording, host.held_until)
                self._slowest.dispatched(
                    done, host.dispatched - since, metrics, ended, self._ends.of
                )
            self.profiler.end_step(done, ended)
            while len(self._pending) >= STEPS_IN_FLIGHT:
                self._finish_oldest()
            validate = done % config.evaluation.interval == 0 or done == config.steps
            if validate or self._save_asked or self.opened.checkpointer.should_save(done):
                self._drain()
                if validate:
                    self._validate(state, done)
                if self._save_asked or self.opened.checkpointer.should_save(done):
                    self._save(state, done)
                    state = self._replan(state, done)
                self._restart_clock()
        self._drain()
        self._save(state, done)
        while not self._saved(done):
            end = time.monotonic() + self.opened.checkpointer.retry_pause
            while (left := end - time.monotonic()) > 0:
                with self.opened.watchdog.step(done, "save"):
                    time.sleep(min(left, _PAUSE_SECONDS))
            self._save(state, done)
        return state

    def _saved(self, step: int) -> bool:
        """Wait for the save in the background; return False if it failed."""
        with self.opened.watchdog.step(step, "save"), self._spent("saving"):
            return self.opened.checkpointer.wait()

    def _finish_oldest(self) -> None:
        step, consumed, pending, links, end, host = self._pending.popleft()
        with self.opened.watchdog.step(step):
            metrics = {name: float(value) for name, value in jax.device_get(pending).items()}
            ended = end.result()
        waiting = sum(sum(link.wait_seconds.values()) for link in links.values()) if links else None
        seconds = split_seconds(self._clock, host, ended, waiting)
        self._clock = ended
        if self._slowest is not None:
            self._slowest.ended(step, seconds.total, self._ends.late_seconds)
        began = time.monotonic()
        self._record(step, consumed, metrics, links, seconds)
        self._recording = time.monotonic() - began
        self.stopped_early |= metrics["stop"] > 0
        self._save_asked |= metrics["save"] > 0
        limit = self.config.skip_limit
        smallest = self.config.loss_scale.minimum
        at_its_end = metrics.get("loss_scale", smallest) <= smallest
        if metrics["skipped_in_a_row"] >= limit and at_its_end:
            raise RunError(
                f"step {step}: the loss or the gradient was not finite for {limit} steps in a row, "
                "and all of these steps were skipped. Check the data, or lower "
                "optimizer.peak_learning_rate and resume from the newest checkpoint"
            )

    def _drain(self) -> None:
        while self._pending:
            self._finish_oldest()

    def _restart_clock(self) -> None:
        self._clock, self._recording = time.monotonic(), 0.0

    def _record(
        self,
        step: int,
        consumed: int,
        metrics: dict[str, float],
        links: Mapping[str, LinkTraffic],
        parts: StepSeconds,
    ) -> None:
        facts, seconds = self.facts, parts.total
        batch_share = metrics.get("batch_share", 1.0)
        tokens_per_second = batch_share * facts.tokens_per_step / seconds
        self._tokens_per_second.append(tokens_per_second)
        utilization = facts.model_flops_utilization(tokens_per_second)
        values = {
            "loss": metrics["loss"],
            "gradient_norm": metrics["gradient_norm"],
            "learning_rate": metrics["learning_rate"],
            "time": time.time(),
            "tokens": consumed * self.config.batch.sequence_length,
            "tokens_per_second": tokens_per_second,
            "tokens_per_second_per_device": tokens_per_second / facts.devices,
            "seconds": seconds,
            "seconds/data": parts.data,
            "seconds/device": parts.device,
            "seconds/validation": self._apart.pop("validation", 0.0),
            "seconds/save": self._apart.pop("saving", 0.0),
            "targets": metrics["targets"],
            "global_batch_size": round(batch_share * self.runtime.sequences),
            "consumed_sequences": consumed,
            "skipped": metrics["skipped"],
            "failed_saves": self.opened.checkpointer.failed_saves,
            "save_seconds": self.opened.checkpointer.blocked_seconds,
            "compilations": self.compilations.count,
        }
        # Islands walk the messages in the call that dispatches a step.
        host, host_seconds = ("waiting", parts.waiting) if links else ("dispatch", parts.dispatch)
        values[f"seconds/{host}"] = host_seconds
        values |= {name: metrics[name] for name in OF_SOME_RUNS if name in metrics}
        values |= peak_memory()
        words = [
            f"loss {metrics['loss']:.4f}",
            f"{duration(seconds)} a step",
            quantity(tokens_per_second, "tokens/s"),
        ]
        if self._slowest is not None:
            values |= self._slowest.counts.metrics
        if utilization is not None:
            values["mfu"] = utilization
            words.append(f"MFU {utilization:.1%}")
        words.append(f"|g| {metrics['gradient_norm']:.2f}")
        for site, traffic in links.items():
            values |= link_metrics(site, traffic, seconds)
            words.append(link_words(site, traffic))
            if len(self._tokens_per_second) > 1:  # the first step may still be warming up
                self.links[site].add(traffic, seconds)
        if (planned := self.runtime.links.planned_wait) is not None:
            values |= planned_metrics(planned)
            words.append(planned_words(planned))
        if jax.process_index() == 0 and links:
            told = site_metrics(
                self.runtime.links.exchange_figures(told_figures(step, values, links))
            )
            values |= told
            words += [site_words(site, told) for site in links if f"site/{site}/step" in told]
            waited = {site: told.get(f"site/{site}/wait_seconds") for site in links}
            known = {site: wait for site, wait in waited.items() if wait is not None}
            self._site_waits.add(step, seconds, known | {self.site: parts.waiting})
            values |= self._site_waits.counts.metrics
        if metrics["skipped_in_a_row"]:
            scale = metrics.get("loss_scale")
            at = "" if scale is None else f" at a loss scale of 2^{math.log2(scale):.0f}"
            self._tell(
                "skipped", step, f"the loss or the gradient is not finite{at}; the step is skipped"
            )
        self._note_spikes(step, consumed, metrics)
        if self.writer is not None:
            self.writer.write(step, values)
        if self.progress is not None:
            self.progress.update(step, consumed, words)
        if self.comparison is not None:
            self.comparison.record(step, seconds, links)
        if self.ledger is not None:
            waits = {site: sum(link.wait_seconds.values()) for site, link in links.items()}
            self.ledger.step(step, seconds, parts.data, waits)

    def _note_spikes(self, step: int, consumed: int, metrics: Mapping[str, float]) -> None:
        """Tell of a loss or norm far above those before, with the data that this process read."""
        if self.events is None:
            return
        for name, detector in self._spikes.items():
            median = detector.is_spike(metrics[name])
            if median is not None:
                words = name.replace("_", " ")
                self._tell(
                    "spike",
                    step,
                    f"{words} {metrics[name]:.4g} after a median of {median:.4g}; this process "
                    f"read {self._data_before(consumed)}",
                )

    def _data_before(self, consumed: int) -> str:
        """Name the sources and places of what this process read of the step up to `consumed`."""
        origins = self.opened.loader.origins(consumed - self.runtime.sequences)
        named = [
            f"'{origin.source}'" + ("" if origin.start is None else f" from token {origin.start:,}")
            for origin in origins[:_SHOWN_ORIGINS]
        ]
        first, last = origins[0].number, origins[-1].number
        more = len(origins) - len(named)
        return f"sequences {first:,} to {last:,}: {', '.join(named)}" + (
            f" and {more} more" if more else ""
        )

    def _tell(self, kind: EventKind, step: int, text: str) -> None:
        """Show an event and note it."""
        self.log(f"step {step}: {text}")
        if self.events is not None:
            self.events.note(step, kind, text)

    @contextlib.contextmanager
    def _spent(self, kind: Literal["validation", "saving", "compiling"]) -> Iterator[None]:
        """Count the seconds of work between steps."""
        began = time.monotonic()
        try:
            yield
        finally:
            seconds = time.monotonic() - began
            self._apart[kind] = self._apart.get(kind, 0.0) + seconds
            if self.ledger is not None:
                self.ledger.spend(kind, seconds)

    def _validate(self, state: State, step: int) -> None:
        with self._spent("validation"):
            self._validate_all(state, step)

    def _validate_all(self, state: State, step: int) -> None:
        for name in self.opened.loader.validation_names:
            sums = []
            batches = iter(self.opened.loader.validation(name))
            for number in itertools.count():
                with self.opened.watchdog.data(step):
                    batch = next(batches, None)
                if batch is None:
                    break
                others = functools.partial(
                    self.opened.site_batches.validation, name=name, number=number
                )
                with self.opened.watchdog.step(step, "validation"):
                    sums.append(jax.device_get(self.runtime.evaluate(state, batch, others)))
            value = mean_loss(sums)
            self.validation.setdefault(name, []).append((step, value))
            if self.writer is not None:
                self.writer.write(step, {f"validation/{name}": value})
            self._tell("validation", step, f"validation loss {value:.4f} on '{name}'")

    def _take_batches_of(self, sequences: int, step: int) -> None:
        """Go on with batches of another size after a step; none is under way."""
        with self.opened.watchdog.step(step, "plan"), self._spent("compiling"):
            timeout = self.config.watchdog.first_step_seconds
            self.runtime = resized(self.runtime, sequences, step, self.log, timeout)
        self.opened.watchdog.expect_first_step()
        tokens = sequences * self.config.batch.sequence_length
        self.facts = self.facts.of_batch(tokens, self.runtime.links.sent_bytes)
        if self.comparison is not None:
            resolved = self.runtime.resolved.of_batch(sequences)
            self.comparison.restart_with(resolved, self.runtime.links.measured)
        self._restart_clock()

    def _replan(self, state: State, step: int) -> State:
        """Go on with another step after a checkpoint, where the links are not as they were."""
        if self.replanning is None or self.stopped_early or step == self.config.steps:
            return state
        with self.opened.watchdog.step(step, "plan"), self._spent("compiling"):
            anew = self.replanning.replanned(self.runtime, step)
            if anew is None:
                return state
            self.runtime = anew
            if self.events is not None:
                self.events.note(step, "replan", "goes on with another step; step.yaml has it")
            self.opened.watchdog.expect_first_step()
            return anew.adopt(state)

    def _save(self, state: State, step: int) -> None:
        self._save_asked = False
        metadata = {**self.metadata, "consumed_sequences": self.consumed}
        blocked = self.opened.checkpointer.blocked_seconds
        with self.opened.watchdog.step(step, "save"), self._spent("saving"):
            self._make_directory_again()
            self.save(self.runtime, step, state, metadata)
        # A step that is saved already is not saved again.
        if self.events is not None and self.opened.checkpointer.blocked_seconds > blocked:
            self.events.note(step, "save", "the state is copied and being written")

    def _make_directory_again(self) -> None:
        """Make the run directory anew where it was removed; if that fails, so will the save.

        Raises:
            LockHeldError: another run has taken its place.
        """
        if self.directory is None:
            return
        try:
            if not self.directory.make_again_if_removed():
                return
        except LockHeldError:
            raise
        except (OSError, RunError, UserError) as error:
            self.log(f"warning: {error}; the run directory cannot be made again")
            return
        self.log(
            f"warning: {self.directory.path}: was removed while the run was going on; it is "
            "made again, without the metrics and checkpoints so far"
        )
        if self.writer is not None:
            self.writer.open_again(self.config.model_dump(mode="json"))


def resized(
    runtime: Runtime[State],
    sequences: int,
    step: int,
    log: Callable[[str], None],
    timeout_seconds: float,
) -> Runtime[State]:
    """Return the runtime of batches of another size; all processes of a runtime call it together.

    Args:
        runtime: has the step of another batch.
        sequences: those of the batch.
        step: the step before the first of these batches.
        log: shows a line to the user.
        timeout_seconds: time that a process has to compile.

    Raises:
        MissingProcessesError: a process does not come.
    """
    started = time.monotonic()
    resized_runtime = runtime.of_batch(sequences)
    # A process that compiles would reach the step's first collective long after the others.
    barrier("compiled", timeout_seconds)
    full = runtime.config.batch.global_batch_size
    when = f"in {time.monotonic() - started:.1f} s"
    if runtime.parts:
        when = "in its first step"  # by islands
    log(
        f"step {step}: the next batch has {sequences} of {full} sequences (batch.ramp); compiled "
        f"{when}"
    )
    return resized_runtime


def mean_loss(sums: Sequence[np.ndarray]) -> float:
    """Return the loss of a validation set by [sum of losses, number of targets] of its batches."""
    loss, targets = np.sum(sums, axis=0)
    return float(loss / targets)
