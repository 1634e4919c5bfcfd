"""Files of another host are read by the programs of any Linux, through a shell that ssh starts."""

import os

import pytest

from geojax.errors import RunError, UserError
from geojax.saved_runs.records.remote_files import RemoteFiles
from geojax.saved_runs.records.run_files import LocalFiles
from geojax.saved_runs.records.run_record import LIVE, RunRecord

NAME = "a run's $(touch hacked) `touch hacked`; touch hacked"


@pytest.fixture
def ssh(tmp_path):
    """A command that takes a host and a command as ssh does, and runs the command here."""
    script = tmp_path / "ssh"
    script.write_text('#!/bin/sh\n[ "$1" = east1 ] || exit 255\nshift\nexec sh -c "$*"\n')
    script.chmod(0o755)
    return (str(script),)


def test_the_same_bytes_as_here(tmp_path, ssh, monkeypatch):
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / NAME
    (folder / "west").mkdir(parents=True)
    (folder / "metrics.jsonl").write_bytes(b'{"step": 1}\n=end=\n\0\xff\n')
    (folder / "west" / "config.yaml").write_text("steps: 3\n")
    (folder / "east 1").mkdir()
    (folder / "east 1" / "config.yaml").touch()
    files, local = RemoteFiles("east1", str(folder), ssh), LocalFiles(folder)
    try:
        marks = files.marks()
        assert {name: mark.size for name, mark in marks.items()} == {
            name: mark.size for name, mark in local.marks().items()
        }
        for name in marks:
            for offset, length in ((0, 1000), (2, 5), (100, 10)):
                assert files.read(name, offset, length) == local.read(name, offset, length)
        assert files.lines_with("metrics.jsonl", b'"step', 5) == b'{"step": 1}\n'
        assert files.read("events.jsonl", 0, 10) == b""
    finally:
        files.close()
    assert not (tmp_path / "hacked").exists()


def test_a_directory_that_comes_later_and_a_relative_path(tmp_path, ssh, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = RunRecord(RemoteFiles("east1", "later", ssh), LIVE)
    assert not record.poll()
    assert not record.is_there
    (tmp_path / "later").mkdir()
    (tmp_path / "later" / "metrics.jsonl").write_text('{"step": 4, "loss": 1.5}\n')
    assert record.poll()
    assert record.main.latest.step == 4


def test_the_home_folder(tmp_path, ssh, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "my run").mkdir()
    (tmp_path / "my run" / "config.yaml").touch()
    files = RemoteFiles("east1", "~/my run", ssh)
    assert list(files.marks()) == ["config.yaml"]
    files.close()


def test_a_connection_that_ends(ssh):
    files = RemoteFiles("west1", "run", ssh)
    with pytest.raises(RunError, match="west1: ssh ended with exit code 255"):
        files.marks()


def test_no_ssh(tmp_path):
    with pytest.raises(UserError, match="ssh cannot be run"):
        RemoteFiles("east1", "run", (os.fspath(tmp_path / "none"),))
