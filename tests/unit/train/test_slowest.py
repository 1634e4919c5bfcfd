"""A process is named as the slowest if it is slower than the others, and only then."""

import json
import math
import threading
from concurrent.futures import Future

import pytest

from geojax.train import slowest
from geojax.train.slowest import ProcessFigures, SlowestWatch, read_figures, slow_process

EVEN = ProcessFigures(1, step=0.05, host=0.004, throttled=0.0, product=0.02)


def figures(**changed):
    others = {0: EVEN, 1: EVEN._replace(host=0.0042, product=0.021), 3: EVEN._replace(host=0.0041)}
    return {**others, 2: EVEN._replace(**changed)}


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"host": 0.012}, "host"),
        ({"throttled": 0.02}, "throttled"),
        ({"product": 0.05}, "product"),
        ({"product": 0.05, "host": 0.012}, "host"),
    ],
)
def test_a_process_is_named_by_what_is_slow(changed, cause):
    slow = slow_process(figures(**changed))
    assert (slow.process, slow.cause) == (2, cause)


@pytest.mark.parametrize(
    "changed",
    [{}, {"host": 0.0055}, {"host": 0.006}, {"throttled": 0.002}, {"product": math.nan}],
)
def test_nobody_is_named_who_is_like_the_others_or_costs_little(changed):
    assert slow_process(figures(**changed)) is None


def test_of_two_processes_nobody_is_named():
    assert slow_process({0: EVEN, 1: EVEN._replace(host=1.0)}) is None


def test_what_is_no_figure_of_the_window_is_left_out():
    told = json.dumps(EVEN)
    entries = {"0": told, "1": json.dumps(EVEN._replace(window=2)), "2": "[]", "x": told}
    entries |= {"4": "[" * 10_000, "5": json.dumps([1, "a", 2.0, 3.0, 4.0])}
    assert read_figures(entries, 1) == {0: EVEN}


class Store(dict):
    """A store that counts its messages."""

    def __init__(self):
        super().__init__()
        self.sets = self.reads = 0

    def publish(self, key, value):
        self.sets += 1
        self[key] = value

    def published(self, folder):
        self.reads += 1
        return {key.removeprefix(f"{folder}/"): value for key, value in self.items()}


def run_windows(monkeypatch, windows, product_of):
    """Run steps of four processes; return the store and what process 0 told."""
    store, told = Store(), []
    monkeypatch.setattr(slowest, "publish", store.publish)
    monkeypatch.setattr(slowest, "published", store.published)
    watches = [
        SlowestWatch(process, lambda *event: told.append(event), lambda loss: loss)
        for process in range(4)
    ]
    for watch in watches:  # calls run at once
        monkeypatch.setattr(watch, "_call", lambda call: call())
    for step in range(1, windows * slowest.WINDOW_STEPS + slowest.READ_AFTER_STEPS + 1):
        for process, watch in enumerate(watches):
            end = Future()
            end.set_result(0.0)

            def end_of(arrays, process=process):
                after = Future()
                after.set_result(product_of(process))
                return after

            watch.dispatched(step, 0.001, {"loss": 0.0}, end, end_of)
            watch.ended(step, 0.05)
    return store, told, watches[0]


def test_a_process_sends_one_message_a_window_and_process_0_reads_once(monkeypatch):
    store, told, _ = run_windows(monkeypatch, 3, lambda process: 0.02)
    assert (store.sets, store.reads, told) == (4 * 3, 3, [])
    assert max(map(len, store.values())) < 200


def test_a_slow_device_is_named_when_it_is_slow_twice(monkeypatch):
    _, told, watch = run_windows(monkeypatch, 3, lambda process: 0.05 if process == 1 else 0.02)
    assert [step for step, _ in told] == [210, 310]
    assert "process 1 " in told[-1][1]
    assert "in 2 of 3 windows" in told[-1][1]
    assert watch.named == {1: 2}


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(slowest, "publish", lambda *entry: release.wait())
    with SlowestWatch(1, lambda *event: None) as watch:
        for step in range(1, 2001):
            watch.ended(step, 0.05)
        release.set()
