"""The ends of a process's transport: one for each stage that it holds, and one for its site.

    to a stage of the same process  a copy between meshes of one runtime
    to another stage                the process's transport, under a key that names both stages
    to another site                 the same, to the processes that hold the same stages there

Stages are numbered through all sites; a stage is to a walk what a site is where it has one stage.

Processes of one site do not use collectives for their hops: both ends of a collective wait for each
other, and in 1f1b one stage sends a stream while its neighbor sends a cotangent.
"""

import math
from collections.abc import Mapping, Sequence

import jax

from geojax.transport import Fetch, MeasuredLink, MessageKey, Transport, loopback
from geojax.transport.protocol import PeerCounters


def between_sites(transport: Transport, sites: int) -> Transport:
    """Return the transport of a process to its counterparts in the other sites.

    Args:
        transport: joins the process to those that hold other stages, in all sites.
        sites: number of sites.
    """
    return transport if transport.sites == sites else SiteTransport(transport, sites)


def stage_transports(transport: Transport, stages: int) -> Sequence[Transport]:
    """Return the transport of each stage of a process.

    Args:
        transport: joins the process to those that hold other stages, in all sites.
        stages: stages of every process.
    """
    if stages == 1:
        return [transport]
    return [StageTransport(transport, own) for own in loopback(stages, silence_seconds=math.inf)]


class SiteTransport:
    """A site's end, in one process; `geojax.transport.protocol.Transport` documents its methods.

    Args:
        between_processes: joins the process to those that hold other stages, in all sites.
        sites: number of sites.
    """

    def __init__(self, between_processes: Transport, sites: int):
        self._between_processes, self.sites = between_processes, sites
        self._groups = between_processes.sites // sites
        self.site, self._group = divmod(between_processes.site, self._groups)
        self.site_names: Sequence[str] = between_processes.site_names[:: self._groups]
        self.counters: Mapping[int, PeerCounters] = {
            site: between_processes.counters[self._in(site)]
            for site in range(sites)
            if site != self.site
        }

    def offer(self, receiver: int, key: MessageKey, arrays: Sequence[jax.Array]) -> None:
        """Offer arrays to another site."""
        self._between_processes.offer(self._in(receiver), key, arrays)

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> Fetch:
        """Begin to fetch what another site offers."""
        return self._between_processes.fetch(self._in(sender), key, like)

    def check(self) -> None:
        """Raise the error of the first process that is lost."""
        self._between_processes.check()

    def measured(self) -> Mapping[int, MeasuredLink]:
        """Return the round trips to the other sites; rates are known to the stages at the cuts."""
        measured = self._between_processes.measured()
        return {
            site: MeasuredLink(measured[self._in(site)].round_trip_seconds)
            for site in self.counters
            if self._in(site) in measured
        }

    def drain(self) -> None:
        """Wait until all offers of the process are fetched."""
        self._between_processes.drain()

    def close(self, *, failed: bool = False) -> None:
        """End the exchange of the process with all others."""
        self._between_processes.close(failed=failed)

    def _in(self, site: int) -> int:
        """Return the number of the processes of a site that hold the same stages as this one."""
        return site * self._groups + self._group


class StageTransport:
    """One stage's end; `geojax.transport.protocol.Transport` documents its methods.

    Args:
        between_processes: joins its process to those that hold other stages, in all sites.
        inside: joins the stage to the others of its process.
    """

    def __init__(self, between_processes: Transport, inside: Transport):
        self._between_processes, self._inside = between_processes, inside
        self._first = between_processes.site * inside.sites
        self.site = self._first + inside.site
        self.sites = between_processes.sites * inside.sites
        self.site_names: Sequence[str] = [
            name for name in between_processes.site_names for _ in range(inside.sites)
        ]
        self.counters: Mapping[int, PeerCounters] = {
            stage: inside.counters[stage - self._first]
            if self._is_inside(stage)
            else between_processes.counters[stage // inside.sites]
            for stage in range(self.sites)
            if stage != self.site
        }

    def offer(self, receiver: int, key: MessageKey, arrays: Sequence[jax.Array]) -> None:
        """Offer arrays to another stage."""
        if self._is_inside(receiver):
            self._inside.offer(receiver - self._first, key, arrays)
        else:
            named = self._between_stages(key, self.site, receiver)
            self._between_processes.offer(receiver // self._inside.sites, named, arrays)

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> Fetch:
        """Begin to fetch what another stage offers."""
        if self._is_inside(sender):
            return self._inside.fetch(sender - self._first, key, like)
        named = self._between_stages(key, sender, self.site)
        return self._between_processes.fetch(sender // self._inside.sites, named, like)

    def check(self) -> None:
        """Raise the error of the first stage or process that is lost."""
        self._inside.check()
        self._between_processes.check()

    def measured(self) -> Mapping[int, MeasuredLink]:
        """Return what was measured of the links of the site."""
        return self._between_processes.measured()

    def drain(self) -> None:
        """Wait until the stages of the process have all offers."""
        self._inside.drain()

    def close(self, *, failed: bool = False) -> None:
        """End the exchange with the other stages of the process; those that wait fail."""
        self._inside.close(failed=failed)

    def _is_inside(self, stage: int) -> bool:
        return 0 <= stage - self._first < self._inside.sites

    def _between_stages(self, key: MessageKey, sender: int, receiver: int) -> MessageKey:
        """Return the key of a message between processes, which no other pair of stages has."""
        return key._replace(part=1 + sender * self.sites + receiver)
