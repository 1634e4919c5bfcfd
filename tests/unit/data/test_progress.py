"""Lines about long work where stderr is no terminal."""

import re
import time

import pytest

from geojax.data import progress
from geojax.data.progress import work_progress


@pytest.fixture
def at_once(monkeypatch):
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 0.0)
    monkeypatch.setattr(progress, "_SECONDS_BETWEEN_LINES", 0.01)


def test_a_line_says_what_is_under_way(at_once, capsys):
    with work_progress(enabled=True) as work:
        work.begin("reading", total=4000)(1000)
        deadline = time.monotonic() + 20
        line = re.compile(r"reading: 1 kB of 4 kB, [0-9.]+ k?B/s, \d:\d\d:\d\d left, 0 s\n")
        while not line.search(seen := capsys.readouterr().err):
            assert time.monotonic() < deadline, seen
        work.begin("training the tokenizer")
        while "training the tokenizer, 0 s\n" not in (seen := capsys.readouterr().err):
            assert time.monotonic() < deadline, seen
    capsys.readouterr()
    time.sleep(0.05)
    assert capsys.readouterr().err == "", "no line comes after the end"


def test_what_is_short_or_silent_has_no_line(at_once, capsys, monkeypatch):
    with work_progress(enabled=False) as work:
        work.begin("reading", total=4000)(1000)
        time.sleep(0.05)
    monkeypatch.setattr(progress, "_FIRST_SECONDS", 60.0)
    with work_progress(enabled=True) as work:
        work.begin("reading")
    assert capsys.readouterr().err == ""
