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
from collections.abc import Callable, Sequence
from pathlib import Path

from geojax.data.progress import work_progress
from geojax.data.storage import MANIFEST, StoredShard
from geojax.data.tokenized_text import TokenizedText
from geojax.errors import UserError
from geojax.json_file import load_json

RECORD = "verified.json"
"""Name of the file beside the data that remembers which shards were verified."""
WHOLE_BYTES = 1 << 30
"""Bytes of shards that are verified at the first start."""

_BLOCK_TOKENS = 1 << 22

_Known = list[str | int]
"""The checksum of a verified shard, the size of its file, and when the file was changed (ns)."""


def verify(texts: Sequence[TokenizedText], *, progress: bool = False) -> None:
    """Verify the shards of texts, but for those that were verified before.

    Args:
        texts: the texts that are about to be read; those without checksums have no shards.
        progress: show on stderr how far it is.

    Raises:
        UserError: a shard is not the one that its manifest lists.
    """
    for text in texts:
        text.check_ends()
    shards = {shard.path: shard for text in texts for shard in text.shards()}
    records = {folder: _read_record(folder) for folder in {path.parent for path in shards}}
    unknown = [
        shard
        for path, shard in shards.items()
        if records[path.parent].get(path.name) != _known(shard)
    ]
    chosen = _choose(list(shards.values()), unknown)
    with work_progress(enabled=progress) as work:
        advance = work.begin("verifying the data", sum(stored.shard.bytes for stored in chosen))
        for stored in chosen:
            known = _known(stored)
            compare_checksum(stored, advance)
            records[stored.path.parent][stored.path.name] = known
    for folder in {stored.path.parent for stored in chosen}:
        _write_record(folder, records[folder])


def _known(stored: StoredShard) -> _Known:
    """Return what is remembered of a shard once it is verified."""
    status = stored.path.stat()
    return [stored.shard.sha256, status.st_size, status.st_mtime_ns]


def _choose(shards: Sequence[StoredShard], unknown: Sequence[StoredShard]) -> list[StoredShard]:
    """Choose the unknown ones of the first shards, and one drawn from the rest."""
    first, total = set(), 0
    for stored in shards:
        total += stored.shard.bytes
        if total > WHOLE_BYTES:
            break
        first.add(stored.path)
    chosen = [stored for stored in unknown if stored.path in first]
    rest = [stored for stored in unknown if stored.path not in first]
    return chosen + ([random.choice(rest)] if rest else [])


def compare_checksum(stored: StoredShard, advance: Callable[[int], None]) -> None:
    """Read a shard whole, and compare its tokens with its checksum.

    Raises:
        UserError: they are others.
    """
    digest = hashlib.sha256()
    for block in stored.blocks(_BLOCK_TOKENS):
        digest.update(block.data)
        advance(block.nbytes)
    if digest.hexdigest() != stored.shard.sha256:
        raise UserError(
            f"{stored.path}: its tokens are not those that {MANIFEST} was made with (another "
            "SHA-256); copy the file again, or prepare the data again"
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
