"""The exchange of sites with runtimes of their own about the save that all of them restore."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh

from geojax.checkpoint.reading.common_save import AgreedSave, Held, HeldSave
from geojax.islands.exchange import Exchange
from geojax.sharding import leaf_layouts
from geojax.sharding.leaf_layouts import LeafLayout
from geojax.transport import MessageKey, Transport

_MOST_SAVES = 256
_WORD = np.dtype(np.uint32)


class SiteSaves:
    """The exchange of one site; `geojax.checkpoint.reading.common_save.SavesOfSites` says more.

    Args:
        transport: joins the sites.
        mesh: this site's devices.
        takes_over: a site that lacks the newest save takes the state from another one.
    """

    def __init__(self, transport: Transport, mesh: Mesh, *, takes_over: bool):
        self.takes_over = takes_over
        self._transport, self._mesh = transport, mesh
        self._exchange = Exchange(transport, "saves")

    def held(self, own: Sequence[HeldSave]) -> Held:
        """Return the saves of all sites, the newest of each."""
        rows = np.zeros((_MOST_SAVES, 1 + len(HeldSave._fields)), _WORD)
        for row, save in zip(rows, own[:_MOST_SAVES], strict=False):
            row[:] = (True, *save)
        return {
            name: [
                HeldSave(int(step), int(run), bool(has_all), int(membership_id))
                for is_one, step, run, has_all, membership_id in of_site
                if is_one
            ]
            for name, of_site in zip(self._names, self._of_sites(rows), strict=True)
        }

    def text_of(self, site: str, text: str) -> str:
        """Return the text of a site at all sites."""
        own, index = text.encode(), self._names.index(site)
        size = int(self._of_sites(np.array([len(own)], _WORD))[index][0])
        room = -(-size // _WORD.itemsize) * _WORD.itemsize
        words = np.frombuffer(own[:room].ljust(room, b"\0"), _WORD)
        return self._of_sites(words)[index].tobytes()[:size].decode()

    def leaf_of(self, agreed: AgreedSave, number: int, layout: LeafLayout) -> jax.Array:
        """Take a leaf of the state of a save from the site that gives it."""
        source = self._names.index(agreed.source)
        like = [leaf_layouts.abstract(layout, self._mesh)]
        (leaf,) = self._transport.fetch(source, _key(agreed, number), like).result()
        self._wait_for_all()
        return leaf

    def give_leaf(self, agreed: AgreedSave, number: int, leaf: jax.Array) -> None:
        """Give a leaf of the state to the sites that lack it, if this one is to; wait for them."""
        if self._names[self._transport.site] == agreed.source:
            for taker in agreed.takers:
                receiver = self._names.index(taker)
                # Its size is not among those of a step's messages, which the limit is for.
                self._transport.offer(receiver, _key(agreed, number), [leaf], yields=True)
        self._wait_for_all()

    def _wait_for_all(self) -> None:
        """Wait until all sites have a leaf, so that host memory has one at a time."""
        self._of_sites(np.zeros(1, _WORD))

    def _of_sites(self, own: np.ndarray) -> list[np.ndarray]:
        return list(self._exchange.of_hosts(own, self._mesh).values())

    @property
    def _names(self) -> Sequence[str]:
        return self._transport.site_names


def _key(agreed: AgreedSave, number: int) -> MessageKey:
    return MessageKey(agreed.step, "saved", part=number)
