"""The folder of a run's checkpoints: list, remove and set aside.

20/                        a committed checkpoint, by the number of its step
east/20/                   the part of it that the site east has saved (see `SiteGroup`)
30.orbax-checkpoint-tmp/   a save that was interrupted (or is going on)
10.deleting/               an old checkpoint that is being deleted
20.damaged/                found damaged at a restore, and set aside when its step came again
20.aside/                  whole, but another site had none of it: set aside likewise
"""

import shutil
from pathlib import Path

INTERRUPTED = ".orbax-checkpoint-tmp"
_DELETING = ".deleting"
_DAMAGED = ".damaged"
_ASIDE = ".aside"


def committed_steps(folder: Path) -> list[int]:
    """List the steps of the committed checkpoints, newest first; some may be damaged."""
    return sorted((int(name) for name in _names(folder) if name.isdecimal()), reverse=True)


def interrupted_steps(folder: Path) -> list[int]:
    """List the steps whose save was interrupted, newest first."""
    steps = (name.removesuffix(INTERRUPTED) for name in _names(folder) if INTERRUPTED in name)
    return sorted((int(step) for step in steps if step.isdecimal()), reverse=True)


def remove(folder: Path, step: int) -> None:
    """Delete the checkpoint of `step`.

    It is renamed first, so that a killed process leaves no half-deleted checkpoint behind.
    """
    _delete(folder / str(step))


def remove_old(folder: Path, keep: int) -> None:
    """Delete all but the newest `keep` committed checkpoints."""
    for step in committed_steps(folder)[keep:]:
        remove(folder, step)


def remove_leftovers(folder: Path) -> None:
    """Delete the remains of interrupted saves and deletions."""
    for name in _names(folder):
        if name.endswith((INTERRUPTED, _DELETING)):
            _delete(folder / name)


def set_aside(folder: Path, step: int, *, damaged: bool) -> Path:
    """Rename the checkpoint of `step`, damaged or not, so that the step can be saved again."""
    suffix = _DAMAGED if damaged else _ASIDE
    number, target = 1, folder / f"{step}{suffix}"
    while target.exists():
        number += 1
        target = folder / f"{step}{suffix}-{number}"
    return (folder / str(step)).rename(target)


def _delete(path: Path) -> None:
    if path.suffix != _DELETING:
        path = path.rename(path.with_name(path.name + _DELETING))
    shutil.rmtree(path)


def _names(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir()] if folder.is_dir() else []
