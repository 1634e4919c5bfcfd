"""Files that hold whole records after any failed write."""

import os

import pytest

from geojax.train.writing.appended_file import AppendedFile


@pytest.fixture
def disk(monkeypatch):
    """A disk with room for some more bytes, which writes as much of a record as fits."""
    room, write = {"bytes": 10**6}, os.write

    def limited(descriptor, content):
        if not room["bytes"]:
            raise OSError(28, "No space left on device")
        written = write(descriptor, content[: room["bytes"]])
        room["bytes"] -= written
        return written

    monkeypatch.setattr(os, "write", limited)
    return room


def test_a_record_is_written_whole_or_not_at_all(tmp_path, disk):
    file = AppendedFile(tmp_path / "lines", head=b"head\n")
    file.append(b"one\n")
    disk["bytes"] = 3
    for _ in range(2):
        with pytest.raises(OSError, match="No space left"):
            file.append(b"two two\n")
        assert file.path.read_bytes() == b"head\none\n"
    disk["bytes"] = 10**6
    file.append(b"three\n")
    file.close()
    assert file.path.read_bytes() == b"head\none\nthree\n"


def test_half_a_record_that_could_not_be_cut_off_is_cut_off_later(tmp_path, disk, monkeypatch):
    file = AppendedFile(tmp_path / "lines")
    file.append(b"one\n")
    disk["bytes"] = 2
    with monkeypatch.context() as away:
        away.setattr(os, "ftruncate", lambda descriptor, size: os.close(-1))
        with pytest.raises(OSError, match="No space left"):
            file.append(b"two\n")
    assert file.path.read_bytes() == b"one\ntw"
    disk["bytes"] = 10**6
    file.append(b"three\n")
    assert file.path.read_bytes() == b"one\nthree\n"


def test_a_file_that_was_removed_is_begun_again(tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    file = AppendedFile(folder / "lines", head=b"head\n")
    file.append(b"one\n")
    file.path.unlink()
    file.append(b"two\n")
    assert file.path.read_bytes() == b"head\ntwo\n"
    file.path.unlink()
    folder.rmdir()
    with pytest.raises(FileNotFoundError):
        file.append(b"three\n")
