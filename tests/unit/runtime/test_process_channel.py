"""Texts between the first process of a job and its others."""

import jax
import pytest
from support.processes import wait_until

from geojax.runtime import process_channel
from geojax.runtime.process_channel import ProcessChannel


@pytest.fixture
def channels(job, monkeypatch, request):
    """The ends of three processes; those of an earlier test may still listen."""
    monkeypatch.setattr(process_channel, "process_index_and_count", lambda: (job.own, job.count))
    made = [ProcessChannel(request.node.name) for _ in job.processes(3)]
    yield made
    for channel in made:
        channel.close()


def texts(channel, count):
    """So many texts that come, with their senders."""
    found = []

    def all_came():
        found.extend(channel.received())
        return len(found) >= count

    wait_until(all_came)
    return found


def test_the_first_process_sends_to_all_and_hears_each_in_order(channels):
    first, *others = channels
    assert first.others == (1, 2)
    assert [other.others for other in others] == [(0,), (0,)]
    sent = [f"decision {number}" for number in range(5)]
    for text in sent:
        first.send(text)
    for other in others:
        assert texts(other, 5) == [(0, text) for text in sent]
    for other in others:
        for number in range(3):
            other.send(f"report {number} of {other.own}")
    came = texts(first, 6)
    for own in (1, 2):
        of_one = [text for sender, text in came if sender == own]
        assert of_one == [f"report {number} of {own}" for number in range(3)]


def test_read_reports_and_old_decisions_leave_the_store(channels, job, monkeypatch, request):
    monkeypatch.setattr(process_channel, "_KEPT", 2)
    first, second, _ = channels
    for number in range(5):
        first.send(str(number))
        second.send(str(number))
    assert len(texts(first, 5)) == 5
    wait_until(lambda: len(job.store.notes) == 2)
    name = f"geojax/channel/{request.node.name}/0"
    assert sorted(job.store.notes) == [f"{name}/{each}" for each in (4, 5)]


def test_a_forged_text_is_as_none(channels, job, request):
    first, second, _ = channels
    job.store.notes[f"geojax/channel/{request.node.name}/0/1"] = b"forged"
    first.send("real")
    assert texts(second, 1) == [(0, "real")]


def test_a_lost_service_is_an_error_where_texts_are_read(channels, job, monkeypatch):
    _, second, _ = channels

    def fail(key, timeout):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: failed to connect to all addresses")

    monkeypatch.setattr(job.store, "blocking_key_value_get_bytes", fail)
    wait_until(lambda: not second._came.empty())
    with pytest.raises(jax.errors.JaxRuntimeError, match="UNAVAILABLE"):
        next(second.received())


def test_in_a_job_of_one_process_nobody_is_at_the_other_end(job, monkeypatch):
    monkeypatch.setattr(process_channel, "process_index_and_count", lambda: (0, 1))
    channel = ProcessChannel("subject")
    channel.send("nobody reads this")
    assert channel.others == ()
    assert list(channel.received()) == []
    assert not job.store.notes
