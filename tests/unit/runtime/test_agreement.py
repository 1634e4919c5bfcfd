"""All processes of a job find out something together, by what one or each of them says."""

import json

import pytest

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.runtime import agreement


@pytest.fixture
def processes(job, monkeypatch):
    """The processes of a job of three, one after the other."""
    monkeypatch.setattr(agreement, "barrier", lambda name, timeout_seconds: None)
    monkeypatch.setattr(agreement, "process_index_and_count", lambda: (job.own, job.count))

    def processes():
        for process in job.processes(3):
            agreement._calls.clear()
            yield process

    return processes


def test_all_get_what_the_first_has_found_out(processes):
    asked = []

    def ask():
        asked.append(1)
        return "found"

    assert [agreement.told_by_first("name", ask, 1.0) for _ in processes()] == ["found"] * 3
    assert asked == [1], "the first alone asks"


@pytest.mark.parametrize("kind", [UserError, RunError])
def test_all_raise_the_error_of_the_first(kind, processes):
    def ask():
        raise kind("it is so")

    for _ in processes():
        with pytest.raises(kind, match=r"^it is so$"):
            agreement.told_by_first("name", ask, 1.0)


def test_a_first_process_that_says_nothing_is_named(processes):
    for process in processes():
        if process > 0:
            with pytest.raises(MissingProcessesError, match="name: process 0 does not say"):
                agreement.told_by_first("name", str, 0.01)


def test_the_first_alone_gets_the_values_of_all(processes):
    for process in processes():
        agreement.publish(f"agreement/name/1/{process}", json.dumps(process))
    assert [agreement.values_at_first("name", str(process), 1.0) for process in processes()] == [
        *(["0", "1", "2"], [], [])
    ]


def test_a_job_of_one_process_asks_itself():
    assert agreement.told_by_first("name", lambda: "own", 1.0) == "own"
    assert agreement.values_at_first("name", "own", 1.0) == ["own"]
