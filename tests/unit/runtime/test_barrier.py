"""The barrier's report; the barrier itself needs processes (tests/integration)."""

import itertools

import pytest

from geojax.errors import MissingProcessesError
from geojax.runtime import barrier
from geojax.runtime.key_value_store import publish

PROCESSES = 3072
names = map("barrier {}".format, itertools.count())


def meet(name):
    with pytest.raises(MissingProcessesError) as error:
        barrier(name, 1.0)
    return error.value


def test_the_missing_are_named_with_one_read_by_each_but_the_first(job, monkeypatch):
    name, late = next(names), {5, 17}
    for process in job.processes(PROCESSES):
        if process not in late:
            publish(f"arrived/{name}/1/{process}", "")
    job.store.entries_read = 0
    for process in job.processes(PROCESSES):
        if process not in late:
            error = meet_first_time(monkeypatch, name)
            assert error.missing == (5, 17)
            assert f"'{name}': process 5 and process 17 did not come" in str(error)
    assert job.store.calls["folder"] == 1
    assert job.store.entries_read == (PROCESSES - 2) + (PROCESSES - 3)


def meet_first_time(monkeypatch, name):
    """Every simulated process counts its own calls."""
    barrier.__globals__["_calls"].clear()
    return meet(name)


def test_where_process_0_says_nothing_it_is_missing_itself(job):
    job.own, job.count = 3, 4
    assert meet(next(names)).missing == (0,)


def test_who_arrived_is_not_believed_of_strangers(job):
    name = next(names)
    job.store.notes[f"geojax/arrived/{name}/1/1"] = b"forged"
    job.own, job.count = 0, 2
    assert meet(name).missing == (1,)
