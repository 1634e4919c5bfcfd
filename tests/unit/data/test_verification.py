"""Prepared data are verified once, by what their manifest says, and damage is named in a line."""

import json

import numpy as np
import pytest

from geojax.data import Prepared, verification
from geojax.data.verification import RECORD, verify
from geojax.errors import UserError


@pytest.fixture
def read(monkeypatch):
    """The files of the shards that are verified."""
    files = []
    check = verification.compare_checksum
    monkeypatch.setattr(
        verification,
        "compare_checksum",
        lambda file, advance: (files.append(file.shard.file), check(file, advance)),
    )
    return files


def flip(path, byte, bit=1):
    content = bytearray(path.read_bytes())
    content[byte] ^= bit
    path.write_bytes(content)


def test_a_shard_is_verified_once(folder, read):
    verify([Prepared(folder)])
    assert len(read) == 6
    verify([Prepared(folder)])
    assert len(read) == 6
    flip(folder / "train-00003.npy", -2)
    with pytest.raises(UserError, match=r"train-00003.npy: its tokens are not those"):
        verify([Prepared(folder)])
    assert read[6:] == ["train-00003.npy"]


def test_of_many_bytes_a_start_reads_one_more_shard(folder, read, monkeypatch):
    first = Prepared(folder).manifest.splits["train"].shards[:2]
    monkeypatch.setattr(verification, "WHOLE_BYTES", sum(shard.bytes for shard in first))
    for start in range(4):
        verify([Prepared(folder)])
        assert len(read) == 3 + start
    assert len(set(read)) == 6
    verify([Prepared(folder)])
    assert len(read) == 6


@pytest.mark.parametrize("record", ["", "[" * 100_000, '{"shards": 3}', '{"shards": {"a": 1}}'])
def test_a_damaged_record_remembers_nothing(folder, read, record):
    (folder / RECORD).write_text(record)
    verify([Prepared(folder)])
    assert len(read) == 6
    assert len(json.loads((folder / RECORD).read_text())["shards"]) >= 6


def test_a_folder_that_cannot_be_written_is_verified_each_time(folder, read, monkeypatch):
    def refuse(*arguments, **options):
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(verification.os, "open", refuse)
    verify([Prepared(folder)])
    verify([Prepared(folder)])
    assert len(read) == 12
    assert not (folder / RECORD).exists()


def edited(folder, change):
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest)
    (folder / "manifest.json").write_text(json.dumps(manifest))


def same_shard_twice(manifest):
    shards = manifest["splits"]["train"]["shards"]
    shards[1] = shards[0]


def swapped(manifest):
    entry = manifest["tokenizer"]
    entry["beginning"], entry["end"] = entry["end"], entry["beginning"]


def other_sum(manifest):
    manifest["splits"]["train"]["shards"][1]["sha256"] = "0" * 64


def other_ends(manifest):
    manifest["tokenizer"]["beginning"] = manifest["tokenizer"]["end"] = "a"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (same_shard_twice, "shards.1.file is 'train-00000.npy', which would be 'train-00001.npy'"),
        (swapped, r"a document would begin with '<\|end\|>' .* which are swapped"),
        (other_sum, "train-00001.npy: its tokens are not those that manifest.json was made with"),
        (other_ends, "train begins with token .* where a document begins with"),
        (
            lambda manifest: manifest["tokenizer"].update(vocabulary_size=5),
            r"tokenizer.vocabulary_size is 5, and tokenizer.json has \d+ tokens",
        ),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(folder, change, message):
    edited(folder, change)
    with pytest.raises(UserError, match=message) as error:
        verify([Prepared(folder)])
    assert "\n" not in str(error.value)


def test_any_flipped_bit_of_a_header_is_a_line_or_does_no_harm(folder):
    path = folder / "train-00000.npy"
    content = path.read_bytes()
    expected = np.load(path)
    for byte in range(128):
        flip(path, byte, 1 << byte % 8)
        errors = []
        try:
            found = Prepared(folder).stream("train").read(0, len(expected))
        except UserError as error:
            errors.append(str(error))
            found = expected
        assert (found == expected).all()
        assert all(str(path) in error and "\n" not in error for error in errors)
        path.write_bytes(content)


def test_a_token_beyond_the_vocabulary_is_named_where_it_is_read(folder):
    shard = np.load(folder / "train-00002.npy", mmap_mode="r+")
    shard[7] = 60000
    shard.flush()
    stream = Prepared(folder).stream("train")
    message = r"train-00002.npy: holds token 60,000 at position 7, and the tokenizer has"
    with pytest.raises(UserError, match=message):
        stream.read(0, len(stream))
    with pytest.raises(UserError, match=message):
        verify([Prepared(folder)])
