"""The folders that sites write into: made, locked, and seen by all processes of their site."""

import uuid
from collections.abc import Sequence
from pathlib import Path

import jax

from geojax.checkpoint.agreement import first_text
from geojax.checkpoint.lock import FolderLock
from geojax.checkpoint.site_group import SiteGroup
from geojax.errors import UserError


def open_site_folders(checkpoints: Path, groups: Sequence[SiteGroup]) -> list[FolderLock]:
    """Make and lock each site's folder, and check that its processes share it.

    Otherwise Orbax would wait for the others' files until it times out, or write only some.

    Args:
        checkpoints: folder of the run's checkpoints.
        groups: sites of the run.

    Returns:
        The locks that this process holds.

    Raises:
        UserError: a folder cannot be made or is in use, or a process does not see what the first
            process of its site writes.
    """
    locks = []
    problem, token = None, first_text(uuid.uuid4().hex)
    cause: OSError | None = None
    for group in groups:
        folder = group.folder(checkpoints)
        if group.is_primary_here:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                if group.name:
                    lock = FolderLock(folder / "lock")
                    lock.take()
                    locks.append(lock)
                if len(group.processes) > 1:
                    (folder / f".shared-{token}").touch()
            except UserError as error:
                problem = str(error)
            except OSError as error:
                cause = error
                problem = f"{folder}: cannot hold checkpoints ({error.strerror})"
    if problem := first_text(problem):
        raise UserError(problem) from cause
    for group in groups:
        folder = group.folder(checkpoints)
        marker = folder / f".shared-{token}"
        if group.is_here and len(group.processes) > 1 and not marker.exists():
            whose = f"of site {group.name}" if group.name else "of the run"
            problem = (
                f"{folder}: process {jax.process_index()} does not see what process "
                f"{group.primary} writes there; the processes {whose} need a file system that "
                "they share"
            )
    problem = first_text(problem)
    for group in groups:
        if group.is_primary_here and len(group.processes) > 1:
            (group.folder(checkpoints) / f".shared-{token}").unlink()
    if problem:
        raise UserError(problem)
    return locks
