"""Folders that are written atomically: they are either complete or not there.

Work that takes long may be interrupted at any moment, and goes on from what it left.
"""

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from geojax.data.storage import partial_path
from geojax.errors import UserError, is_disk_full
from geojax.file_lock import FileLock, LockHeldError
from geojax.paths import write_atomically


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
    with _writing(target):
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


@contextlib.contextmanager
def resumable_folders(
    targets: Sequence[Path], identity: str, *, told: Callable[[str], None] = lambda line: None
) -> Iterator[list[Path] | None]:
    """Yield folders that become `targets`, all of them, when the block ends without an error.

    An interruption leaves the folders, and the next call with the same identity yields them again.
    Remains of other work, and those of bad input, are removed.

    Args:
        targets: the folders to make.
        identity: equal for calls that write the same bytes.
        told: takes a line about remains.

    Yields:
        The folders to write; None: an interrupted call had written all of them.

    Raises:
        UserError: a target exists, another process is preparing it, or a folder cannot be written.
    """
    targets = [Path(os.path.abspath(target)) for target in targets]
    partials = [partial_path(target) for target in targets]
    with contextlib.ExitStack() as stack, _writing(targets[0].parent):
        for target in targets:
            target.parent.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_lock(target.with_name(f".{target.name}.lock"), target, wait=False))
        begun = [target for target in targets if _identity_of(target) == identity]
        taken = [target for target in targets if is_taken(target)]
        if taken and not begun:
            refuse_taken(taken[0])
        if not taken:
            for target, partial in zip(targets, partials, strict=True):
                if target in begun:
                    told(f"{target}: goes on where it was interrupted")
                    continue
                if partial.exists():
                    told(f"{partial}: remains of another preparation are removed")
                shutil.rmtree(partial, ignore_errors=True)
                partial.mkdir()
                write_atomically(_identity_file(target), identity)
            try:
                yield partials
            except UserError as error:
                if not is_disk_full(error):
                    for target, partial in zip(targets, partials, strict=True):
                        shutil.rmtree(partial, ignore_errors=True)
                        _identity_file(target).unlink(missing_ok=True)
                raise
        # From the first rename on, what is left of an interrupted call is to rename the others.
        for partial, target in zip(partials, targets, strict=True):
            if partial.exists():
                partial.rename(target)
        for target in targets:
            _identity_file(target).unlink(missing_ok=True)
        if taken:
            yield None


def _identity_file(target: Path) -> Path:
    """Return the path of the file that says which work an unfinished folder is of."""
    return target.with_name(f".{target.name}.preparation")


def _identity_of(target: Path) -> str | None:
    try:
        return _identity_file(target).read_text(encoding="utf-8")
    except OSError:
        return None


def refuse_taken(target: Path) -> None:
    """Raise a UserError if there is something at `target` other than an empty folder."""
    if is_taken(target):
        raise UserError(f"{target}: exists already; remove it or choose another output")


def is_taken(target: Path) -> bool:
    """Return whether there is something at `target` other than an empty folder."""
    return target.exists() and not (target.is_dir() and not any(target.iterdir()))


@contextlib.contextmanager
def _writing(target: Path) -> Iterator[None]:
    """Name the folder that cannot be written.

    Raises:
        UserError: it cannot be.
    """
    try:
        yield
    except OSError as error:
        raise UserError(f"{target}: cannot be written ({error.strerror or error})") from error


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
