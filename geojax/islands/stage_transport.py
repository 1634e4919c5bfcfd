"""The transports of the stages of a site, each of which walks by itself.

    to a stage of the same site     a copy between meshes of one runtime
    to a stage of another site      the site's transport, under a key that names both stages

Stages are numbered through all sites; a stage is to a walk what a site is where it has one stage.
"""

import math
from collections.abc import Mapping, Sequence

import jax

from geojax.transport import Fetch, MeasuredLink, MessageKey, Transport, loopback
from geojax.transport.protocol import PeerCounters


def stage_transports(transport: Transport, stages: int) -> Sequence[Transport]:
    """Return the transport of each stage of a site.

    Args:
        transport: joins the site to the others.
        stages: stages of every site.
    """
    if stages == 1:
        return [transport]
    return [StageTransport(transport, own) for own in loopback(stages, silence_seconds=math.inf)]


class StageTransport:
    """One stage's end; `geojax.transport.protocol.Transport` documents its methods.

    Args:
        between_sites: the site's.
        inside: joins the stage to the others of its site.
    """

    def __init__(self, between_sites: Transport, inside: Transport):
        self._between_sites, self._inside = between_sites, inside
        self._first = between_sites.site * inside.sites
        self.site = self._first + inside.site
        self.sites = between_sites.sites * inside.sites
        self.site_names: Sequence[str] = [
            f"{name}, stage {stage}"
            for name in between_sites.site_names
            for stage in range(inside.sites)
        ]
        self.counters: Mapping[int, PeerCounters] = {
            stage: inside.counters[stage - self._first]
            if self._is_inside(stage)
            else between_sites.counters[stage // inside.sites]
            for stage in range(self.sites)
            if stage != self.site
        }

    def offer(self, receiver: int, key: MessageKey, arrays: Sequence[jax.Array]) -> None:
        """Offer arrays to another stage."""
        if self._is_inside(receiver):
            self._inside.offer(receiver - self._first, key, arrays)
        else:
            named = self._between_stages(key, self.site, receiver)
            self._between_sites.offer(receiver // self._inside.sites, named, arrays)

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> Fetch:
        """Begin to fetch what another stage offers."""
        if self._is_inside(sender):
            return self._inside.fetch(sender - self._first, key, like)
        named = self._between_stages(key, sender, self.site)
        return self._between_sites.fetch(sender // self._inside.sites, named, like)

    def check(self) -> None:
        """Raise the error of the first stage or site that is lost."""
        self._inside.check()
        self._between_sites.check()

    def measured(self) -> Mapping[int, MeasuredLink]:
        """Return what was measured of the links of the site."""
        return self._between_sites.measured()

    def drain(self) -> None:
        """Wait until the stages of the site have all offers."""
        self._inside.drain()

    def close(self, *, failed: bool = False) -> None:
        """End the exchange with the other stages of the site; those that wait for more fail."""
        self._inside.close(failed=failed)

    def _is_inside(self, stage: int) -> bool:
        return 0 <= stage - self._first < self._inside.sites

    def _between_stages(self, key: MessageKey, sender: int, receiver: int) -> MessageKey:
        """Return the key of a message between sites, which no other pair of stages has."""
        return key._replace(part=1 + sender * self.sites + receiver)
