"""The loop over steps: dispatch, read back, validate, save, stop."""

import collections
import dataclasses
import math
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from geojax.checkpoint import Checkpointer
from geojax.data import Loader
from geojax.errors import RunError
from geojax.optim import layout
from geojax.quantities import quantity
from geojax.runtime import StopSignals, Watchdog, translate_collective_errors
from geojax.runtime.compilation import CompilationCounter
from geojax.step.state import TrainState
from geojax.train.batches import global_batch, global_signals
from geojax.train.compiled_run import Program
from geojax.train.metrics import MetricsWriter
from geojax.train.report import Progress

# The next step is dispatched before the last one's metrics are read, so that devices never wait for
# the host; a third step in flight would only hold more memory.
STEPS_IN_FLIGHT = 2

OF_SOME_RUNS = ("balance_loss", "loss_scale")
"""Metrics that only some runs have: of a mixture, and of fp16."""


@dataclasses.dataclass
class Loop:
    """Trains from the state's step on; all processes of a run walk through it together.

    Whatever is decided inside it (stop, save, give up) follows from the step's metrics, which are
    the same on every process, so that no process is ever alone in a collective.
    """

    program: Program
    loader: Loader
    checkpointer: Checkpointer
    writer: MetricsWriter | None
    progress: Progress
    watchdog: Watchdog
    stop_signals: StopSignals
    say: Callable[[str], None]
    metadata: Mapping[str, Any]
    """What a checkpoint says about the run."""
    compilations: CompilationCounter
    """Of the step."""

    def __post_init__(self) -> None:
        self.validation: dict[str, list[tuple[int, float]]] = {}
        self.stopped_early = False
        self._pending: collections.deque[tuple[int, dict[str, jax.Array]]] = collections.deque()
        self._save_asked = False
        self._clock = time.monotonic()
        self._tokens_per_second: list[float] = []

    @property
    def median_tokens_per_second(self) -> float:
        """Over the steps so far; the first, which may still be warming up, left out."""
        later = self._tokens_per_second[1:] or self._tokens_per_second
        return float(np.median(later)) if later else 0.0

    @property
    def exit_code(self) -> int:
        """0, or what a shell expects after a signal: 130 for Ctrl-C, here or in another process."""
        return (self.stop_signals.exit_code or 130) if self.stopped_early else 0

    def run(self, state: TrainState, start: int) -> TrainState:
        """Train from `start` to the config's last step, or until Ctrl-C; the last state is saved.

        Raises:
            RunError: the loss or gradient was not finite for `skip_limit` steps in a row.
            LostContactError: another process of the run went away.
        """
        with translate_collective_errors():
            return self._train(state, start)

    def _train(self, state: TrainState, start: int) -> TrainState:
        config, done = self.program.config, start
        if start == 0:
            self._validate(state, 0)
        seed = np.uint32(config.seed)
        feed = self._feed(start)
        self._restart_clock()
        while done < config.steps and not self.stopped_early:
            signals = {"stop": self.stop_signals.requested, "save": self.checkpointer.due()}
            asked = global_signals(self.program.plan, signals)
            state, metrics = self.program.step(state, next(feed), asked, seed)
            done += 1
            self._pending.append((done, metrics))
            while len(self._pending) >= STEPS_IN_FLIGHT:
                self._finish_oldest()
            validate = done % config.evaluation.every_steps == 0 or done == config.steps
            if validate or self._save_asked or self.checkpointer.should_save(done):
                self._drain()
                if validate:
                    self._validate(state, done)
                if self._save_asked or self.checkpointer.should_save(done):
                    self._save(state, done)
                self._restart_clock()
        self._drain()
        self._save(state, done)
        return state

    def _feed(self, start: int) -> Iterator[dict[str, jax.Array]]:
        for rows in self.loader.iterate(start):
            yield self._on_mesh(rows)

    def _on_mesh(self, rows: Mapping[str, np.ndarray]) -> dict[str, jax.Array]:
        return global_batch(self.program.plan, self.loader.global_rows, self.loader.rows, rows)

    def _finish_oldest(self) -> None:
        step, pending = self._pending.popleft()
        with self.watchdog.step(step):
            metrics = {name: float(value) for name, value in jax.device_get(pending).items()}
        now = time.monotonic()
        seconds, self._clock = now - self._clock, now
        self._record(step, metrics, seconds)
        self.stopped_early |= metrics["stop"] > 0
        self._save_asked |= metrics["save"] > 0
        limit = self.program.config.skip_limit
        smallest = self.program.config.loss_scale.minimum
        at_its_end = metrics.get("loss_scale", smallest) <= smallest
        if metrics["skipped_in_a_row"] >= limit and at_its_end:
            raise RunError(
                f"step {step}: the loss or the gradient was not finite for {limit} steps in a row; "
                "none of them was applied; look at the data or lower "
                "optimizer.peak_learning_rate, and go on from the newest checkpoint"
            )

    def _drain(self) -> None:
        while self._pending:
            self._finish_oldest()

    def _restart_clock(self) -> None:
        self._clock = time.monotonic()

    def _record(self, step: int, metrics: dict[str, float], seconds: float) -> None:
        program = self.program
        tokens_per_second = program.tokens_per_step / seconds
        self._tokens_per_second.append(tokens_per_second)
        utilisation = program.model_flops_utilisation(tokens_per_second)
        values = {
            "loss": metrics["loss"],
            "gradient_norm": metrics["gradient_norm"],
            "learning_rate": metrics["learning_rate"],
            "tokens_per_second": tokens_per_second,
            "seconds": seconds,
            "targets": metrics["targets"],
            "skipped": metrics["skipped"],
            "compilations": self.compilations.count,
        }
        values |= {name: metrics[name] for name in OF_SOME_RUNS if name in metrics}
        figures = {"loss": f"{metrics['loss']:.4f}", "": quantity(tokens_per_second, "tokens/s")}
        if utilisation is not None:
            values["mfu"] = utilisation
            figures["MFU"] = f"{utilisation:.1%}"
        figures["|g|"] = f"{metrics['gradient_norm']:.2f}"
        if program.mesh.shape["dc"] > 1:
            figures["cross-site"] = quantity(program.bytes_across_sites, "B/step")
        if metrics["skipped_in_a_row"]:
            scale = metrics.get("loss_scale")
            at = "" if scale is None else f" at a loss scale of 2^{math.log2(scale):.0f}"
            self.say(
                f"step {step}: the loss or the gradient is not finite{at}; the step is skipped"
            )
        if self.writer is not None:
            self.writer.write(step, values)
        self.progress.update(step, figures)

    def _validate(self, state: TrainState, step: int) -> None:
        for name in self.loader.validation_names:
            sums = []
            for rows in self.loader.validation(name):
                with self.watchdog.step(step, "validation"):
                    batch = self._on_mesh(rows)
                    sums.append(jax.device_get(self.program.evaluate(state, batch)))
            loss, targets = np.sum(sums, axis=0)
            value = float(loss / targets)
            self.validation.setdefault(name, []).append((step, value))
            if self.writer is not None:
                self.writer.write(step, {f"validation/{name}": value})
            self.say(f"step {step}: validation loss {value:.4f} on '{name}'")

    def _save(self, state: TrainState, step: int) -> None:
        self._save_asked = False
        whole = layout.trim(state, self.program.layouts, self.program.mesh)
        self.checkpointer.save(step, whole, self.metadata)
