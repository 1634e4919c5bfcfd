import itertools

import jax
import pytest

from geojax.runtime import translate_collective_errors
from geojax.runtime.liveness import heartbeat
from geojax.runtime.liveness.exit_messages import blamed_process, blames_another, lost_contact
from geojax.runtime.liveness.heartbeat import Heartbeat, SilenceDetector


def beats(*times):
    """Heartbeats of processes 0, 1, ...; None for one that has sent none."""
    return {
        process: Heartbeat(time, step=7, activity="training step")
        for process, time in enumerate(times)
        if time is not None
    }


def test_a_process_whose_heartbeat_stops_is_silent_after_the_timeout():
    detector = SilenceDetector(2, 10.0, now=0.0)
    assert detector.silent(beats(1, 1), now=1.0) == []
    assert detector.silent(beats(2, 1), now=11.0) == []
    assert detector.silent(beats(3, 1), now=12.0) == [1]
    assert detector.silent(beats(3, 2), now=13.0) == []


def test_a_process_that_never_sends_a_heartbeat_is_silent_from_the_beginning():
    detector = SilenceDetector(2, 10.0, now=5.0)
    assert detector.silent(beats(1), now=15.0) == []
    assert detector.silent(beats(2), now=15.5) == [1]


def test_a_heartbeat_says_what_its_process_does(monkeypatch):
    store = {}
    monkeypatch.setattr(heartbeat, "publish", store.__setitem__)
    monkeypatch.setattr(heartbeat, "published", lambda folder: {"2": store[f"{folder}/2"]})
    monkeypatch.setattr(heartbeat, "process_index_and_count", lambda: (2, 4))
    monkeypatch.setattr(heartbeat, "_progress", heartbeat._progress)
    heartbeat.report_progress(12, "validation")
    heartbeat.send_heartbeat()
    first = heartbeat.read_heartbeats()
    heartbeat.send_heartbeat()
    assert first[2][1:] == (12, "validation")
    assert heartbeat.read_heartbeats()[2].time > first[2].time


@pytest.fixture
def in_a_job(monkeypatch):
    """Lets this be process 1 of 4, which reads what a function of the time returns."""

    def in_a_job(answer):
        times = itertools.count()
        monkeypatch.setattr(heartbeat, "_POLL_SECONDS", 0.0)
        monkeypatch.setattr(heartbeat, "process_index_and_count", lambda: (1, 4))
        monkeypatch.setattr(heartbeat, "read_heartbeats", lambda: answer(next(times)))

    return in_a_job


def test_a_process_that_sends_no_heartbeat_while_this_one_does_is_silent(in_a_job):
    # Process 2 stopped, and 3 never sent one.
    in_a_job(lambda time: beats(time // 5, time // 4, 7))
    assert heartbeat.silent_processes() == [2, 3]


def test_nobody_is_silent_while_all_send_heartbeats(in_a_job):
    in_a_job(lambda time: beats(*[time // 5] * 4))
    assert heartbeat.silent_processes() == []


def test_without_heartbeats_of_its_own_a_process_names_nobody(in_a_job):
    in_a_job(lambda time: {})
    assert heartbeat.silent_processes() == []


def test_where_the_store_does_not_answer_process_0_is_gone(in_a_job):
    def answer(time):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")

    in_a_job(answer)
    assert heartbeat.silent_processes() == [0]


def test_what_is_said_of_a_lost_process_is_understood():
    named = lost_contact(": process 12 (site west, host n17), which coordinates the run, is gone")
    assert (blamed_process(named), blames_another(named)) == (12, True)
    assert blamed_process(lost_contact(" (connection closed)")) is None


def test_an_error_of_jax_in_a_lone_process_has_nothing_to_do_with_others():
    with pytest.raises(jax.errors.JaxRuntimeError, match="oops"), translate_collective_errors():
        raise jax.errors.JaxRuntimeError("oops")
