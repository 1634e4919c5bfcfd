"""The manifest of a checkpoint: its content, and a checksum of each of its files.

Orbax's storage format checks its index but not the numbers, so that a flipped bit in a weight would
be restored unnoticed. `manifest.json` is the last file written into a checkpoint before it is
renamed into place; a checkpoint without one, or one that disagrees with it, is damaged.

Each process checksums the files that it has written, in its background save thread, while they are
still in the page cache. The primary process of the site gathers the checksums and adds its own
files.
"""

import json
import os
import stat
import zlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

NAME = "manifest.json"

# Orbax rewrites its own timestamps after the manifest is written; nothing is restored from them.
_NOT_COVERED = {NAME, "_CHECKPOINT_METADATA", "commit_success.txt"}
_BLOCK_BYTES = 4 * 2**20
_MOST_BYTES = 2**28
_THREADS = 8


class DamagedCheckpoint(Exception):
    """A checkpoint is incomplete or differs from what was written; the message says how."""


def write_part(folder: Path, process: int) -> None:
    """Checksum the files that `process` has written below `folder` and note the result there."""
    own = [path for path in _files(folder) if _top(folder, path) == f"ocdbt.process_{process}"]
    _part(folder, process).write_text(json.dumps(_checksums(folder, own)), encoding="utf-8")


def read_parts(folder: Path, processes: Iterable[int]) -> dict[str, list[Any]]:
    """Read and remove what `write_part` left on each of `processes`; return all checksums.

    Raises:
        FileNotFoundError: a part is missing: that process could not write its arrays.
    """
    covered: dict[str, list[Any]] = {}
    for process in processes:
        part = _part(folder, process)
        try:
            covered.update(json.loads(part.read_text(encoding="utf-8")))
        except FileNotFoundError:
            raise FileNotFoundError(f"process {process} has not written its part") from None
        part.unlink()
    return covered


def write(folder: Path, content: Mapping[str, Any], parts: Mapping[str, list[Any]]) -> None:
    """Write the manifest of the checkpoint in `folder`: `content` and a checksum of every file.

    Args:
        folder: the checkpoint, not yet committed.
        content: JSON: "step", "metadata", "arrays" and more.
        parts: checksums from `read_parts`; the files that it does not cover are read.
    """
    rest = [path for path in _files(folder) if str(path.relative_to(folder)) not in parts]
    covered = {**parts, **_checksums(folder, rest)}
    document = {**content, "files": dict(sorted(covered.items()))}
    document["checksum"] = _checksum_of(document)
    (folder / NAME).write_text(json.dumps(document, indent=1), encoding="utf-8")


def read(folder: Path) -> dict[str, Any]:
    """Read the manifest of the checkpoint in `folder`: "step", "metadata", "arrays" and "files".

    Raises:
        DamagedCheckpoint: it is missing or was changed.
    """
    if (size := _require_file(folder, NAME).st_size) > _MOST_BYTES:
        raise DamagedCheckpoint(f"{NAME} has {size} bytes, more than any manifest")
    try:
        document = json.loads((folder / NAME).read_text(encoding="utf-8"))
    except RecursionError:
        raise DamagedCheckpoint(f"{NAME} has been changed") from None
    except (OSError, ValueError) as error:
        raise DamagedCheckpoint(f"{NAME} cannot be read: {error}") from None
    if not isinstance(document, dict) or document.pop("checksum", None) != _checksum_of(document):
        raise DamagedCheckpoint(f"{NAME} has been changed")
    return document


def verify(
    folder: Path, files: Mapping[str, list[Any]], *, process: int = 0, processes: int = 1
) -> None:
    """Compare the files of the checkpoint in `folder` with the manifest's `files`.

    Every process checks all sizes, which is cheap, and reads its share of the files.

    Raises:
        DamagedCheckpoint: a file is missing, or its size or checksum differs.
    """
    for name, (size, _) in files.items():
        if (found := _require_file(folder, name).st_size) != size:
            raise DamagedCheckpoint(f"{name} has {found} bytes instead of {size}")
    share = sorted(files)[process::processes]
    try:
        checksums = _checksums(folder, [folder / name for name in share])
    except OSError as error:
        raise DamagedCheckpoint(f"a file cannot be read: {error}") from None
    for name in share:
        if checksums[name] != list(files[name]):
            raise DamagedCheckpoint(f"{name} has been changed (its checksum differs)")


def require_readable(folder: Path, files: Iterable[str]) -> None:
    """Check that none of a checkpoint's `files` is a pipe or a device, which is read for ever.

    Raises:
        DamagedCheckpoint: one is.
    """
    for name in files:
        path = folder / name
        if path.exists() and not path.is_file():
            raise DamagedCheckpoint(f"{name} is no regular file")


def _require_file(folder: Path, name: str) -> os.stat_result:
    """Return the status of a checkpoint's file.

    Raises:
        DamagedCheckpoint: it is missing, or something else than a file.
    """
    try:
        status = (folder / name).stat()
    except OSError:
        raise DamagedCheckpoint(f"{name} is missing") from None
    if not stat.S_ISREG(status.st_mode):
        raise DamagedCheckpoint(f"{name} is no regular file")
    return status


def _files(folder: Path) -> list[Path]:
    return sorted(
        path
        for path in folder.rglob("*")
        if path.is_file() and path.relative_to(folder).parts[0] not in _NOT_COVERED
    )


def _part(folder: Path, process: int) -> Path:
    return folder / f"checksums.process_{process}.json"


def _top(folder: Path, path: Path) -> str:
    return path.relative_to(folder).parts[0]


def _checksums(folder: Path, paths: Iterable[Path]) -> dict[str, list[Any]]:
    """Compute [size in bytes, CRC-32 as eight hex digits] of each file, by relative name."""
    paths = list(paths)
    # zlib and file reads release the interpreter lock.
    with ThreadPoolExecutor(_THREADS) as pool:
        results = pool.map(_checksum, paths)
    names = (str(path.relative_to(folder)) for path in paths)
    return dict(zip(names, results, strict=True))


def _checksum(path: Path) -> list[Any]:
    size, checksum = 0, 0
    with path.open("rb") as file:
        while block := file.read(_BLOCK_BYTES):
            size += len(block)
            checksum = zlib.crc32(block, checksum)
    return [size, f"{checksum:08x}"]


def _checksum_of(document: Mapping[str, Any]) -> str:
    return f"{zlib.crc32(json.dumps(document, sort_keys=True).encode()):08x}"
