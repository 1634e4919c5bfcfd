"""Heartbeats and the report on them; what 3,072 processes ask of the store."""

import collections
import json
import math

import jax
import pytest

from geojax.runtime.key_value_store import publish
from geojax.runtime.liveness import health, heartbeat
from geojax.runtime.liveness.abort_notice import (
    AbortNotice,
    publish_abort_notice,
    read_abort_notice,
)
from geojax.runtime.liveness.health import Group, HealthKeeper, keep_health, quiet_processes
from geojax.runtime.liveness.heartbeat import Heartbeat, read_heartbeats, send_heartbeat

PROCESSES = 3072


def beats(*times, step=7):
    """Heartbeats of processes 0, 1, ...; None for one that has sent none."""
    return {
        process: Heartbeat(float(time), step, "training step")
        for process, time in enumerate(times)
        if time is not None
    }


def test_a_process_whose_heartbeat_stops_is_silent_after_the_timeout():
    keeper = HealthKeeper(2, 10.0, now=0.0)
    assert keeper.take_in(beats(1, 1), now=1.0) == []
    assert keeper.take_in(beats(2, 1), now=11.0) == []
    assert keeper.take_in(beats(3, 1), now=12.0) == [1]
    assert keeper.take_in(beats(3, 2), now=13.0) == []


def test_a_process_that_never_sends_a_heartbeat_is_silent_from_the_beginning():
    keeper = HealthKeeper(2, 10.0, now=5.0)
    assert keeper.take_in(beats(1), now=15.0) == []
    assert keeper.take_in(beats(2), now=15.5) == [1]


def test_a_heartbeat_that_is_written_back_keeps_nobody_alive():
    keeper = HealthKeeper(2, 10.0, now=0.0)
    for now in range(1, 9):
        keeper.take_in(beats(now, min(now, 3)), now)
    for now in range(9, 14):
        assert keeper.take_in(beats(now, now % 3), now) == []
    assert keeper.take_in(beats(14, 2), 14.0) == [1]


def test_a_report_names_the_quiet_and_those_behind():
    keeper = HealthKeeper(4, 99.0, now=0.0)
    assert keeper.report().furthest == -1
    for now in range(1, 7):
        keeper.take_in(beats(now, 1, now) | {3: Heartbeat(float(now), 5, "save")}, now)
    report = keeper.report()
    assert report.number == 2
    assert report.quiet == Group((1,), 1)
    assert (report.furthest, report.behind, report.at) == (7, Group((3,), 1), (5, "save"))


def test_a_heartbeat_says_what_its_process_does(job, monkeypatch):
    monkeypatch.setattr(heartbeat, "_progress", heartbeat._progress)
    job.own, job.count = 2, 4
    heartbeat.report_progress(12, "validation")
    send_heartbeat()
    first = read_heartbeats()
    send_heartbeat()
    assert first[2][1:3] == (12, "validation")
    assert read_heartbeats()[2].time > first[2].time


def test_a_heartbeat_says_how_long_earlier_ones_took_to_process_0_and_back(job, monkeypatch):
    monkeypatch.setattr(heartbeat, "_round_trips", collections.deque(maxlen=2))
    job.own, job.count = 2, 4
    send_heartbeat()
    assert math.isnan(read_heartbeats()[2].round_trip_seconds)
    send_heartbeat()
    assert 0 < read_heartbeats()[2].round_trip_seconds < 10


def test_a_heartbeat_of_nobody_or_of_nonsense_is_ignored(job):
    job.own, job.count = 0, 2
    send_heartbeat()
    for name, entry in (
        ("2", json.dumps([1.0, 1, "training step", 0.1])),
        ("-1", json.dumps([1.0, 1, "training step", 0.1])),
        ("x", json.dumps([1.0, 1, "training step", 0.1])),
        ("1", "[" * 200_000),
        ("1", json.dumps([1.0, "1", "training step", 0.1])),
        ("1", '[Infinity, 1, "training step", 0.1]'),
        ("1", json.dumps([1.0, 1, "\x1b[2J", 0.1])),
        ("1", json.dumps([1.0, 1, "training step", "0.1"])),
        ("1", "7"),
    ):
        publish(f"heartbeat/{name}", entry)
        assert list(read_heartbeats()) == [0]


def test_the_first_to_abort_is_believed(job):
    job.count = 3
    assert read_abort_notice() is None
    first = AbortNotice(2, 1, "no more disk")
    publish_abort_notice(first)
    publish_abort_notice(AbortNotice(1, 2, "lost contact"))
    assert read_abort_notice() == first
    job.store.notes["geojax/aborted"] = b'[1, 0, "forged"]'
    assert read_abort_notice() is None


def test_watching_costs_one_write_and_one_read_a_process(job):
    for _ in job.processes(PROCESSES):
        send_heartbeat()
        assert read_abort_notice() is None
    assert job.store.calls == {"set": PROCESSES, "get": PROCESSES}
    assert job.store.entries_read == 0
    job.own = 0
    keep_health(HealthKeeper(PROCESSES, 40.0, now=0.0), now=0.0)
    assert job.store.calls["folder"] == 1
    assert job.store.entries_read == PROCESSES, "only process 0 may read the heartbeats of all"


def test_finding_who_is_gone_costs_a_few_reads_a_process(job, monkeypatch):
    """Process 7 is gone, and the collectives of all others break."""
    keeper = HealthKeeper(PROCESSES, 40.0, now=0.0)
    for now in range(8):
        keeper.take_in(beats(*[now] * 7, 0, *[now] * (PROCESSES - 8)), now)

    def next_report(seconds):
        publish("health", json.dumps(keeper.report()))

    next_report(0)
    monkeypatch.setattr(health.time, "sleep", next_report)
    for process in job.processes(PROCESSES):
        if process != 7:
            assert health._quiet(process) == Group((7,), 1)
    assert job.store.calls["folder"] == 0
    assert job.store.entries_read <= 4 * PROCESSES


@pytest.fixture
def broken_collective(job, monkeypatch):
    """Lets this be process 1 of 4 in which a collective broke, while `sent(time)` are sent."""

    def find(sent):
        keeper, now = HealthKeeper(4, 99.0, now=0.0), 0

        def next_report(seconds=0.0):
            nonlocal now
            now += 1
            keeper.take_in(sent(now), now)
            publish("health", json.dumps(keeper.report()))

        job.own, job.count = 1, 4
        next_report()
        monkeypatch.setattr(health.time, "sleep", next_report)
        return quiet_processes().first

    return find


def test_a_process_that_sends_no_heartbeat_while_the_others_do_is_quiet(broken_collective):
    # Process 2 stopped, and 3 never sent one.
    assert broken_collective(lambda now: beats(now, now, 1)) == (2, 3)


def test_nobody_is_quiet_while_all_send_heartbeats(broken_collective):
    assert broken_collective(lambda now: beats(*[now // 2] * 4)) == ()


def test_without_reports_a_process_names_nobody(job):
    job.own, job.count = 1, 4
    assert quiet_processes().size == 0


def test_where_the_store_does_not_answer_process_0_is_gone(job, monkeypatch):
    def answer(key):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")

    job.own, job.count = 1, 4
    monkeypatch.setattr(job.store, "key_value_try_get_bytes", answer)
    assert quiet_processes().first == (0,)
