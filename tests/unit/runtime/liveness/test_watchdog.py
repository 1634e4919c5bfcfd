import os
import subprocess
import sys
import threading
import time

import pytest
from support.processes import PATIENCE_SECONDS

from geojax.exit_codes import FAILURE, HANG
from geojax.runtime import Watchdog, WatchdogSettings
from geojax.runtime.liveness.health import Group, Health
from geojax.runtime.liveness.watchdog import describe_laggards


def test_the_limit_follows_the_median_of_the_steps_before():
    watchdog = Watchdog(WatchdogSettings(factor=10, minimum_seconds=2, first_step_seconds=99))
    assert watchdog.limit_seconds() == 99
    watchdog._durations["training step"].extend([60.0, 0.5, 0.4, 0.5])
    assert watchdog.limit_seconds() == 5
    watchdog._durations["training step"].extend([0.1] * 50)
    assert watchdog.limit_seconds() == 2


def test_steps_in_time_do_not_wake_it():
    ended = []
    with Watchdog(WatchdogSettings(minimum_seconds=60), end_process=ended.append) as watchdog:
        for step in range(20):
            with watchdog.step(step):
                pass
    assert ended == []


def test_a_step_that_hangs_ends_the_process_once():
    ended, done = [], threading.Event()

    def end(code):
        ended.append(code)
        done.set()

    settings = WatchdogSettings(minimum_seconds=0.2)
    with Watchdog(settings, end_process=end) as watchdog:
        with watchdog.step(0):
            pass
        with watchdog.step(1):
            assert done.wait(PATIENCE_SECONDS)
    assert ended == [HANG]


def test_a_dispatch_that_waits_for_another_job_names_it(capfd):
    ended, done = [], threading.Event()

    def end(code):
        ended.append(code)
        done.set()

    settings = WatchdogSettings(minimum_seconds=0.2)
    with Watchdog(settings, end, missing=lambda: "nothing came from site west") as watchdog:
        work(watchdog, "dispatch", "training step")
        with watchdog.dispatch(1):
            assert done.wait(PATIENCE_SECONDS)
    assert ended == [FAILURE]
    said = capfd.readouterr().err
    assert "step 1 (dispatch) has taken" in said
    assert "geojax watchdog: nothing came from site west; ending with code 1" in said


def test_time_in_which_sites_decide_who_goes_on_counts_for_nothing():
    ended, asked, is_open = [], threading.Semaphore(0), [True]

    def decides():
        asked.release()
        return is_open[0]

    settings = WatchdogSettings(minimum_seconds=0.2)
    with Watchdog(settings, end_process=ended.append, decides=decides) as watchdog:
        with watchdog.step(0):
            pass
        with watchdog.step(1):
            for _ in range(12):  # each after a quarter of the limit
                assert asked.acquire(timeout=PATIENCE_SECONDS)
            assert ended == []
            is_open[0] = False
            deadline = time.monotonic() + PATIENCE_SECONDS
            while not ended and time.monotonic() < deadline:
                time.sleep(0.01)
    assert ended == [HANG]


def test_a_failing_step_is_no_longer_watched():
    watchdog = Watchdog()
    with pytest.raises(RuntimeError), watchdog.step(3):
        raise RuntimeError
    assert watchdog._running is None


def test_a_process_that_hangs_leaves_its_stacks_and_a_code():
    program = """
import time
from geojax.runtime import Watchdog, WatchdogSettings
with Watchdog(WatchdogSettings(minimum_seconds=0.3)) as watchdog:
    with watchdog.step(0):
        pass
    def sleeps_for_ever():
        time.sleep(1000)
    with watchdog.step(1):
        sleeps_for_ever()
"""
    result = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert result.returncode == HANG
    assert "step 1 (training step) has taken" in result.stderr
    assert "sleeps_for_ever" in result.stderr
    assert "this is the only process" in result.stderr


def health(quiet=(), behind=()):
    return Health(9, Group.of(quiet), 7, Group.of(behind), (6, "training step"))


@pytest.mark.parametrize(
    ("report", "sentence"),
    [
        (health(behind=[1]), "process 1 did not reach step 7, but is still at step 6 (training"),
        (health(quiet=[1], behind=[0]), "no heartbeat from process 1"),
        (health(), "all 2 processes are alive and in step 7"),
    ],
)
def test_the_process_that_is_behind_is_named(report, sentence):
    assert sentence in describe_laggards(report, process_count=2)


@pytest.fixture
def watchdog():
    """A watchdog in which every limit is another, and no work has been done."""
    limits = {"first_step_seconds": 9000, "first_validation_seconds": 700, "save_seconds": 50}
    return Watchdog(WatchdogSettings(factor=10, minimum_seconds=2, **limits))


