"""The training loop on a runtime of plain numbers: no mesh, no plan, no compiled program."""

import contextlib
import dataclasses
import gc
import io
import json
import os
import re
import signal
import time
import types
from concurrent.futures import Future
from pathlib import Path

import numpy as np
import pytest
import rich.console
from support.small_models import model_of

from geojax.config.run_config import RunConfig
from geojax.data.site_batches import SiteBatches
from geojax.errors import RunError
from geojax.islands.traffic import LinkTraffic
from geojax.runtime import StopSignals, Watchdog, WatchdogSettings
from geojax.train.events import EventLog
from geojax.train.facts import RunFacts
from geojax.train.goodput import GoodputLedger
from geojax.train.link_figures import PlannedWait
from geojax.train.report import Progress
from geojax.train.site_figures import site_metrics
from geojax.train.step_profiler import StepProfiler
from geojax.train.training_loop import StartPoint, TrainingLoop
from geojax.train.writing.background_writer import write_at_once
from geojax.transport import SocketFigures, ToldFigures

STEPS = 10
BATCH = 8


FACTS = RunFacts(
    tokens_per_step=1000,
    devices=8,
    flops_per_token=6.0,
    peak_flops=1e6,
    cross_site_bytes=2e6,
)


class CountingLinks:
    """Links whose traffic a test writes."""

    planned_wait, sent_bytes = None, None

    def __init__(self):
        self.of_sites, self.told, self.heard = {}, [], {}

    def traffic(self):
        return self.of_sites

    def exchange_figures(self, figures):
        self.told.append(json.loads(figures))
        return self.heard


class CountingRuntime:
    """The state is the number of steps done; hooks stand for what happens during a step."""

    sequences = BATCH

    def __init__(self):
        self.batches = []
        self.evaluated = []
        self.during = {}
        self.skipped_from = None
        self.loss_scale = None
        self.links = CountingLinks()

    def initial_state(self):
        return 0

    def step(self, state, batch, requests, others):
        done = state + 1
        self.batches.append(int(batch["row"][0]))
        requests = dict(requests)
        if done in self.during:
            self.during[done]()
        skipped = 0 if self.skipped_from is None else max(0, done - self.skipped_from + 1)
        metrics = {
            "loss": np.float32(5 - 0.1 * done),
            "gradient_norm": np.float32(1),
            "learning_rate": np.float32(0.1),
            "targets": np.float32(900),
            "skipped": np.int32(skipped),
            "skipped_in_a_row": np.int32(skipped),
            **{name: np.float32(asked) for name, asked in requests.items()},
        }
        if self.loss_scale is not None:
            metrics["loss_scale"] = np.float32(self.loss_scale)
        return done, metrics

    def evaluate(self, state, batch, others):
        self.evaluated.append(state)
        return np.array([2.0 * len(batch["row"]), len(batch["row"])])


class Checkpoints:
    """A checkpointer that keeps its checkpoints in a dictionary."""

    def __init__(self, every=4):
        self.every = every
        self.asked = False
        self.saved = {}
        self.failed_saves, self.blocked_seconds, self.retry_pause = 0, 0.0, 0.0

    def due(self):
        asked, self.asked = self.asked, False
        return asked

    def should_save(self, step):
        return step % self.every == 0

    def save(self, step, state, metadata):
        assert state == step
        self.saved[step] = metadata

    def wait(self):
        return True


class Sequences:
    """A loader of batches that know their position, and two validation sets."""

    validation_names = ("near", "far")

    def iterate(self, consumed):
        while True:
            yield {"row": np.array([consumed])}
            consumed += BATCH

    def validation(self, name):
        return [{"row": np.arange(3)}, {"row": np.arange(1)}]


class Lines:
    def __init__(self):
        self.lines = []

    def write(self, step, values):
        self.lines.append((step, values))


@contextlib.contextmanager
def loop_of(runtime, checkpoints=None, **changes):
    checkpoints = checkpoints or Checkpoints()
    config = RunConfig(
        run_directory="unused",
        steps=STEPS,
        model=model_of("llama"),
        data={},
        batch={"global_batch_size": BATCH, "sequence_length": 32},
        evaluation={"interval": 4},
        skip_limit=3,
        **changes,
    )
    text = io.StringIO()
    console = rich.console.Console(file=text, soft_wrap=True)
    with StopSignals() as stop, Watchdog(WatchdogSettings()) as watchdog:
        loop = TrainingLoop(
            runtime=runtime,
            facts=FACTS,
            config=config,
            opened=types.SimpleNamespace(
                loader=Sequences(),
                site_batches=SiteBatches(lambda site: Sequences()),
                checkpointer=checkpoints,
                watchdog=watchdog,
            ),
            save=lambda _, step, state, metadata: checkpoints.save(step, state, metadata),
            writer=Lines(),
            directory=None,
            progress=Progress(console, STEPS, 0, 0, STEPS * BATCH),
            profiler=StepProfiler(Path("unused"), config.profile, 0, watchdog, console.print),
            stop_signals=stop,
            log=console.print,
            metadata={"data": "of this run"},
            compilations=types.SimpleNamespace(count=1),
        )
        loop.text = text
        yield loop


