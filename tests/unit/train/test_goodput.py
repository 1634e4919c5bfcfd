"""The ledger gives each second of a run to one kind of work, over all attempts."""

import json
import subprocess
import sys
import time

import pytest

from geojax.run_paths import GOODPUT, GOODPUT_NOW
from geojax.train.goodput import (
    START,
    GoodputLedger,
    process_began,
    read_attempts,
)
from geojax.train.writing.background_writer import write_at_once


def ledger_of(folder, step=0, began=None):
    began = time.time() if began is None else began
    return GoodputLedger(folder, write_at_once, began=began, step=step)


def test_seconds_add_up_and_steps_done_before_are_recomputed(tmp_path):
    first = ledger_of(tmp_path, began=time.time() - 100)
    first.spend("compiling", 30.0)
    first.spend("waiting", 5.0, START)
    for step in range(1, 5):
        first.step(step, 10.0, data=1.0, waits={"b": 2.0})
    first.end("stopped")
    (attempt,) = read_attempts(tmp_path)
    spent = attempt.seconds
    assert (spent["productive"], spent["data"], spent["waiting"]) == (28.0, 4.0, 13.0)
    assert attempt.waiting_for == {START: 5.0, "b": 8.0}
    assert sum(spent.values()) == pytest.approx(attempt.ended - attempt.began, abs=0.01)
    second = ledger_of(tmp_path, step=2)
    for step in range(3, 6):
        second.step(step, 10.0, data=0.0, waits={})
    second.end("end")
    attempt = read_attempts(tmp_path)[-1]
    assert (attempt.attempt, attempt.first_step, attempt.last_step) == (2, 2, 5)
    assert (attempt.seconds["recomputed"], attempt.seconds["productive"]) == (20.0, 10.0)
    assert not (tmp_path / GOODPUT_NOW).exists()


def test_a_killed_attempt_leaves_its_seconds(tmp_path, monkeypatch):
    monkeypatch.setattr("geojax.train.goodput._WRITE_SECONDS", 0.0)
    killed = ledger_of(tmp_path)
    killed.step(1, 1.0, data=0.0, waits={})
    (running,) = read_attempts(tmp_path)
    assert running.seconds["productive"] == 1.0
    again = ledger_of(tmp_path)
    assert again.attempt == 2
    first, second = read_attempts(tmp_path)
    assert (first.outcome, first.last_step, second.last_step) == ("killed", 1, 0)
    again.step(1, 1.0, data=0.0, waits={})
    assert read_attempts(tmp_path)[-1].seconds["recomputed"] == 1.0


def test_an_attempt_that_ended_and_could_not_remove_its_file_counts_once(tmp_path):
    ledger = ledger_of(tmp_path)
    kept = (tmp_path / GOODPUT_NOW).read_text()
    ledger.end("end")
    (tmp_path / GOODPUT_NOW).write_text(kept)
    assert [attempt.outcome for attempt in read_attempts(tmp_path)] == ["end"]
    assert ledger_of(tmp_path).attempt == 2


@pytest.mark.parametrize("damage", ["{", "[]", '{"attempt": 1}', '{"attempt": "x"}', "\x00"])
def test_what_is_damaged_is_left_out(tmp_path, damage):
    ledger_of(tmp_path).end("end")
    with (tmp_path / GOODPUT).open("a") as file:
        file.write(damage + "\n")
    (tmp_path / GOODPUT_NOW).write_text(damage)
    assert [attempt.attempt for attempt in read_attempts(tmp_path)] == [1]


def test_a_process_knows_when_it_began():
    code = "import time; time.sleep(0.3); from geojax.train.goodput import process_began as p"
    code += "; print(time.time() - p())"
    before = time.time()
    age = float(subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout)
    assert 0.25 <= age <= time.time() - before + 0.1
    assert process_began() < time.time()


def test_a_line_is_short_json(tmp_path):
    ledger = ledger_of(tmp_path)
    ledger.step(1, 1 / 3, data=0.0, waits={})
    ledger.end("failed")
    content = json.loads((tmp_path / GOODPUT).read_text())
    assert content["outcome"] == "failed"
    assert content["seconds"]["productive"] == 0.3333
