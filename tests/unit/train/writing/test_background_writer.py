"""A writer that never holds up the thread that hands it something."""

import threading

from support.processes import PATIENCE_SECONDS, wait_until

from geojax.train.writing.background_writer import BackgroundWriter


def full_disk():
    raise OSError(28, "No space left on device")


def test_writes_are_made_in_order_before_it_is_left():
    written, lines = [], []
    with BackgroundWriter("run", lines.append) as writer:
        for number in range(50):
            writer.put("numbers", lambda number=number: written.append(number))
    assert written == list(range(50))
    assert lines == []


def test_a_full_disk_is_one_warning_and_a_count_at_the_end():
    written, lines = [], []
    with BackgroundWriter("run", lines.append) as writer:
        for _ in range(20):
            writer.put("metrics.jsonl", full_disk)
        writer.put("tensorboard", full_disk)
        writer.put("tensorboard", lambda: written.append(1))
    assert written == [1]
    first, last = lines
    assert first == (
        "warning: run: No space left on device; writes lost so far: 1 of metrics.jsonl; training "
        "goes on"
    )
    assert last == "warning: run: writes lost so far: 20 of metrics.jsonl, 1 of tensorboard"


def test_warnings_have_a_pause_between_them():
    lines = []
    with BackgroundWriter("run", lines.append, warning_seconds=0) as writer:
        for _ in range(3):
            writer.put("metrics.jsonl", full_disk)
    assert len(lines) == 3


def test_a_file_system_that_does_not_answer_holds_nobody_up(monkeypatch):
    monkeypatch.setattr("geojax.train.writing.background_writer._MOST_WAITING", 5)
    answer, lines = threading.Event(), []
    times = {"warning_seconds": 0, "closing_seconds": 0.05}
    with BackgroundWriter("run", lines.append, **times) as writer:
        writer.put("metrics.jsonl", lambda: answer.wait(PATIENCE_SECONDS))
        wait_until(lambda: writer._running is not None)
        for _ in range(9):
            writer.put("metrics.jsonl", lambda: None)
        assert writer.lost == 4
    assert any("metrics.jsonl has not been written for" in line for line in lines)
    assert "run: does not answer; 5 writes wait, and the run ends without them" in lines[-1]
    answer.set()


def test_a_picture_that_cannot_be_drawn_is_counted():
    lines = []
    with BackgroundWriter("run", lines.append) as writer:
        writer.put("loss.png", lambda: 1 / 0)
    assert lines[0].startswith("warning: run: division by zero; writes lost so far: 1 of loss.png")