def test_a_trainer_that_waits_in_a_step_is_watched():
    runtime, watched = CountingRuntime(), []
    with loop_of(runtime) as loop:
        runtime.during[3] = lambda: watched.append(loop.opened.watchdog._running)
        loop.run(lambda: StartPoint(runtime.initial_state(), 0, 0))
    assert [(each.number, each.kind) for each in watched] == [(3, "dispatch")]


def test_the_collection_is_over_when_a_run_asks_where_to_begin():
    """Other sites wait for the first step of a site that returns, and not for its garbage."""
    apart = []

    def begin():
        apart.append(gc.get_freeze_count())
        return StartPoint(0, 0, 0)

    with loop_of(CountingRuntime()) as loop:
        loop.run(begin)
    assert apart[0] > 0
    assert gc.get_freeze_count() == 0


def test_the_watchdog_knows_what_the_host_does_at_every_moment():
    runtime, watched = CountingRuntime(), []

    class Slow(Sequences):
        def iterate(self, consumed):
            for batch in super().iterate(consumed):
                watched.append(loop.opened.watchdog._running[:2])
                yield batch

        def validation(self, name):
            return iter([{"row": np.arange(3)}])

    class Watched(Checkpoints):
        def wait(self):
            watched.append(loop.opened.watchdog._running[:2])
            return super().wait()

    with loop_of(runtime, Watched(every=100)) as loop:
        loop.opened.loader = Slow()
        loop.run(lambda: StartPoint(0, 0, 0))
        watched.append(loop.opened.watchdog._running[:2])
    data = [(step, "data") for step in range(1, STEPS + 1)]
    assert watched == [*data, (STEPS, "save"), (STEPS, "host work")]


def test_a_run_takes_each_batch_once_and_records_each_step():
    runtime = CountingRuntime()
    with loop_of(runtime) as loop:
        assert loop.run(lambda: StartPoint(runtime.initial_state(), 0, 0)) == STEPS
    assert runtime.batches == list(range(0, BATCH * STEPS, BATCH))
    steps = [values for _, values in loop.writer.lines if "loss" in values]
    assert [step for step, values in loop.writer.lines if "loss" in values] == list(range(1, 11))
    assert all(values["mfu"] > 0 and values["compilations"] == 1 for values in steps)
    assert "loss_scale" not in steps[0]
    assert loop.exit_code == 0


class KnownEnds(contextlib.nullcontext):
    """Steps that end 100 seconds after each other, whenever the host looks."""

    def __init__(self):
        super().__init__()
        self.next = time.monotonic()

    def of(self, metrics):
        self.next += 100
        end = Future()
        end.set_result(self.next)
        return end


def test_a_step_is_timed_by_its_end_not_by_when_the_host_reads_it(monkeypatch):
    monkeypatch.setattr("geojax.train.training_loop.StepEnds", KnownEnds)
    runtime = CountingRuntime()
    with loop_of(runtime) as loop:
        loop.run(lambda: StartPoint(0, 0, 0))
    seconds = {step: values["seconds"] for step, values in loop.writer.lines if "loss" in values}
    # Only after a validation, which follows steps 4 and 8, the clock starts when the host is there.
    assert [seconds[step] for step in (2, 3, 4, 6, 7, 8, 10)] == pytest.approx([100] * 7)


@pytest.mark.parametrize("sites", [["west"], ["west", "north"]])
def test_a_wait_that_the_plan_expects_is_marked_planned(sites):
    runtime = CountingRuntime()
    runtime.links.planned_wait = PlannedWait(0.125, sites)
    with loop_of(runtime) as loop:
        loop.run(lambda: StartPoint(0, 0, 0))
    step = loop.writer.lines[2][1]
    assert step["seconds/planned_waiting"] == 0.125
    planned = {name: value for name, value in step.items() if name.startswith("link/")}
    assert planned == ({"link/west/planned_wait_seconds": 0.125} if len(sites) == 1 else {})
    assert "waits 125 ms for other sites (planned)" in loop.text.getvalue()