def work(watchdog, *kinds):
    for kind in kinds:
        with watchdog.dispatch(0) if kind == "dispatch" else watchdog.step(0, kind):
            pass


def test_each_kind_of_work_has_limits_of_its_own(watchdog):
    for kind, first, later in (
        ("training step", 9000, 2),
        ("validation", 700, 2),
        ("save", 50, 50),
    ):
        watchdog._previous = None
        assert watchdog.limit_seconds(kind) == first
        work(watchdog, kind)
        assert watchdog.limit_seconds(kind) == later


def test_the_first_training_step_after_validation_may_compile(watchdog):
    work(watchdog, "validation", "validation")
    assert watchdog.limit_seconds("training step") == 9000 + 2
    work(watchdog, "training step")
    assert watchdog.limit_seconds("training step") == 2


def test_a_step_may_wait_for_a_process_that_still_saves(watchdog):
    work(watchdog, "training step", "save")
    assert watchdog.limit_seconds("training step") == 2 + 50
    work(watchdog, "training step")
    assert watchdog.limit_seconds("training step") == 2


def test_a_dispatch_may_wait_for_the_step_before_it_and_for_a_save(watchdog):
    work(watchdog, "dispatch")
    assert watchdog.limit_seconds("dispatch") == 9000
    work(watchdog, "training step")
    assert watchdog.limit_seconds("dispatch") == 2
    watchdog._durations["dispatch"].extend([3.0] * 50)
    assert watchdog.limit_seconds("dispatch") == 30
    work(watchdog, "save", "dispatch")
    assert watchdog.limit_seconds("training step") == 2 + 50
    work(watchdog, "training step")
    assert watchdog.limit_seconds("training step") == 2


def test_the_clock_runs_between_the_steps_and_names_what_hangs(capfd):
    ended, done = [], threading.Event()

    def end(code):
        ended.append(code)
        done.set()

    with Watchdog(WatchdogSettings(minimum_seconds=0.2), end) as watchdog:
        watchdog.begin("host work")
        with watchdog.step(3):
            pass
        assert done.wait(PATIENCE_SECONDS)
    assert ended == [HANG]
    assert "step 3 (host work) has taken" in capfd.readouterr().err


def test_a_wait_for_data_is_named(capfd):
    ended, done = [], threading.Event()

    def end(code):
        ended.append(code)
        done.set()

    with Watchdog(WatchdogSettings(minimum_seconds=0.2), end) as watchdog:
        with watchdog.data(11):
            pass
        with watchdog.data(12):
            assert done.wait(PATIENCE_SECONDS)
    assert "step 12 (data) has taken" in capfd.readouterr().err


def test_a_report_that_cannot_be_written_does_not_keep_the_process(monkeypatch):
    ended, done, answer = [], threading.Event(), threading.Event()

    def end(code):
        ended.append(code)
        done.set()

    def hang(*arguments, **options):
        answer.wait(PATIENCE_SECONDS)

    monkeypatch.setattr("geojax.runtime.liveness.watchdog._REPORT_SECONDS", 0.1)
    monkeypatch.setattr("geojax.runtime.liveness.watchdog.faulthandler.dump_traceback", hang)
    with Watchdog(WatchdogSettings(minimum_seconds=0.2), end) as watchdog:
        with watchdog.step(0):
            pass
        with watchdog.step(1):
            assert done.wait(PATIENCE_SECONDS)
    assert ended == [HANG]
    answer.set()


def test_phases_leave_barriers_time_for_their_own_message(watchdog):
    assert watchdog.settings.first_limit("start") == 9000 + 2
    assert watchdog.settings.first_limit("end") == 9000 + 2
    assert watchdog.settings.first_limit("host work") == 2


def test_a_hang_is_found_by_the_limit_of_its_kind():
    ended, done = [], threading.Event()

    def end(code):
        ended.append((code, time.monotonic()))
        done.set()

    settings = WatchdogSettings(minimum_seconds=0.1, save_seconds=0.4)
    started = time.monotonic()
    with Watchdog(settings, end_process=end) as watchdog, watchdog.step(7, "save"):
        assert done.wait(PATIENCE_SECONDS)
    ((code, at),) = ended
    assert code == HANG
    assert at - started >= 0.4


@pytest.mark.parametrize("field", ["factor", "minimum_seconds", "save_seconds"])
@pytest.mark.parametrize("value", [1e-300, 1e30])
def test_limits_that_make_no_sense_are_refused(field, value):
    with pytest.raises(ValueError, match=field):
        WatchdogSettings(**{field: value})
