"""Attempts add up to the whole wall-clock time, with what was lost between them."""

import pytest

from geojax.saved_runs.records.attempt_records import (
    AttemptRecord,
    EventRecord,
    Goodput,
    in_order,
)


def attempt(number, began, ended, **seconds):
    line = {
        "attempt": number,
        "began": began,
        "ended": ended,
        "seconds": seconds,
        "waiting_for": {"west": seconds.get("waiting", 0.0), "<b>": 5.0},
        "outcome": "killed",
    }
    return AttemptRecord.of(line, is_over=True)


def test_goodput_accounts_for_the_whole_time():
    attempts = (
        attempt(1, 100.0, 200.0, productive=70.0, waiting=20.0),
        attempt(2, 250.0, 300.0, productive=30.0, recomputed=15.0),
    )
    goodput = Goodput.of(attempts)
    assert goodput.total_seconds == 200
    assert goodput.seconds["lost"] == 50
    assert goodput.seconds["unattributed"] == pytest.approx(15)
    assert sum(goodput.seconds.values()) == pytest.approx(goodput.total_seconds)
    assert goodput.productive_share == pytest.approx(0.5)
    assert goodput.waiting_for["west"] == 20
    assert "<b>" not in goodput.waiting_for
    assert Goodput.of(()) is None


def test_the_running_attempt_counts_until_it_is_over():
    over = attempt(1, 100.0, 200.0)
    now = AttemptRecord.of({"attempt": 2, "began": 210.0, "seconds": {"data": 5.0}}, is_over=False)
    assert in_order([over], now) == (over, now)
    assert (now.outcome, now.ended) == (None, 215.0)
    assert in_order([over], attempt(1, 100.0, 150.0)) == (over,)


@pytest.mark.parametrize("line", [{}, {"attempt": "x", "began": 1}, {"attempt": 1, "began": None}])
def test_other_lines_are_no_attempts(line):
    assert AttemptRecord.of(line, is_over=True) is None


def test_events():
    event = EventRecord.of({"time": 1.0, "step": 3, "kind": "save", "text": "x" * 9000})
    assert (event.step, event.kind, len(event.text)) == (3, "save", 500)
    assert EventRecord.of({"kind": 5}) is None
    assert EventRecord.of({"kind": "save", "step": 10**40}).step is None
