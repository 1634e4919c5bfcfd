"""The newest save that all sites have, where each site is a runtime of its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple
from zlib import crc32

from geojax.checkpoint.reading.choice import SaveChoice


class HeldSave(NamedTuple):
    """A save that a site can restore."""

    step: int
    run: int
    """Checksum of the name of the run that saved it."""
    has_all: bool
    """True if the site sees a part that holds the whole state."""

    @classmethod
    def of(cls, choice: SaveChoice) -> "HeldSave":
        """Describe a save that this site can restore."""
        return cls(choice.key.step, crc32(choice.key.run.encode()), choice.has_all)

    @property
    def key(self) -> tuple[int, int]:
        """The step and the run, the same at all sites."""
        return self.step, self.run


Held = Mapping[str, Sequence[HeldSave]]
"""The saves of each site, by its name."""

SavesOfSites = Callable[[Sequence[HeldSave]], Held]
"""Exchange of the saves of all sites, which call it together, each with its own."""


def newest_common(choices: Sequence[SaveChoice], held: Held) -> SaveChoice | None:
    """Return the newest of a site's saves that all sites can restore; None if there is none."""
    keys = [{save.key for save in saves} for saves in held.values()]
    common = [each for each in choices if all(HeldSave.of(each).key in own for own in keys)]
    return max(common, key=lambda each: HeldSave.of(each).key, default=None)


def lacking_sites(held: Held) -> dict[int, str]:
    """Name the sites that lack a step which others have, by the step."""
    problems = {}
    for save in (save for saves in held.values() for save in saves):
        if lacking := _sites_without(save, held):
            problems[save.step] = f"site {' and '.join(lacking)} lacks it"
    return problems


def advice(held: Held) -> str:
    """Say what to copy so that all sites have the newest save; they have none in common."""
    site, newest = max(
        ((site, save) for site, saves in held.items() for save in saves),
        key=lambda each: each[1].key,
    )
    lacking = _sites_without(newest, held)
    missing, step = " and ".join(lacking), newest.step
    way = f"put checkpoints/{lacking[0]}/{step} back at site {lacking[0]}"
    if newest.has_all:
        way = f"copy checkpoints/{site}/{step} of site {site} to the same place at site {missing}"
    return (
        f"site {missing} lacks step {step}, which site {site} has, and the sites have no other in "
        f"common. To resume, {way}, or remove the checkpoints of all sites to start anew"
    )


def _sites_without(save: HeldSave, held: Held) -> list[str]:
    return [site for site, saves in held.items() if save.key not in [own.key for own in saves]]
