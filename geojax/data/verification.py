"""Verification of prepared data when they are first opened, by one process of a site.

Shards are read whole and compared with the manifest: the first `WHOLE_BYTES` of them, and of the
rest one drawn shard a start. What was verified is remembered in a file beside the data, by each
shard's checksum, size and time of change, and is not read again. Headers and token ids of other
shards are checked as training reads them (`geojax.data.storage.TokenStream`).
"""

import contextlib
import hashlib
import json
import os
import random
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from geojax.data.progress import work_progress
from geojax.data.storage import MANIFEST, Prepared, Shard, SplitName, TokenStream
from geojax.errors import UserError
from geojax.json_file import load_json

RECORD = "verified.json"
"""Name of the file beside the data that remembers which shards were verified."""
WHOLE_BYTES = 1 << 30
"""Bytes of shards that are verified at the first start."""

_BLOCK_TOKENS = 1 << 22

_Known = list[str | int]
"""The checksum of a verified shard, the size of its file, and when the file was changed (ns)."""


class _File(NamedTuple):
    """A shard of a prepared folder."""

    prepared: Prepared
    split: SplitName
    number: int
    shard: Shard

    def known(self) -> _Known:
        """Return what is remembered of the shard once it is verified."""
        status = (self.prepared.folder / self.shard.file).stat()
        return [self.shard.sha256, status.st_size, status.st_mtime_ns]


def verify(folders: Sequence[Prepared], *, progress: bool = False) -> None:
    """Verify the shards of prepared folders, but for those that were verified before.

    Args:
        folders: the folders that are about to be read.
        progress: show on stderr how far it is.

    Raises:
        UserError: a shard is not the one that its manifest lists.
    """
    for prepared in folders:
        check_ends(prepared)
    records = {prepared.folder: _read_record(prepared.folder) for prepared in folders}
    files = [file for prepared in folders for file in _files(prepared)]
    unknown = [
        file for file in files if records[file.prepared.folder].get(file.shard.file) != file.known()
    ]
    chosen = _choose(files, unknown)
    with work_progress(enabled=progress) as work:
        advance = work.begin("verifying the data", sum(file.shard.bytes for file in chosen))
        for file in chosen:
            known = file.known()
            _verify(file, advance)
            records[file.prepared.folder][file.shard.file] = known
    for folder in {file.prepared.folder for file in chosen}:
        _write_record(folder, records[folder])


def _files(prepared: Prepared) -> Iterator[_File]:
    for name, split in prepared.manifest.splits.items():
        for number, shard in enumerate(split.shards):
            yield _File(prepared, name, number, shard)


def _choose(files: Sequence[_File], unknown: Sequence[_File]) -> list[_File]:
    """Choose the unknown ones of the first shards, and one drawn from the rest."""
    first, total = set(), 0
    for file in files:
        total += file.shard.bytes
        if total > WHOLE_BYTES:
            break
        first.add((file.prepared.folder, file.shard.file))
    chosen: list[_File] = []
    rest: list[_File] = []
    for file in unknown:
        is_first = (file.prepared.folder, file.shard.file) in first
        (chosen if is_first else rest).append(file)
    return chosen + ([random.choice(rest)] if rest else [])


def _verify(file: _File, advance: Callable[[int], None]) -> None:
    """Read a shard of an opened folder whole, and compare it with its checksum.

    Raises:
        UserError: its tokens are others.
    """
    stream = file.prepared.stream(file.split)
    compare_checksum(stream, file.number, file.shard, file.prepared.folder, advance)


def compare_checksum(
    stream: TokenStream, number: int, shard: Shard, folder: Path, advance: Callable[[int], None]
) -> None:
    """Compare the tokens of `shard`, number `number` of a stream, with its checksum.

    Raises:
        UserError: they are others.
    """
    digest = hashlib.sha256()
    for block in stream.blocks(number, _BLOCK_TOKENS):
        digest.update(block.data)
        advance(block.nbytes)
    if digest.hexdigest() != shard.sha256:
        raise UserError(
            f"{folder / shard.file}: its tokens are not those that {MANIFEST} was made with "
            "(another SHA-256); copy the file again, or prepare the data again"
        )


def check_ends(prepared: Prepared) -> None:
    """Check that each split begins with a document's beginning and ends with an end.

    Raises:
        UserError: it does not.
    """
    if prepared.manifest.marked:  # nothing stands around a conversation
        return
    words = prepared.tokenizer
    for name in prepared.manifest.splits:
        stream = prepared.stream(name)
        if not len(stream):
            continue
        (first,), (last,) = stream.read(0, 1), stream.read(len(stream) - 1, len(stream))
        if first != words.bos_id or (words.eos_id != words.bos_id and last != words.eos_id):
            raise UserError(
                f"{prepared.folder}: {name} begins with token {first} and ends with token {last}, "
                f"where a document begins with {words.bos_id} ('{words.beginning}') and ends with "
                f"{words.eos_id} ('{words.end}'). Prepare the data again"
            )


def _read_record(folder: Path) -> dict[str, _Known]:
    """Read what was verified; a record that is missing or damaged holds nothing."""
    try:
        shards = load_json(folder / RECORD).get("shards")
    except UserError:
        return {}
    return shards if isinstance(shards, dict) else {}


def _write_record(folder: Path, shards: dict[str, _Known]) -> None:
    """Write what was verified, atomically; a folder that cannot be written goes without."""
    partial = folder / f".{RECORD}.{secrets.token_hex(8)}"
    with contextlib.suppress(OSError):
        try:
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
            with open(os.open(partial, flags, 0o644), "w", encoding="utf-8") as file:
                file.write(json.dumps({"shards": shards}, indent=1) + "\n")
            partial.rename(folder / RECORD)
        except OSError:
            partial.unlink(missing_ok=True)
