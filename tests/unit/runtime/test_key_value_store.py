"""Notes in a store that anybody may write into."""

import pytest

from geojax.runtime.key_value_store import (
    await_published,
    publish,
    publish_first,
    published,
    read,
    sign_with,
)

FORGED = [b"", b"x", b"[" * 200_000, b"0" * 32 + b"[7]", b"\xff\xfe" * 40, b"\x00" * 64]


def test_a_note_is_read_as_it_was_published(job):
    for value in ("", "42 é", "a\0b\n" * 1000):
        publish("folder/1", value)
        assert read("folder/1") == value
        assert await_published("folder/1", 1.0) == value
        assert published("folder") == {"1": value}
    assert read("folder/2") is None
    assert await_published("folder/2", 0.1) is None


@pytest.mark.parametrize("note", FORGED, ids=range(len(FORGED)))
def test_a_forged_note_is_as_none(job, note):
    publish("folder/1", "real")
    job.store.notes["geojax/folder/2"] = job.store.notes["geojax/alone"] = note
    assert published("folder") == {"1": "real"}
    assert read("alone") is None
    assert await_published("alone", 0.1) is None


def test_a_note_that_is_copied_changed_or_of_another_job_is_as_none(job):
    publish("folder/1", "real")
    note = job.store.notes["geojax/folder/1"]
    job.store.notes |= {"geojax/folder/2": note, "geojax/folder/3": note[:-1] + b"L"}
    assert published("folder") == {"1": "real"}
    sign_with(b"the key of another job")
    assert read("folder/1") is None


def test_the_first_note_stays_unless_it_is_forged(job):
    publish_first("cause", "the first")
    publish_first("cause", "the second")
    assert read("cause") == "the first"
    job.store.notes["geojax/cause"] = b"forged"
    publish_first("cause", "the third")
    assert read("cause") == "the third"
