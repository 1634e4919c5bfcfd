"""The ends of a process's transport: one for each stage that it holds, and one for its site.

    to a stage of the same process  a copy between meshes of one runtime
    to another stage                the process's transport
    to another site                 the same, to the processes that hold the same stages there

Stages are numbered through all sites; a stage is to a walk what a site is where it has one stage.

Processes of one site do not use collectives for their hops: both ends of a collective wait for each
other, and in 1f1b one stage sends a stream while its neighbor sends a cotangent.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import jax

from geojax.transport import Fetch, MeasuredLink, MessageKey, Transport, loopback
from geojax.transport.protocol import PeerCounters, SocketFigures, ToldFigures


def between_sites(transport: Transport, sites: int) -> Transport:
    """Return the transport of a process to its counterparts in the other sites.

    Args:
        transport: joins the process to those that hold other stages, in all sites.
        sites: number of sites.
    """
    groups = transport.sites // sites
    if groups == 1:
        return transport
    own, group = divmod(transport.site, groups)
    ends = {
        site: StageRoute(transport, site * groups + group) for site in range(sites) if site != own
    }
    return SiteTransport(own, transport.site_names[::groups], ends, transport)


def stage_transports(transport: Transport, stages: int) -> Sequence[Transport]:
    """Return the transport of each stage of a process.

    Args:
        transport: joins the process to those that hold other stages, in all sites.
        stages: stages of every process.
    """
    if stages == 1:
        return [transport]
    names = [name for name in transport.site_names for _ in range(stages)]
    made = []
    for inside in loopback(stages, silence_seconds=math.inf):
        ends = {
            process * stages + stage: StageRoute(inside, stage)
            if process == transport.site
            else StageRoute(transport, process)
            for process in range(transport.sites)
            for stage in range(stages)
        }
        own = transport.site * stages + inside.site
        del ends[own]
        made.append(RoutedTransport(own, names, ends, inside))
    return made


class StageRoute(NamedTuple):
    """The way to another end."""

    transport: Transport
    number: int
    """The number of the end in `transport`; several ends may share it."""


class RoutedTransport:
    """An end that reaches the others over several transports, under keys that name both ends.

    `geojax.transport.protocol.Transport` documents its methods.

    Args:
        site: number of the end.
        site_names: the site of each end.
        routes: the way to each other end.
        own: the transport whose offers the end waits for, and which it closes.
    """

    def __init__(
        self, site: int, site_names: Sequence[str], routes: Mapping[int, StageRoute], own: Transport
    ):
        self.site, self.sites, self.site_names = site, len(site_names), site_names
        self.counters: Mapping[int, PeerCounters] = {
            end: route.transport.counters[route.number] for end, route in routes.items()
        }
        self._routes, self._own = routes, own

    def offer(
        self,
        receiver: int,
        key: MessageKey,
        arrays: Sequence[jax.Array],
        *,
        yields: bool = False,
    ) -> None:
        """Offer arrays to another end."""
        transport, number = self._routes[receiver]
        transport.offer(number, self._between_ends(key, self.site, receiver), arrays, yields=yields)

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> Fetch:
        """Begin to fetch what another end offers."""
        transport, number = self._routes[sender]
        return transport.fetch(number, self._between_ends(key, sender, self.site), like)

    def check(self) -> None:
        """Raise the error of the first stage or process that is lost."""
        for transport in {id(each): each for each, _ in self._routes.values()}.values():
            transport.check()

    def measured(self) -> Mapping[int, MeasuredLink]:
        """Return what was measured of the links of the end's own transport."""
        measured = self._own.measured()
        return {
            end: measured[number]
            for end, (transport, number) in self._routes.items()
            if transport is self._own and number in measured
        }

    def tell(self, receiver: int, figures: bytes) -> None:
        """Tell the process of another end figures."""
        transport, number = self._routes[receiver]
        transport.tell(number, figures)

    def told(self, sender: int) -> ToldFigures | None:
        """Return the newest figures that the process of another end has told."""
        transport, number = self._routes[sender]
        return transport.told(number)

    def socket_figures(self) -> Mapping[int, SocketFigures]:
        """Return how the kernel sees the links to the processes of other ends."""
        figures = self._own.socket_figures()
        return {
            end: figures[number]
            for end, (transport, number) in self._routes.items()
            if transport is self._own and number in figures
        }

    def drain(self) -> None:
        """Wait until the others have the offers of this end over its own transport."""
        self._own.drain()

    def close(self, *, failed: bool = False) -> None:
        """End the exchange over the end's own transport; those that wait for it fail."""
        self._own.close(failed=failed)

    def _between_ends(self, key: MessageKey, sender: int, receiver: int) -> MessageKey:
        """Return the key of a message between two ends, which no other pair of ends has."""
        return key._replace(part=1 + sender * self.sites + receiver)


class SiteTransport(RoutedTransport):
    """The end of a site in a process that holds some of its stages."""

    def measured(self) -> Mapping[int, MeasuredLink]:
        """Return the round trip to each other site, and the rate to the stages that get most."""
        measured, counters = self._own.measured(), self._own.counters
        groups = self._own.sites // self.sites
        links = {}
        for site, (_, number) in self._routes.items():
            ends = [end for end in range(site * groups, (site + 1) * groups) if end in measured]
            if ends:
                busiest = max(ends, key=lambda end: counters[end].acknowledged_bytes)
                trip = measured[number].round_trip_seconds
                links[site] = MeasuredLink(trip, measured[busiest].bytes_per_second)
        return links
