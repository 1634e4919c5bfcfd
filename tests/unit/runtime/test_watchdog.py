import os
import subprocess
import sys
import threading

import pytest

from geojax.exit_codes import HANGING
from geojax.runtime import Watchdog, WatchdogSettings
from geojax.runtime.watchdog import who_is_behind


def test_the_limit_follows_the_median_of_the_steps_before():
    watchdog = Watchdog(WatchdogSettings(factor=10, minimum_seconds=2, first_step_seconds=99))
    assert watchdog.limit_seconds == 99
    watchdog._durations.extend([60.0, 0.5, 0.4, 0.5])
    assert watchdog.limit_seconds == 5
    watchdog._durations.extend([0.1] * 50)
    assert watchdog.limit_seconds == 2


def test_steps_in_time_do_not_wake_it():
    ended = []
    with Watchdog(WatchdogSettings(minimum_seconds=5), end_process=ended.append) as watchdog:
        for step in range(20):
            with watchdog.step(step):
                pass
    assert ended == []


def test_a_step_that_hangs_ends_the_process_once():
    ended, done = [], threading.Event()

    def end(code):
        ended.append(code)
        done.set()

    settings = WatchdogSettings(minimum_seconds=0.2, heartbeat_seconds=0.05)
    with Watchdog(settings, end_process=end) as watchdog:
        with watchdog.step(0):
            pass
        with watchdog.step(1):
            assert done.wait(30)
    assert ended == [HANGING]


def test_a_failing_step_is_no_longer_watched():
    watchdog = Watchdog()
    with pytest.raises(RuntimeError), watchdog.step(3):
        raise RuntimeError
    assert watchdog._current is None


def test_a_process_that_hangs_leaves_its_stacks_and_a_code():
    program = """
import time
from geojax.runtime import Watchdog, WatchdogSettings
with Watchdog(WatchdogSettings(minimum_seconds=0.3, heartbeat_seconds=0.1)) as watchdog:
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
    assert result.returncode == HANGING
    assert "step 1 has taken" in result.stderr
    assert "sleeps_for_ever" in result.stderr
    assert "this is the only process" in result.stderr


@pytest.mark.parametrize(
    ("before", "after", "sentence"),
    [
        ({0: (7, 10), 1: (6, 10)}, {0: (7, 11), 1: (6, 11)}, "process 1 did not come to step 7"),
        ({0: (7, 10), 1: (7, 10)}, {0: (7, 11), 1: (7, 10)}, "no sign of life from process 1"),
        ({0: (7, 10)}, {0: (7, 11)}, "no sign of life from process 1"),
        ({0: (7, 10), 1: (7, 3)}, {0: (7, 11), 1: (7, 4)}, "all 2 processes are alive"),
    ],
)
def test_the_process_that_is_behind_is_named(before, after, sentence):
    assert sentence in who_is_behind(before, after, process_count=2)
