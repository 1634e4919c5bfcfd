"""The choice of the checkpoint to restore, which all sites make alike from what each of them sees.

A *save* is what all sites wrote of one step in one run; each site's part lies in a folder of its
own. A site always sees its own folder, and those of others where they share a file system.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from geojax.checkpoint import manifest
from geojax.checkpoint.folder import committed_steps
from geojax.checkpoint.saved_array import SavedArray, held_by_all
from geojax.named_arrays import shape_and_dtype
from geojax.network_names import is_site_name


class SaveKey(NamedTuple):
    """Name of a save: its step, and the run that saved it (a step may be saved by two runs)."""

    step: int
    run: str


class SavedPart(NamedTuple):
    """The part of a save that one site wrote, as another process sees it on its file system."""

    path: str
    """Folder of the part, relative to the folder of the run's checkpoints."""
    step: int
    run: str = ""
    site: int = 0
    """Index of the site that wrote it, among `sites`."""
    sites: tuple[str, ...] = ()
    """Names of the sites that wrote parts of this save; ("",) where they wrote one together."""
    has_all: bool = False
    """True if the part holds the whole state."""
    membership_id: int = 0
    """Record of who took part when it was saved; 0: all sites, or there was none."""
    problem: str = ""
    """The reason why the part cannot be used; empty if it can."""

    @property
    def key(self) -> SaveKey:
        """The save that the part belongs to."""
        return SaveKey(self.step, self.run)


class SaveChoice(NamedTuple):
    """A save, and the folders in which each site of this run sees parts of it."""

    key: SaveKey
    parts_of_site: tuple[tuple[SavedPart, ...], ...]

    @property
    def has_all(self) -> bool:
        """True if a part of it holds the whole state."""
        return any(part.has_all for parts in self.parts_of_site for part in parts)

    @property
    def membership_id(self) -> int:
        """Record of who took part when it was saved; 0: all sites, or there was none."""
        return max(part.membership_id for parts in self.parts_of_site for part in parts)


def list_parts(checkpoints: Path, own: Path) -> list[SavedPart]:
    """List the parts that are visible here, those in the site's folder `own` first."""
    folders = [own, checkpoints]
    if checkpoints.is_dir():
        below = (path for path in sorted(checkpoints.iterdir()) if path.is_dir())
        folders += [path for path in below if is_site_name(path.name)]
    parts = []
    for folder in dict.fromkeys(folders):
        for step in committed_steps(folder):
            parts.append(_part(checkpoints, folder / str(step), step))
    return parts


def to_text(parts: Sequence[SavedPart]) -> str:
    """Write parts as text, for the other sites."""
    return json.dumps(parts)


def from_text(text: str) -> tuple[SavedPart, ...]:
    """Invert `to_text`."""
    rows = json.loads(text)
    return tuple(SavedPart(*row)._replace(sites=tuple(row[4])) for row in rows)


class Restorable(NamedTuple):
    """The saves that can be restored, and the steps that cannot."""

    choices: list[SaveChoice]
    """The one to prefer first."""
    problems: dict[int, str]
    """Steps that cannot be used, or whose parts not all sites see, with reasons."""


def restorable(
    seen: Sequence[Sequence[SavedPart]],
    sites: Sequence[str],
    excluded: Collection[SaveKey],
    elsewhere: Collection[str] = (),
) -> Restorable:
    """List the saves that are whole, the newest first: those under the latest membership.

    A save of as many sites as there are now is whole when each site sees its own part, or one that
    holds all. Of other saves, and after all of these, all parts must be seen by some site.

    Args:
        seen: the parts that each site sees, with the problems of those found damaged.
        sites: names of the sites of this run.
        excluded: saves that have been found damaged.
        elsewhere: names of further sites of the run, which choose by themselves.
    """
    usable = [[part for part in parts if not part.problem] for parts in seen]
    ids: dict[SaveKey, int] = {}
    for part in (part for parts in usable for part in parts):
        ids[part.key] = max(part.membership_id, ids.get(part.key, 0))
    keys = sorted(set(ids) - set(excluded), key=lambda key: (ids[key], key), reverse=True)
    problems = {
        part.step: part.problem for parts in reversed(seen) for part in parts if part.problem
    }
    whole, others = [], []
    for key in keys:
        parts = tuple(tuple(part for part in parts if part.key == key) for parts in usable)
        saved = next(part.sites for each in parts for part in each)
        all_there = _all_there(saved, parts)
        missing = _sites_without_own(parts, sites)
        if all(any(part.has_all for part in each) for each in parts):
            missing = []
        if set(saved) != {*sites, *elsewhere}:
            missing = [] if all_there else missing or [sites[0]]
        if not missing:
            whole.append(SaveChoice(key, parts))
            continue
        problems.setdefault(key.step, f"site {missing[0]} does not see all of it")
        if all_there:
            others.append(SaveChoice(key, parts))
    return Restorable(whole + others, problems)


def saved_arrays(content: Mapping[str, Any], index: int) -> dict[str, SavedArray]:
    """Return what the site number `index` holds, from the manifest of any part of the save."""
    held = content["held"][index]
    return {name: SavedArray.from_json(dims) for name, dims in held.items()}


def _part(checkpoints: Path, path: Path, step: int) -> SavedPart:
    relative = str(path.relative_to(checkpoints))
    try:
        content = manifest.read(path)
    except manifest.DamagedCheckpoint as damage:
        return SavedPart(relative, step, problem=str(damage))
    if "held" not in content:
        return SavedPart(relative, step, problem="it was written by an earlier version of geojax")
    shapes = {name: shape_and_dtype(array)[0] for name, array in content["arrays"].items()}
    index, sites = content["site"], tuple(content["sites"])
    whole = held_by_all(saved_arrays(content, index), shapes)
    membership_id = content.get("membership_id", 0)
    return SavedPart(relative, step, content["run"], index, sites, whole, membership_id)


def _all_there(saved: Sequence[str], parts: Sequence[Sequence[SavedPart]]) -> bool:
    seen = {part.site for each in parts for part in each}
    return len(seen) == len(saved) or any(part.has_all for each in parts for part in each)


def _sites_without_own(parts: Sequence[Sequence[SavedPart]], sites: Sequence[str]) -> list[str]:
    """List the sites that do not see the part that a site of their name wrote."""
    own = zip(sites, parts, strict=True)
    return [site for site, each in own if all(part.sites[part.site] != site for part in each)]
