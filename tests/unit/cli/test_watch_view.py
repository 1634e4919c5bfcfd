"""The view of a run fits the terminal, shows all that is known, and obeys nothing that it reads."""

import json

import pytest
from rich.console import Console
from support.synthetic_runs import BEGAN, write_run

from geojax.cli.watch_view import Size, run_view, step_line
from geojax.saved_runs.records.run_files import LocalFiles
from geojax.saved_runs.records.run_record import LIVE, RunRecord
from geojax.saved_runs.records.step_record import StepRecord

HOSTILE = "\x1b]0;owned\x07\x9b2J[red]x[/red]\u202e\n"


def shown(folder, width=80, height=None, is_unicode=True, now=None):
    record = RunRecord(LocalFiles(folder), LIVE)
    record.poll()
    console = Console(width=width, color_system=None, markup=False, highlight=False, record=True)
    view = run_view(record, str(folder.name), Size(width, height), is_unicode=is_unicode, now=now)
    with console.capture() as capture:
        console.print(view)
    return capture.get()


@pytest.fixture(scope="module")
def islands(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("views") / "islands", steps=1100)


@pytest.mark.parametrize("width", [60, 80, 160])
@pytest.mark.parametrize("height", [None, 50])
def test_all_sections_fit(islands, width, height):
    text = shown(islands, width, height, now=BEGAN + 9500)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    assert height is None or len(lines) <= height
    for word in (
        *("step 1,100 of 2,000", "55.0%", "left", "MFU", "books", "code", "|g|"),
        *("device", "data", "saves", "step 1,080", "productive", "lost"),
        *("west", "85.4 ms", "as of", "process 3", "late", "replan"),
    ):
        assert word in text, word


def test_ascii(islands):
    assert shown(islands, is_unicode=False, now=BEGAN + 9500).replace("…", "").isascii()


def test_a_silent_run(islands):
    assert "no step since" in shown(islands, now=BEGAN + 1e6)
    assert "done" in shown(write_run(islands.parent / "done"))


def test_an_older_run_has_what_it_knows(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "loss": 2.5, "seconds": 0.5}\n')
    text = shown(tmp_path)
    assert "loss 2.5000" in text
    assert "500 ms" in text
    assert "goodput" not in text


def test_planned_waits_are_marked(tmp_path):
    line = {"step": 1, "loss": 2.5, "link/west/planned_wait_seconds": 0.25}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    assert "250 ms planned" in shown(tmp_path)


def test_a_busy_link_is_held_against_the_topology(tmp_path):
    lines = [
        {"step": 1, "loss": 2.5, "link/west/wait_seconds": 0.25},
        {
            "step": 1,
            "link/west/bytes_per_second": 9e7,
            "link/west/topology_bytes_per_second": 1.2e8,
        },
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert "75% of 960 Mbit/s" in shown(tmp_path)


def test_nothing_from_a_run_reaches_the_terminal_as_a_command(tmp_path):
    line = {"step": 1, "loss": 1e99, "seconds": 1e99, f"validation/{HOSTILE}": 2.0, "mfu": -1e99}
    line |= {f"link/{HOSTILE}/wait_seconds": 1, f"link/w/wait_seconds_{HOSTILE}": 1}
    line |= {"link/w/wait_seconds": 1e99, "tokens_per_second": 1e99, "slowest/process": 1e99}
    line |= {"slowest/seconds": 1}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(line) + "\n")
    config = {
        "steps": 10,
        "precision": HOSTILE,
        "mesh": {HOSTILE: HOSTILE},
        "model": {"module": HOSTILE},
    }
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    events = [{"kind": HOSTILE, "text": HOSTILE, "time": -1e99, "step": 1}]
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(each) + "\n" for each in events))
    goodput = {"attempt": 1, "began": -1e99, "ended": 1e99, "outcome": HOSTILE}
    (tmp_path / "goodput.jsonl").write_text(json.dumps(goodput) + "\n")
    for width in (80, 160):
        text = shown(tmp_path, width, 40)
        assert all(each == "\n" or each.isprintable() for each in text)
        assert max(map(len, text.splitlines())) <= width
    assert step_line(StepRecord.of(line), 10).isprintable()


def test_a_line_for_each_step():
    record = StepRecord.of({"step": 3, "loss": 2.0, "seconds": 1.5, "link/west/wait_seconds": 0.5})
    assert step_line(record, 10) == "step 3/10  loss 2.0000  1.5 s a step  waits 500 ms for west"
    record = StepRecord.of({"step": 3, "validation/books": 2.0})
    assert step_line(record, None) == "step 3  validation books 2.0000"
