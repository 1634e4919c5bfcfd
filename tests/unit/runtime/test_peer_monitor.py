import itertools

import jax
import pytest

from geojax.runtime import heartbeat, naming_lost_contact
from geojax.runtime.exit_messages import blamed_process, blames_another, lost_contact
from geojax.runtime.heartbeat import Silence


def test_whoever_stops_renewing_its_sign_is_silent_after_the_limit():
    silence = Silence(2, 10.0, now=0.0)
    assert silence.processes({"0": "1", "1": "1"}, now=1.0) == []
    assert silence.processes({"0": "2", "1": "1"}, now=11.0) == []
    assert silence.processes({"0": "3", "1": "1"}, now=12.0) == [1]
    assert silence.processes({"0": "3", "1": "2"}, now=13.0) == []


def test_whoever_gives_no_sign_at_all_is_silent_from_the_beginning():
    silence = Silence(2, 10.0, now=5.0)
    assert silence.processes({"0": "1"}, now=15.0) == []
    assert silence.processes({"0": "2"}, now=15.5) == [1]


@pytest.fixture
def in_a_job(monkeypatch):
    """Lets this be process 1 of 4, whose store answers with what a function of the time says."""

    def in_a_job(answer):
        times = itertools.count()
        monkeypatch.setattr(heartbeat, "_ASK_SECONDS", 0.0)
        monkeypatch.setattr(heartbeat, "place_in_job", lambda: (1, 4))
        monkeypatch.setattr(heartbeat, "signs", lambda: answer(next(times)))

    return in_a_job


def test_who_does_not_renew_its_sign_while_this_process_does_is_silent_now(in_a_job):
    # Process 2 stopped, and 3 never came.
    in_a_job(lambda time: {"0": str(time // 5), "1": str(time // 4), "2": "7"})
    assert heartbeat.silent_now() == [2, 3]


def test_nobody_is_silent_where_all_renew_their_signs(in_a_job):
    in_a_job(lambda time: dict.fromkeys("0123", str(time // 5)))
    assert heartbeat.silent_now() == []


def test_without_signs_of_its_own_a_process_names_nobody(in_a_job):
    in_a_job(lambda time: {})
    assert heartbeat.silent_now() == []


def test_where_the_store_does_not_answer_process_0_is_gone(in_a_job):
    def answer(time):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: Socket closed")

    in_a_job(answer)
    assert heartbeat.silent_now() == [0]


def test_what_is_said_of_a_lost_process_is_understood():
    named = lost_contact(": process 12 (site west, host n17), which coordinates the run, is gone")
    assert (blamed_process(named), blames_another(named)) == (12, True)
    assert blamed_process(lost_contact(" (connection closed)")) is None


def test_an_error_of_jax_in_a_lone_process_has_nothing_to_do_with_others():
    with pytest.raises(jax.errors.JaxRuntimeError, match="oops"), naming_lost_contact():
        raise jax.errors.JaxRuntimeError("oops")
