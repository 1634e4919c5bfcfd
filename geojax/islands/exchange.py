"""An exchange of a few numbers between all sites, outside the messages of a walk."""

import jax

from geojax.transport import MessageKey, Transport


class Exchange:
    """The exchanges of one site; all sites make the same ones in the same order.

    Args:
        transport: joins the site to the others.
    """

    def __init__(self, transport: Transport):
        self._transport = transport
        self._count = 0

    def of_all_sites(self, own: jax.Array) -> list[jax.Array]:
        """Exchange numbers that are equal on all devices of `own`: those of each site, in order.

        Raises:
            RunError: another site is lost.
        """
        others = list(self._transport.counters)
        key = MessageKey(self._count, "numbers")
        self._count += 1
        like = [jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=own.sharding)]
        fetches = {other: self._transport.fetch(other, key, like) for other in others}
        for other in others:
            self._transport.offer(other, key, [own])
        parts = {other: fetch.result()[0] for other, fetch in fetches.items()}
        parts[self._transport.site] = own
        return [parts[site] for site in sorted(parts)]
