"""A process is named as the slowest if it is slower than the others, and only then."""

import json
import math
import threading
from concurrent.futures import Future

import pytest

from geojax.train import slowest
from geojax.train.slowest import (
    ProcessFigures,
    SiteWaits,
    SlowestWatch,
    read_figures,
    slow_process,
    slow_site,
)

EVEN = ProcessFigures(1, step=0.05, host=0.004, late=0.001, throttled=0.0, product=0.02)


def figures(**changed):
    others = {0: EVEN, 1: EVEN._replace(host=0.0042, product=0.021), 3: EVEN._replace(host=0.0041)}
    return {**others, 2: EVEN._replace(**changed)}


@pytest.mark.parametrize(
    ("changed", "cause"),
    [
        ({"host": 0.012}, "host"),
        ({"throttled": 0.02}, "throttled"),
        ({"late": 0.02}, "late"),
        ({"product": 0.05}, "product"),
        ({"product": 0.05, "host": 0.012}, "host"),
    ],
)
def test_a_process_is_named_by_what_is_slow(changed, cause):
    slow = slow_process(figures(**changed))
    assert (slow.process, slow.cause) == (2, cause)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"host": 0.0055},
        {"host": 0.008},
        {"throttled": 0.002},
        {"late": 0.003},
        {"product": math.nan},
    ],
)
def test_nobody_is_named_who_is_like_the_others_or_costs_little(changed):
    assert slow_process(figures(**changed)) is None


@pytest.mark.parametrize(
    ("late", "slow"),
    [
        # Milliseconds of four processes on two busy cores, the third stopped half of the time.
        ((23.7, 25.5, 45.1, 22.6), 2),
        ((19.6, 25.2, 41.7, 26.6), 2),
        ((34.8, 36.7, 55.0, 29.1), 2),
        ((26.8, 35.1, 57.4, 27.1), 2),
        ((24.5, 31.0, 26.0, 24.5), None),
        ((21.3, 20.7, 29.7, 35.9), None),  # other work of the machine
        ((20.0, 40.0, 60.0, 50.0), None),
    ],
)
def test_the_others_say_how_much_is_usual(late, slow):
    told = {process: EVEN._replace(late=each / 1e3) for process, each in enumerate(late)}
    named = slow_process(told)
    assert (None if named is None else named.process) == slow


def test_a_twentieth_of_a_step_is_no_reason():
    hosts = (0.0109, 0.0066, 0.0066, 0.0077)  # of an even run
    told = {process: EVEN._replace(step=0.07, host=host) for process, host in enumerate(hosts)}
    assert slow_process(told) is None


def test_of_two_processes_nobody_is_named():
    assert slow_process({0: EVEN, 1: EVEN._replace(host=1.0)}) is None


def test_what_is_no_figure_of_the_window_is_left_out():
    told = json.dumps(EVEN)
    entries = {"0": told, "1": json.dumps(EVEN._replace(window=2)), "2": "[]", "x": told}
    entries |= {"4": "[" * 10_000, "5": json.dumps([1, "a", 2.0, 3.0, 4.0, 5.0])}
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
            watch.ended(step, 0.05, 0.0)
    return store, told, watches[0]


def test_a_process_sends_one_message_a_window_and_process_0_reads_once(monkeypatch):
    store, told, _ = run_windows(monkeypatch, 3, lambda process: 0.02)
    assert (store.sets, store.reads, told) == (4 * 3, 3, [])
    assert max(map(len, store.values())) < 200


def test_a_slow_device_is_named_when_it_is_slow_three_times(monkeypatch):
    _, told, watch = run_windows(monkeypatch, 4, lambda process: 0.05 if process == 1 else 0.02)
    assert [step for step, _ in told] == [310, 410]
    assert "process 1 " in told[-1][1]
    assert "in 2 of 4 windows" in told[-1][1]
    assert watch.counts.named == {1: 2}
    assert watch.counts.metrics == {
        "slowest/process": 1,
        "slowest/seconds": pytest.approx(0.03),
        "slowest/windows": 2,
        "slowest/of": 4,
    }


def test_a_store_that_does_not_answer_holds_nobody_up(monkeypatch):
    release = threading.Event()
    monkeypatch.setattr(slowest, "publish", lambda *entry: release.wait())
    with SlowestWatch(1, lambda *event: None) as watch:
        for step in range(1, 2001):
            watch.ended(step, 0.05, 0.0)
        release.set()


@pytest.mark.parametrize(
    ("waits", "site"),
    [
        ({"east": 0.001, "west": 0.2}, "east"),
        ({"east": 0.2, "west": 0.01, "north": 0.21}, "west"),
        ({"east": 0.2, "west": 0.19}, None),  # both wait for the link
        ({"east": 0.001, "west": 0.09}, None),  # less than a tenth of a step
        ({"east": 0.0, "west": 0.01, "north": 0.4}, None),  # north alone waits
        ({"east": 0.3}, None),
    ],
)
def test_a_site_is_named_that_all_others_wait_for(waits, site):
    slow = slow_site(waits, 1.0)
    assert (None if slow is None else slow.site) == site


def test_a_window_of_waits_names_a_site_and_how_often():
    told = []
    waits = SiteWaits(lambda *event: told.append(event))
    for step in range(1, 401):
        late = 0.0 if 100 < step <= 200 else 0.3
        waits.add(step, 1.0, {"east": 0.002, "west": late} if step > 5 else {"east": 0.002})
    assert [step for step, _ in told] == [100, 300, 400]
    assert told[-1][1] == (
        "site east waits 2 ms a step for other sites, and each other site waits 298 ms longer; "
        "the slowest in 3 of 4 windows of 100 steps"
    )
    assert waits.counts.metrics["slowest/windows"] == 3
    assert "slowest/process" not in waits.counts.metrics
