"""A followed file hands every line over once, and begins anew when a resume rewrote it."""

import json

import pytest

from geojax.saved_runs.records import json_lines
from geojax.saved_runs.records.json_lines import FollowedLines
from geojax.saved_runs.records.run_files import LocalFiles


class Reader:
    def __init__(self, folder, **options):
        self.path = folder / "metrics.jsonl"
        self.files = LocalFiles(folder)
        self.steps, self.restarts = [], 0
        self.lines = FollowedLines(self.files, "metrics.jsonl", self.add, self.restart, **options)

    def add(self, line):
        self.steps.append(line["step"])

    def restart(self):
        self.steps, self.restarts = [], self.restarts + 1

    def poll(self):
        return self.lines.poll(self.files.marks().get("metrics.jsonl"))


def text_of(steps, **more):
    return "".join(json.dumps({"step": step, **more}) + "\n" for step in steps)


@pytest.fixture
def reader(tmp_path):
    return Reader(tmp_path)


def test_a_line_counts_when_it_is_whole(reader):
    assert not reader.poll()
    reader.path.write_text('{"step": 1}\n{"step": 2}\n{"st')
    assert reader.poll()
    assert reader.steps == [1, 2]
    assert not reader.poll()
    with reader.path.open("a") as file:
        file.write('ep": 3}\n')
    assert reader.poll()
    assert reader.steps == [1, 2, 3]
    assert reader.restarts == 0


def test_a_shorter_file_is_read_anew(reader):
    reader.path.write_text(text_of(range(1, 10)))
    reader.poll()
    reader.path.write_text(text_of(range(1, 6)))
    assert reader.poll()
    assert reader.steps == [1, 2, 3, 4, 5]
    assert reader.restarts == 1


def test_another_file_of_the_same_name_is_read_anew_though_it_is_longer(reader):
    reader.path.write_text(text_of(range(1, 6), time=1))
    reader.poll()
    other = reader.path.with_suffix(".partial")
    other.write_text(text_of(range(1, 4), time=1) + text_of(range(4, 9), time=2))
    other.replace(reader.path)
    reader.poll()
    assert reader.steps == [1, 2, 3, 4, 5, 6, 7, 8]
    assert reader.restarts == 1


def test_a_file_that_is_gone_begins_anew(reader):
    reader.path.write_text(text_of([1]))
    reader.poll()
    reader.path.unlink()
    assert reader.poll()
    assert reader.steps == []
    reader.path.write_text(text_of([1, 2]))
    reader.poll()
    assert reader.steps == [1, 2]


def test_lines_that_are_no_objects_are_counted(reader):
    reader.path.write_bytes(b'{"step": 1}\n\xff\xfe\n[1]\n' + b"[" * 100_000 + b'\n\n{"step": 2}\n')
    reader.poll()
    assert reader.steps == [1, 2]
    assert reader.lines.unreadable == 3


def test_a_line_without_an_end_takes_no_memory(reader, monkeypatch):
    monkeypatch.setattr(json_lines, "_PIECE", 1000)
    monkeypatch.setattr(json_lines, "_LONGEST_LINE", 5000)
    reader.path.write_bytes(b"x" * 100_000 + b'\n{"step": 1}\n')
    reader.poll()
    assert reader.steps == [1]


def test_of_a_large_file_samples_the_end_and_rare_lines_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_SAMPLES", 10)
    monkeypatch.setattr(json_lines, "_SAMPLE", 200)
    monkeypatch.setattr(json_lines, "_TAIL", 2000)
    reader = Reader(tmp_path, whole_bytes=4000, rare=b'"rare"')
    content = text_of(range(1, 5001)).splitlines(keepends=True)
    content[2345] = '{"step": 2346, "rare": 1}\n'
    reader.path.write_text("".join(content))
    reader.poll()
    assert len(reader.steps) < 400
    assert reader.steps[0] == 1
    assert reader.steps[-100:] == list(range(4901, 5001))
    assert 2346 in reader.steps
    with reader.path.open("a") as file:
        file.write(text_of([5001]))
    reader.poll()
    assert reader.steps[-2:] == [5000, 5001]
    assert reader.restarts == 0
