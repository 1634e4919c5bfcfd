"""The save that all sites restore, where each site is a runtime of its own.

It is the newest that all have. Where sites go on without a lost one, it is the newest that any has,
and who lacks it takes the state from another site.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol
from zlib import crc32

import jax

from geojax.checkpoint.reading.choice import SaveChoice
from geojax.sharding.leaf_layouts import LeafLayout


class HeldSave(NamedTuple):
    """A save that a site can restore."""

    step: int
    run: int
    """Checksum of the name of the run that saved it."""
    has_all: bool
    """True if the site sees a part that holds the whole state."""
    membership_id: int
    """Record of who took part when it was saved; 0: all did."""

    @classmethod
    def of(cls, choice: SaveChoice) -> "HeldSave":
        """Describe a save that this site can restore."""
        run = crc32(choice.key.run.encode())
        return cls(choice.key.step, run, choice.has_all, choice.membership_id)

    @property
    def key(self) -> tuple[int, int]:
        """The step and the run, the same at all sites."""
        return self.step, self.run


Held = Mapping[str, Sequence[HeldSave]]
"""The saves of each site, by its name."""


class SavesOfSites(Protocol):
    """The exchange of sites about their saves; all sites call each method together."""

    takes_over: bool
    """A site that lacks the newest save takes the state from another one."""

    def held(self, own: Sequence[HeldSave]) -> Held:
        """Return the saves of all sites, given this one's own."""
        ...

    def text_of(self, site: str, text: str) -> str:
        """Return the text of a site at all sites."""
        ...

    def leaf_of(self, agreed: "AgreedSave", number: int, layout: LeafLayout) -> jax.Array:
        """Take a leaf of the state of a save from the site that gives it.

        Args:
            agreed: the save.
            number: number of the leaf in the state.
            layout: its layout.
        """
        ...

    def give_leaf(self, agreed: "AgreedSave", number: int, leaf: jax.Array) -> None:
        """Give a leaf of the state to the sites that lack it, if this one is to; wait for them."""
        ...


class AgreedSave(NamedTuple):
    """A save that all sites restore."""

    step: int
    run: int
    """Checksum of the name of the run that saved it."""
    membership_id: int
    """Newest record of who took part under which a site saved it."""
    source: str
    """First site that has it."""
    takers: tuple[str, ...]
    """Sites that lack it."""

    @property
    def key(self) -> tuple[int, int]:
        """The step and the run, the same at all sites."""
        return self.step, self.run


def agreed_save(held: Held, *, takes_over: bool) -> AgreedSave | None:
    """Return the newest save that all sites have, or any site has; None: there is none.

    A save under a later record of who takes part is newer, whatever its step.

    Args:
        held: the saves of all sites.
        takes_over: one site that has it is enough.
    """
    saves = [save for of_site in held.values() for save in of_site]
    ids: dict[tuple[int, int], int] = {}
    for save in saves:
        ids[save.key] = max(save.membership_id, ids.get(save.key, 0))
    keys = [
        key for key in ids if takes_over or all(_has(of_site, key) for of_site in held.values())
    ]
    if not keys:
        return None
    key = max(keys, key=lambda key: (ids[key], key))
    having = [site for site, of_site in held.items() if _has(of_site, key)]
    lacking = tuple(site for site in held if site not in having)
    return AgreedSave(*key, ids[key], having[0], lacking)


def _has(saves: Sequence[HeldSave], key: tuple[int, int]) -> bool:
    return any(save.key == key for save in saves)


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
    return [site for site, saves in held.items() if not _has(saves, save.key)]