def test_traffic_with_each_site_is_in_metrics_progress_and_totals():
    runtime = CountingRuntime()
    runtime.links.of_sites = {
        "west": LinkTraffic(
            4_000_000, 2_000_000, 3, {"bucket": 0.02, "offer": 0.0}, SocketFigures(0.021, 7)
        ),
        "north": LinkTraffic(4_000_000, 2_000_000, 1, {"bucket": 1.5}),
    }
    with loop_of(runtime) as loop:
        loop.run(lambda: StartPoint(0, 0, 0))
    step = loop.writer.lines[2][1]
    assert step["link/west/sent_bytes"] == 4_000_000
    assert step["link/west/sent_bytes_per_second"] == 4_000_000 / step["seconds"]
    assert step["link/west/messages_in_flight"] == 3
    assert step["link/west/wait_seconds_bucket"] == step["link/west/wait_seconds"] == 0.02
    assert step["link/west/wait_seconds_offer"] == 0
    assert step["link/west/tcp_round_trip_seconds"] == 0.021
    assert step["link/west/retransmits"] == 7
    assert "link/north/retransmits" not in step
    text = loop.text.getvalue()
    assert "waits 20 ms (bucket 20) for west" in text
    assert "waits 1.5 s (bucket 1.5) for north" in text
    assert " a step  " in text
    assert re.search(r"^step 9/10  .* left$", text, re.MULTILINE)
    totals = str(loop.links["west"])
    assert loop.links["west"].steps == STEPS - 1
    assert totals.startswith("a step sends 4 MB at ")
    assert totals.endswith("at most 3 messages in flight, and waits 20 ms (bucket 20)")


def test_sites_tell_each_other_their_figures_in_every_step():
    runtime = CountingRuntime()
    runtime.links.of_sites = {"west": LinkTraffic(wait_seconds={"bucket": 0.25, "scalars": 0.5})}
    content = json.dumps({"step": 3, "loss": 4.5, "seconds": 2.0, "other": 1})
    began = time.monotonic()
    runtime.links.heard = {"west": ToldFigures(content.encode(), began - 7)}
    with loop_of(runtime) as loop:
        loop.run(lambda: StartPoint(0, 0, 0))
    assert [each["step"] for each in runtime.links.told] == list(range(1, STEPS + 1))
    assert runtime.links.told[2]["wait_seconds"] == 0.75
    assert runtime.links.told[2]["loss"] == pytest.approx(4.7)
    line = loop.writer.lines[-3][1]
    of_site = {name: value for name, value in line.items() if name.startswith("site/")}
    assert 7 <= of_site.pop("site/west/age_seconds") <= 7 + time.monotonic() - began
    assert "  west waits 0 s" in loop.text.getvalue()
    assert of_site == {"site/west/step": 3, "site/west/loss": 4.5, "site/west/seconds": 2.0}


@pytest.mark.parametrize(
    "content",
    [
        b'{"step": 1' + b"0" * 400 + b"}",
        b"",
        b"[",
        b"[" * 1024,
        b"[1]",
        b"null",
        b'{"loss": "x"}',
        b'{"loss": NaN}',
        b"\xff",
    ],
)
def test_figures_that_are_none_are_left_out(content):
    assert site_metrics({"west": ToldFigures(content, 0.0)}) == {}


def test_a_resumed_run_takes_the_batches_that_follow_without_a_validation_first():
    runtime = CountingRuntime()
    with loop_of(runtime) as loop:
        assert loop.run(lambda: StartPoint(7, 7, 50)) == STEPS
    assert runtime.batches == [50, 58, 66]
    assert loop.opened.checkpointer.saved[STEPS]["consumed_sequences"] == 74
    assert set(runtime.evaluated) == {8, 10}


def test_intervals_say_when_to_validate_and_to_save():
    runtime = CountingRuntime()
    with loop_of(runtime, Checkpoints(every=3)) as loop:
        loop.run(lambda: StartPoint(0, 0, 0))
    assert sorted(loop.opened.checkpointer.saved) == [3, 6, 9, 10]
    saved = loop.opened.checkpointer.saved[3]
    assert saved == {"data": "of this run", "consumed_sequences": 3 * BATCH}
    assert sorted(set(runtime.evaluated)) == [0, 4, 8, 10]


