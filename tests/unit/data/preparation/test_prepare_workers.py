"""Worker processes write the folders that one process writes, and name the same mistakes."""

import gzip
import json

import pytest

from geojax.data import PrepareSettings, prepare
from geojax.data.files import json_lines
from geojax.data.files.json_lines import JsonLines, line_spans
from geojax.data.preparation import workers
from geojax.errors import UserError


@pytest.fixture
def texts(tmp_path):
    """Files of several kinds, of which one is longer than a part."""
    folder = tmp_path / "texts"
    folder.mkdir()
    lines = [json.dumps({"text": f"ärger {number} " * (number % 7 + 1)}) for number in range(400)]
    (folder / "a.jsonl").write_text("\n\n".join(lines))
    (folder / "b.jsonl.gz").write_bytes(gzip.compress("\r\n".join(lines[:50]).encode()))
    (folder / "c.txt").write_text("one document\n" * 200)
    (folder / "d.jsonl").write_text('{"text": "held out"}\n')
    return folder


def prepared(texts, name, count):
    source = {
        "name": name,
        "files": [str(texts / file) for file in ("a.jsonl", "b.jsonl.gz", "c.txt")],
        "validation_files": [str(texts / "d.jsonl")],
    }
    output = texts.parent / str(count)
    settings = {"output": output, "sources": [source], "vocab_size": 300, "workers": count}
    return prepare(PrepareSettings.model_validate(settings))[0]


def test_any_number_writes_the_same_bytes(texts, monkeypatch):
    monkeypatch.setattr(workers, "PART_BYTES", 2000)
    one, two = (prepared(texts, "corpus", count) for count in (1, 2))
    assert one.manifest.splits["train"].documents == 451
    files = [
        {path.name: path.read_bytes() for path in each.folder.iterdir()} for each in (one, two)
    ]
    assert files[0] == files[1]


def test_a_mistake_is_named_by_its_line_in_the_file(texts, monkeypatch, capsys):
    monkeypatch.setattr(workers, "PART_BYTES", 2000)
    with (texts / "a.jsonl").open("a") as file:
        file.write("\nno JSON\n[]")
    messages = []
    for count in (1, 2):
        with pytest.raises(UserError) as error:
            prepared(texts, "corpus", count)
        messages.append(str(error.value))
    assert messages[0] == messages[1]
    assert "a.jsonl:800: not valid JSON" in messages[0]
    assert not any((texts.parent / str(count) / "corpus").exists() for count in (1, 2))


@pytest.mark.parametrize("size", [1, 17, 10**6])
def test_spans_have_whole_lines_and_all_of_them(tmp_path, size):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"n": {number}}}\r\n\n' for number in range(30)) + '{"n": 30}')
    spans = list(line_spans(path, size))
    assert len(spans) == {1: 61, 17: 16, 10**6: 1}[size]
    found = [record for span in spans for record in JsonLines().records(path, (), span)]
    assert [record.values["n"] for record in found] == list(range(31))
    assert [str(record.place) for record in found] == [f"{path}:{2 * n + 1}" for n in range(31)]


def test_a_file_without_lines_is_one_span(tmp_path, monkeypatch):
    monkeypatch.setattr(json_lines, "_LONGEST_LINE_BYTES", 8)
    (tmp_path / "a").write_text("x" * 100)
    assert list(line_spans(tmp_path / "a", 10)) == [(0, 100)]
    (tmp_path / "empty").touch()
    assert list(line_spans(tmp_path / "empty", 10)) == []


def test_there_is_a_worker_for_each_part_and_core(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(8))
    sizes = [0, workers.PART_BYTES, 3 * workers.PART_BYTES, 10**12]
    assert [workers.worker_count(None, size) for size in sizes] == [1, 1, 3, 8]
    assert workers.worker_count(5, 0) == 5
