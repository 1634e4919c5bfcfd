"""Only a run's files are read, in its directory and in those of its sites."""

import os

import pytest

from geojax.errors import UserError
from geojax.saved_runs.records import run_files
from geojax.saved_runs.records.run_files import LocalFiles, earlier_config_number, is_of_run


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.12.yaml", "west/goodput-now.json"])
def test_files_of_a_run(name):
    assert is_of_run(name)


@pytest.mark.parametrize(
    "name",
    [
        *("checkpoints/metrics.jsonl", "a/b/metrics.jsonl", "../metrics.jsonl", "/metrics.jsonl"),
        *("a b/config.yaml", "config.x.yaml", "3/config.yaml", "-x/config.yaml", "lock"),
    ],
)
def test_other_files(name):
    assert not is_of_run(name)


def test_marks_change_with_the_files(tmp_path):
    files = LocalFiles(tmp_path / "run")
    assert files.marks() == {}
    folder = tmp_path / "run"
    (folder / "west").mkdir(parents=True)
    (folder / "west" / "metrics.jsonl").write_text("{}\n")
    (folder / "checkpoints").mkdir()
    (folder / "checkpoints" / "config.yaml").touch()
    (folder / "config.yaml").symlink_to("nowhere")
    os.mkfifo(folder / "events.jsonl")
    marks = files.marks()
    assert list(marks) == ["west/metrics.jsonl"]
    assert marks["west/metrics.jsonl"].size == 3
    assert files.read("west/metrics.jsonl", 1, 100) == b"}\n"
    assert files.read("config.yaml", 0, 100) == b""


@pytest.mark.parametrize("piece", [3, 4, 7, 100])
def test_lines_that_hold_a_text(tmp_path, monkeypatch, piece):
    monkeypatch.setattr(run_files, "_PIECE", piece)
    (tmp_path / "metrics.jsonl").write_bytes(b"a 1\nb 2\na 3\na 4")
    files = LocalFiles(tmp_path)
    assert files.lines_with("metrics.jsonl", b"a", 2) == b"a 1\na 3"
    assert files.lines_with("metrics.jsonl", b"a", 1) == b"a 3"
    assert files.lines_with("goodput.jsonl", b"a", 1) == b""


def test_a_folder_that_cannot_be_read(tmp_path):
    name = "x" * 300
    with pytest.raises(UserError, match="cannot be read"):
        LocalFiles(tmp_path / name).marks()


def test_numbers_of_earlier_configs():
    assert [earlier_config_number(name) for name in ("config.3.yaml", "config.yaml")] == [3, None]