def test_validation_is_the_mean_over_the_targets_of_all_batches():
    with loop_of(CountingRuntime()) as loop:
        loop.run(lambda: StartPoint(0, 0, 0))
    assert loop.validation["near"] == [(step, 2.0) for step in (0, 4, 8, 10)]
    assert (4, {"validation/far": 2.0}) in loop.writer.lines


def test_a_save_that_is_due_by_time_follows_the_step_that_asked():
    runtime = CountingRuntime()
    with loop_of(runtime, Checkpoints(every=100)) as loop:
        runtime.during[5] = lambda: setattr(loop.opened.checkpointer, "asked", True)
        loop.run(lambda: StartPoint(0, 0, 0))
    # The step after asks; its answer is read when another one is in flight.
    assert sorted(loop.opened.checkpointer.saved) == [7, 10]


def test_the_last_state_is_saved_again_until_it_is_saved():
    class Full(Checkpoints):
        def wait(self):
            self.failed_saves += 1
            return self.failed_saves > 2

        def save(self, step, state, metadata):
            self.saved[step] = self.saved.get(step, 0) + 1

    with loop_of(CountingRuntime(), Full(every=100)) as loop:
        loop.run(lambda: StartPoint(0, 0, 0))
    assert loop.opened.checkpointer.saved == {STEPS: 3}


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_stops_the_run_and_saves_it(number, code):
    runtime = CountingRuntime()
    runtime.during[5] = lambda: os.kill(os.getpid(), number)
    with loop_of(runtime, Checkpoints(every=100)) as loop:
        done = loop.run(lambda: StartPoint(0, 0, 0))
    assert 6 <= done < STEPS
    assert sorted(loop.opened.checkpointer.saved) == [done]
    assert loop.stopped_early
    assert loop.exit_code == code


def test_skipped_steps_in_a_row_end_the_run():
    runtime = CountingRuntime()
    runtime.skipped_from = 4
    with loop_of(runtime) as loop, pytest.raises(RunError, match="not finite for 3 steps in a row"):
        loop.run(lambda: StartPoint(0, 0, 0))
    assert "step 4: the loss or the gradient is not finite; the step is skipped" in (
        loop.text.getvalue()
    )


def test_skipped_steps_do_not_end_the_run_while_the_loss_scale_can_fall():
    runtime = CountingRuntime()
    runtime.skipped_from, runtime.loss_scale = 4, 8.0
    with loop_of(runtime, precision="fp16") as loop:
        assert loop.run(lambda: StartPoint(0, 0, 0)) == STEPS
    assert "at a loss scale of 2^3" in loop.text.getvalue()


class OnDevice:
    """A number on a device: whoever reads it by another way than `jax.device_get` waits for it."""

    def __init__(self, value):
        self.value = value

    def _read(self, *arguments):
        raise AssertionError("a hook waits for the devices")

    __float__ = __int__ = __bool__ = __index__ = __array__ = __add__ = __eq__ = _read
    __hash__ = None
    block_until_ready = is_ready = item = tolist = _read


class DeviceRuntime(CountingRuntime):
    """A runtime whose metrics lie on a device."""

    def step(self, state, batch, requests, others):
        done, metrics = super().step(state, batch, requests, others)
        return done, {name: OnDevice(value) for name, value in metrics.items()}


@pytest.mark.parametrize("has_hooks", [False, True])
def test_hooks_wait_for_no_device(monkeypatch, tmp_path, has_hooks):
    read = []

    def device_get(values):
        read.append(values)
        if isinstance(values, dict):
            return {name: value.value for name, value in values.items()}
        return values

    monkeypatch.setattr("jax.device_get", device_get)
    monkeypatch.setattr("geojax.train.slowest.WINDOW_STEPS", 4)
    monkeypatch.setattr("geojax.train.slowest.PRODUCT_STEP", 2)
    monkeypatch.setattr("geojax.train.slowest.READ_AFTER_STEPS", 1)
    runtime, products = DeviceRuntime(), []
    with loop_of(runtime) as loop:
        if has_hooks:
            loop = dataclasses.replace(
                loop,
                product=lambda loss: products.append(loss) or loss,
                ledger=GoodputLedger(tmp_path, write_at_once, began=time.time(), step=0),
                events=EventLog(tmp_path, write_at_once),
            )
        loop.run(lambda: StartPoint(0, 0, 0))
    steps = [values for values in read if isinstance(values, dict)]
    validated = [values for values in read if not isinstance(values, dict)]
    assert (len(steps), len(validated)) == (STEPS, len(runtime.evaluated))
    assert len(products) == (3 if has_hooks else 0)
