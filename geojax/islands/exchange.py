"""An exchange of a few numbers between all sites, outside the messages of a walk."""

import contextlib
import secrets
from collections.abc import Callable, Collection

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from geojax.errors import RunError
from geojax.transport import MessageKey, Transport

_NAME_WORDS = 4


class LostSiteError(RunError):
    """The run goes on without a site, from which a message was to come."""


class Exchange:
    """The exchanges of one site; all sites make the same ones in the same order.

    Args:
        transport: joins the site to the others.
        kind: subject of the messages, by which those of several exchanges differ.
        agreed: returns the sites of which all processes of this one have a message, by those of
            which this process has one.
    """

    def __init__(
        self,
        transport: Transport,
        kind: str = "numbers",
        agreed: Callable[[Collection[int]], Collection[int]] = lambda sites: sites,
    ):
        self._transport, self._kind, self._agreed = transport, kind, agreed
        self._step = self._count = 0
        self._name: str | None = None

    def number_from(self, step: int) -> None:
        """Count the next exchanges as those after a step, to which sites come by several ways."""
        self._step, self._count = step, 0

    def adopt_name(self, name: str) -> None:
        """Take the name that the other sites have drawn."""
        self._name = name

    def of_all_sites(self, own: jax.Array) -> dict[int, jax.Array]:
        """Exchange numbers that are equal on all devices of `own`: those of each site, in order.

        A site is left out if the run goes on without it.

        Raises:
            RunError: another site is lost.
        """
        others = list(self._transport.counters)
        key = MessageKey(self._step, self._kind, chunk=self._count)
        self._count += 1
        like = [jax.ShapeDtypeStruct(own.shape, own.dtype, sharding=own.sharding)]
        fetches = {other: self._transport.fetch(other, key, like) for other in others}
        for other in others:
            self._transport.offer(other, key, [own])
        parts = {self._transport.site: own}
        for other, fetch in fetches.items():
            with contextlib.suppress(LostSiteError):
                (parts[other],) = fetch.result()
        return {site: parts[site] for site in sorted(self._agreed(parts))}

    def of_hosts(self, own: np.ndarray, mesh: Mesh) -> dict[int, np.ndarray]:
        """Exchange numbers of the hosts: those of each site, in order.

        A site is left out if the run goes on without it.

        Args:
            own: the site's, the same in each of its processes.
            mesh: the site's devices.

        Raises:
            RunError: another site is lost.
        """
        sharding = NamedSharding(mesh, PartitionSpec())
        array = jax.make_array_from_callback(own.shape, sharding, lambda place: own[place])
        of_sites = self.of_all_sites(array)
        return {site: np.asarray(each.addressable_data(0)) for site, each in of_sites.items()}

    def random_name(self, mesh: Mesh) -> str:
        """Return a name that all sites share, 32 hex digits; the first time they ask together.

        The first site draws it: each of its processes one, of which that of the process that
        writes the site's manifest counts.

        Args:
            mesh: the site's devices.

        Raises:
            RunError: another site is lost.
        """
        if self._name is None:
            drawn = np.frombuffer(secrets.token_bytes(4 * _NAME_WORDS), np.uint32)
            first, *_ = self.of_hosts(drawn, mesh).values()
            self._name = first.tobytes().hex()
        return self._name
