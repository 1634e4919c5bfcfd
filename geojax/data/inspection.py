"""Inspection of prepared folders for a person: all damage at once, with nothing remembered."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from geojax.data.progress import work_progress
from geojax.data.storage import (
    Manifest,
    Prepared,
    Shard,
    Split,
    StoredShard,
    open_stream,
    read_manifest,
)
from geojax.data.verification import compare_checksum
from geojax.errors import UserError


class Inspection(NamedTuple):
    """The result of a check of prepared folders."""

    shards: int
    """Number of the shards that the manifests list."""
    bytes: int
    """Size of these shards."""
    problems: tuple[str, ...]
    """A line for each shard, manifest or tokenizer that is damaged."""


def inspect_folders(folders: Sequence[Path], *, whole: bool, progress: bool = False) -> Inspection:
    """Check all shards of prepared folders, and collect the problems; nothing is remembered.

    Args:
        folders: the folders.
        whole: read all tokens and compare checksums and tokenizers too; else only sizes and
            headers are checked.
        progress: show on stderr how far it is.
    """
    problems: list[str] = []
    listed: list[tuple[Path, Manifest, Shard]] = []
    for folder in dict.fromkeys(folders):
        with _collected(problems):
            manifest = read_manifest(folder)
            splits = manifest.splits.values()
            listed += [(folder, manifest, shard) for split in splits for shard in split.shards]
    total = sum(shard.bytes for _, _, shard in listed)
    with work_progress(enabled=progress and whole) as work:
        advance = work.begin("verifying the data", total)
        for folder, manifest, shard in listed:
            with _collected(problems):
                stream = open_stream(folder, manifest, Split(documents=0, shards=(shard,)))
                if whole:
                    blocks = functools.partial(stream.blocks, 0)
                    compare_checksum(StoredShard(folder / shard.file, shard, blocks), advance)
                else:
                    next(stream.blocks(0, 1))
    for folder in {folder: None for folder, _, _ in listed} if whole else ():
        with _collected(problems):
            Prepared(folder).check_ends()
    return Inspection(len(listed), total, tuple(dict.fromkeys(problems)))


@contextlib.contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    """Add the problem that the block raises as a UserError to `problems`."""
    try:
        yield
    except UserError as error:
        problems.append(str(error))
