"""Profiles around steps of a loop, on a profiler that only notes its calls."""

import threading

import pytest

from geojax.config.profile_settings import ProfileSettings
from geojax.runtime import Watchdog
from geojax.train.step_profiler import StepProfiler


class Asked:
    """A signal that came, or did not."""

    def __init__(self):
        self.came = False

    def take(self):
        came, self.came = self.came, False
        return came


@pytest.fixture
def calls(monkeypatch):
    """The calls of the profiler and the waits for results, in their order."""
    noted = []

    def start(folder, profiler_options):
        noted.append("start")
        (folder / "plugins").mkdir(exist_ok=True)
        (folder / "plugins" / "host.xplane.pb").write_bytes(b"12345")

    monkeypatch.setattr("jax.profiler.start_trace", start)
    monkeypatch.setattr("jax.profiler.stop_trace", lambda: noted.append("stop"))
    monkeypatch.setattr(End, "result", lambda end: noted.append(end.step))
    return noted


class End:
    """The end of a step, on which the profiler may wait."""

    def __init__(self, step):
        self.step = step

    def result(self):
        """Return at once."""


def loop(tmp_path, numbers=range(1, 9), *, during=None, process=0, asked=None, **settings):
    """Run steps, one of which is under way when the next one begins; return the lines."""
    lines = []
    profiler = StepProfiler(
        tmp_path, ProfileSettings(**settings), process, Watchdog(), lines.append, asked
    )
    with profiler:
        under_way = None
        for step in numbers:
            if during is not None:
                during(step)
            profiler.begin_step(step, under_way)
            under_way = End(step)
            profiler.end_step(step, under_way)
    return lines


def test_a_profile_begins_when_the_step_before_has_ended_and_ends_with_its_last(calls, tmp_path):
    (line,) = loop(tmp_path, start=3, steps=2)
    assert calls == [2, "start", 4, "stop"]
    folder = tmp_path / "step-00000003" / "process-0"
    assert line.startswith("profile of steps 3 to 4 on process 0: 5 B of trace and ")
    assert f" of memory.pprof in {folder}" in line
    assert (folder / "memory.pprof").stat().st_size > 0


def test_the_first_step_may_be_profiled(calls, tmp_path):
    (line,) = loop(tmp_path, start=1, steps=1)
    assert calls == ["start", 1, "stop"]
    assert line.startswith("profile of step 1 on")


def test_nothing_waits_where_nothing_is_profiled(calls, tmp_path):
    assert loop(tmp_path) == []
    assert loop(tmp_path, start=3, process=1) == []
    assert calls == []


def test_a_signal_profiles_the_next_steps_after_the_profile_under_way(calls, tmp_path):
    asked = Asked()

    def during(step):
        asked.came |= step in (2, 3)

    lines = loop(tmp_path, start=2, steps=3, during=during, asked=asked)
    assert calls == [1, "start", 4, "stop", 4, "start", 7, "stop"]
    assert [line[:24] for line in lines] == ["profile of steps 2 to 4 ", "profile of steps 5 to 7 "]


def test_a_run_that_ends_sooner_keeps_the_steps_that_it_did(calls, tmp_path):
    (line,) = loop(tmp_path, range(1, 4), start=2)
    assert calls == [1, "start", "stop"]
    assert line.startswith("profile of steps 2 to 3 on")


def test_a_run_that_is_resumed_profiles_the_steps_that_are_left(calls, tmp_path):
    (line,) = loop(tmp_path, range(4, 9), start=2)
    assert line.startswith("profile of steps 4 to 6 on")
    (line,) = loop(tmp_path, range(7, 9), start=2)
    assert line == "note: profile.start: step 6 is done already and not profiled"


@pytest.mark.parametrize("fails", ["start_trace", "stop_trace", "save_device_memory_profile"])
def test_a_profiler_that_fails_is_a_warning(calls, tmp_path, monkeypatch, fails):
    def fail(*arguments, **options):
        raise OSError(28, "No space left\non device")

    monkeypatch.setattr(f"jax.profiler.{fails}", fail)
    (line,) = loop(tmp_path, start=3, steps=2)
    assert not any(path.is_file() for path in tmp_path.rglob("*"))
    assert line == (
        "warning: no profile of steps 3 to 4 on process 0 ([Errno 28] No space left on device); "
        "the run goes on"
    )


def test_a_long_writing_goes_on_beside_the_next_steps(calls, tmp_path, monkeypatch):
    monkeypatch.setattr("geojax.train.step_profiler.HOLD_SECONDS", 0.01)
    goes_on, asked = threading.Event(), Asked()

    def during(step):
        asked.came |= step == 3  # profiled when the trace of step 2 has been written
        if step == 6:
            calls.append("long after")
            goes_on.set()
            (writer,) = [each for each in threading.enumerate() if each.name == "geojax profile"]
            writer.join()

    monkeypatch.setattr("jax.profiler.stop_trace", lambda: calls.append(goes_on.wait() and "stop"))
    lines = loop(tmp_path, range(1, 7), start=2, steps=1, during=during, asked=asked)
    assert calls == [1, "start", 2, "long after", "stop", 5, "start", "stop"]
    assert [line[:21] for line in lines] == ["profile of step 2 on ", "profile of step 6 on "]


def test_a_profiler_that_writes_nothing_is_a_warning(calls, tmp_path, monkeypatch):
    monkeypatch.setattr("jax.profiler.start_trace", lambda *each, **options: None)
    (line,) = loop(tmp_path, start=3, steps=2)
    assert line.startswith("warning: no profile of steps 3 to 4 on process 0 (no trace was written")
