"""The trackers of a run: none of them holds it up, and each loss is counted."""

import contextlib
import json
import threading
import time
from typing import ClassVar

import pytest
from support.processes import PATIENCE_SECONDS, wait_until

from geojax.checkpoint import RunDirectory
from geojax.errors import UserError
from geojax.trackers.tracker_process import TrackerError, TrackerProcess
from geojax.trackers.tracker_settings import OwnTracker, WandbSettings
from geojax.train.metrics import MetricsWriter
from geojax.train.run_trackers import RunTrackers
from geojax.train.writing.background_writer import BackgroundWriter

OWN = (
    "jsonl",
    OwnTracker(module="support.observers:Recording", path="calls"),
    WandbSettings(),
)


class Stub:
    """A process of a tracker that does what a test wants, in the thread that feeds it."""

    made: ClassVar[dict[str, "Stub"]] = {}

    def __init__(self, tracker, arguments, output):
        self.tracker, self.arguments, self.output = tracker, arguments, output
        self.calls, self.is_killed, self.answer = [], threading.Event(), lambda call: None
        Stub.made[output.stem] = self

    def start(self, facts):
        self._call(("start", facts))

    def log(self, line):
        self._call(tuple(json.loads(line)))

    def finish(self, exit_code):
        self._call(("finish", exit_code))

    def kill(self):
        self.is_killed.set()

    def _call(self, call):
        self.answer(call)
        self.calls.append(call)

    def hang(self, call):
        self.is_killed.wait(PATIENCE_SECONDS)


@pytest.fixture
def lines():
    return []


@pytest.fixture
def tracked(tmp_path, lines):
    """Enter the trackers of a run in `tmp_path`."""

    @contextlib.contextmanager
    def enter(trackers=OWN, process_of=Stub, **options):
        directory = RunDirectory(tmp_path)
        with (
            BackgroundWriter(tmp_path, lines.append) as files,
            RunTrackers(
                trackers, directory, files, lines.append, process_of=process_of, **options
            ) as entered,
        ):
            yield entered

    return enter


def start(trackers, step=0):
    trackers.start("run", {"seed": 3}, step, "east")


def test_all_trackers_get_the_run_its_steps_and_its_end(tracked, tmp_path):
    with tracked() as trackers:
        start(trackers)
        trackers.log(1, {"loss": 2.0})
        start(trackers)  # a second fit
        trackers.exit_code = 0
    assert set(Stub.made) == {"support.observers.Recording", "wandb"}
    for stub in Stub.made.values():
        (name, facts), *others = stub.calls
        assert name == "start"
        assert facts["config"] == {"seed": 3}
        assert json.loads((tmp_path / "trackers" / "run.json").read_text()) == {"id": facts["id"]}
        assert others == [("log", 1, {"loss": 2.0}), ("finish", 0)]
    assert Stub.made["support.observers.Recording"].arguments == {"path": "calls"}
    assert Stub.made["wandb"].arguments["project"] == "geojax"


def test_the_id_stays_when_the_run_is_started_again(tracked):
    ids = []
    for step in (0, 5):
        with tracked() as trackers:
            start(trackers, step)
        ids.append(Stub.made["wandb"].calls[0][1]["id"])
    assert ids[0] == ids[1]


@pytest.mark.parametrize("content", ['{"id": "../x"}', "{}", "[]"])
def test_a_file_without_an_id_is_refused(tracked, tmp_path, content):
    (tmp_path / "trackers").mkdir()
    (tmp_path / "trackers" / "run.json").write_text(content)
    with pytest.raises(UserError, match=r"run\.json: "), tracked():
        pass


def test_without_libraries_nothing_is_kept(tracked, tmp_path):
    with tracked(("jsonl", "tensorboard")) as trackers:
        start(trackers)
        trackers.log(1, {"loss": 2.0})
    assert list(tmp_path.iterdir()) == []


def test_an_error_of_the_run_is_a_failed_end(tracked):
    def fail():
        with tracked() as trackers:
            start(trackers)
            trackers.exit_code = 0
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert Stub.made["wandb"].calls[-1] == ("finish", 1)


def test_a_tracker_that_raises_is_a_warning_and_a_count(tracked, lines):
    def fail(call):
        if call[0] == "log":
            raise TrackerError("no route to host")

    with tracked() as trackers:
        Stub.made["wandb"].answer = fail
        start(trackers)
        for step in range(20):
            trackers.log(step, {"loss": 2.0})
    assert lines[1:] == [
        "warning: tracker wandb: no route to host; writes lost so far: 1 of steps; training goes "
        "on",
        "warning: tracker wandb: writes lost so far: 20 of steps",
    ]
    assert len(Stub.made["support.observers.Recording"].calls) == 22, "the other has all"


def test_what_does_not_fit_in_the_queue_of_a_slow_tracker_is_counted(tracked, lines, monkeypatch):
    monkeypatch.setattr("geojax.train.writing.background_writer._MOST_WAITING", 5)
    go_on = threading.Event()
    with tracked((WandbSettings(),)) as trackers:
        stub = Stub.made["wandb"]
        stub.answer = lambda call: go_on.wait(PATIENCE_SECONDS)
        start(trackers)
        wait_until(lambda: trackers._fed[0].writer._running is not None)
        for step in range(9):
            trackers.log(step, {"loss": 2.0})
        assert trackers._fed[0].writer.lost == 4
        go_on.set()
    assert "warning: tracker wandb: 5 writes wait already, and no more may; writes lost" in lines[1]
    assert lines[-1] == "warning: tracker wandb: writes lost so far: 4 of steps"
    assert [call[1] for call in stub.calls if call[0] == "log"] == [0, 1, 2, 3, 4]


def test_all_trackers_that_hang_share_the_time_at_the_end(tracked, lines):
    with tracked(closing_seconds=0.2) as trackers:
        for stub in Stub.made.values():
            stub.answer = stub.hang
        start(trackers)
        trackers.log(1, {"loss": 2.0})
        before = time.monotonic()
    assert time.monotonic() - before < PATIENCE_SECONDS
    assert all(stub.is_killed.is_set() for stub in Stub.made.values())
    assert [line.partition("; ")[0] for line in lines[1:]] == [
        "warning: tracker support.observers:Recording: does not answer",
        "warning: tracker wandb: does not answer",
    ]


def test_metrics_go_to_trackers_and_to_tensorboard_only_where_it_is_named(tracked, tmp_path):
    directory = RunDirectory(tmp_path)
    with tracked() as trackers, BackgroundWriter(tmp_path, print) as files:
        writer = MetricsWriter(directory, 0, files, tensorboard=False, trackers=trackers)
        start(trackers)
        writer.write(1, {"loss": float("nan")})
    assert directory.metrics.read_text() == '{"step": 1, "loss": null}\n'
    assert not directory.tensorboard.exists()
    (loss,) = Stub.made["wandb"].calls[1][2].values()
    assert loss != loss


@pytest.mark.processes
def test_a_class_of_the_users_gets_the_steps_of_a_run(tracked, tmp_path, lines):
    own = OwnTracker(module="support.observers:Faulty", path=str(tmp_path / "calls"))
    with tracked((own,), TrackerProcess) as trackers:
        start(trackers)
        trackers.log(1, {"loss": 2.0})
        trackers.log(2, {"exit": 2.0})
        trackers.log(3, {"loss": 1.0})
        trackers.exit_code = 0
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls[1:] == ["1 {'loss': 2.0}", "3 {'loss': 1.0}", "finish 0"]
    assert "tracker support.observers:Faulty: SystemExit: the library ends; writes lost" in lines[1]
