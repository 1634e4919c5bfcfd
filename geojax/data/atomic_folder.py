"""Folders that are written atomically: they are either complete or not there."""

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from geojax.data.storage import partial_path
from geojax.errors import UserError
from geojax.file_lock import FileLock, LockHeldError


@contextlib.contextmanager
def atomic_folder(target: Path, *, wait: bool) -> Iterator[Path | None]:
    """Yield an empty folder that becomes `target` when the block ends without an error.

    One process at a time prepares a target. With `wait` the others wait and then get None, since it
    is done; without, they are refused. Remains of an interrupted preparation are removed.

    Raises:
        UserError: `target` exists (without `wait`), another process is preparing it, or the folder
            cannot be written.
    """
    target = Path(os.path.abspath(target))
    if not target.name:
        refuse_taken(target)
    partial = partial_path(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target.with_name(f".{target.name}.lock"), target, wait=wait):
            if is_taken(target):
                if not wait:
                    refuse_taken(target)
                yield None
                return
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                yield partial
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
            # Readers see all files or none: a rename within a folder is one step.
            partial.rename(target)
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from None


def refuse_taken(target: Path) -> None:
    """Raise a UserError if there is something at `target` other than an empty folder."""
    if is_taken(target):
        raise UserError(f"{target}: exists already; remove it or choose another output")


def is_taken(target: Path) -> bool:
    """Return whether there is something at `target` other than an empty folder."""
    return target.exists() and not (target.is_dir() and not any(target.iterdir()))


@contextlib.contextmanager
def _lock(path: Path, target: Path, *, wait: bool) -> Iterator[None]:
    """Hold the lock file `path`, which is removed afterwards."""
    lock = FileLock(path)
    try:
        lock.take(wait=wait)
    except LockHeldError:
        raise UserError(f"{target}: is being prepared by another process") from None
    try:
        yield
    finally:
        lock.remove()
