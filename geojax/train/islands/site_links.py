"""The links of one site to the others: what crosses them, and how fast."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Self

import jax
import numpy as np
from jax.sharding import Mesh

from geojax.islands.exchange import Exchange
from geojax.islands.going_on.site_membership import SiteMembership
from geojax.islands.island_plan import process_groups
from geojax.islands.site_walks import SiteWalks
from geojax.islands.stage_numbers import of_all_stages
from geojax.islands.traffic import LinkTraffic
from geojax.quantities import quantity
from geojax.topology import Topology
from geojax.train.islands.site_rates import tell_rates, with_told_rates
from geojax.train.links.agreement import AgreementOfIslands
from geojax.transport import MeasuredLink, ToldFigures, Transport


@dataclasses.dataclass(frozen=True)
class SiteLinks:
    """The links of a site in this process: a `geojax.train.links.run_links.RunLinks`."""

    transport: Transport
    """The way to the other sites."""
    stages: SiteWalks
    """The walk of each stage of the site in this process."""
    mesh: Mesh
    """The site's devices."""
    interval: int
    """Steps after which processes tell each other what they measure."""
    membership: SiteMembership | None
    """Who takes part, where sites go on without a lost one; None: all do."""
    stage_bytes: np.ndarray
    """[stages, sites, 2]: bytes of a step from each stage of the site to other sites, and back."""

    @classmethod
    def of(
        cls,
        transport: Transport,
        stages: SiteWalks,
        mesh: Mesh,
        interval: int,
        membership: SiteMembership | None,
    ) -> Self:
        """Count the bytes of a step; all processes of the site call it together."""
        sizes = of_all_stages(stages.link_bytes, mesh)
        return cls(transport, stages, mesh, interval, membership, sizes)

    def of_walks(self, stages: SiteWalks) -> Self:
        """Return the links of other walks over the same transports."""
        return self.of(self.transport, stages, self.mesh, self.interval, self.membership)

    def recount(self) -> None:
        """Count the bytes of a step anew, whose shares the site may have taken over."""
        np.copyto(self.stage_bytes, of_all_stages(self.stages.link_bytes, self.mesh))

    @property
    def bytes_by_site(self) -> np.ndarray:
        """[sites, 2]: the bytes of a step from this site to each other one, and from it."""
        sizes: np.ndarray = self.stage_bytes.sum(axis=0)
        return sizes

    @property
    def sent_bytes(self) -> float:
        """Bytes of a step's messages to other sites."""
        return float(self.bytes_by_site[:, 0].sum())

    @property
    def sent(self) -> str:
        """The bytes of a step, in words."""
        return f"predicted {quantity(self.sent_bytes, 'B')} over dc"

    @property
    def planned_wait(self) -> None:
        """Nothing: the waits are measured."""

    def traffic(self) -> Mapping[str, LinkTraffic]:
        """Return the traffic of the last step with each other site, by name."""
        names, traffic = self.transport.site_names, self.stages.traffic
        sockets = self.transport.socket_figures()
        sizes, made = self.bytes_by_site, {}
        for site in self.transport.counters:
            sent, received = map(int, sizes[site])
            made[names[site]] = dataclasses.replace(
                traffic.get(site, LinkTraffic()),
                sent_bytes=sent,
                received_bytes=received,
                sockets=sockets.get(site),
            )
        return made

    def exchange_figures(self, figures: bytes) -> Mapping[str, ToldFigures]:
        """Tell the counterparts in the other sites figures; return their newest, by site."""
        told = {}
        for site in self.transport.counters:
            self.transport.tell(site, figures)
            if (newest := self.transport.told(site)) is not None:
                told[self.transport.site_names[site]] = newest
        return told

    def measured(self) -> Mapping[str, MeasuredLink]:
        """Return what was measured of the link to each other site since the last call, by name.

        Each process knows the rate of its own messages; the others that hold the same stages send
        as many at the same time.
        """
        names, together = self.transport.site_names, jax.process_count() // self._groups
        links = self._own_links()
        if self._groups > 1:
            links = with_told_rates(links)
        return {
            names[site]: link._replace(
                bytes_per_second=link.bytes_per_second and together * link.bytes_per_second
            )
            for site, link in links.items()
        }

    def tell_rates(self) -> None:
        """Tell the first process what this one measures, if it is the first that holds a stage."""
        if self._groups == 1:
            return
        process, together = jax.process_index(), jax.process_count() // self._groups
        is_due = self.stages.walks[0].steps % self.interval == 0
        if process > 0 and process % together == 0 and is_due:
            tell_rates(self._own_links())

    def agreement(self, topology: Topology) -> AgreementOfIslands:
        """Return the agreement on links that have changed, which each site times for itself."""
        names = tuple(self.transport.site_names)
        exchange = exchange_of(self.transport, "links", self.membership)
        return AgreementOfIslands(exchange, self.mesh, names)

    def lines(self) -> list[str]:
        """Return what the log says of the messages between sites."""
        return [f"a step of a site: {self.sent}"]

    def _own_links(self) -> dict[int, MeasuredLink]:
        """Return the links as this process measures them: rates of the stages that send most."""
        busiest, own = self.stage_bytes[:, :, 0].argmax(axis=0), self.stages.numbers
        return {
            site: link if busiest[site] in own else link._replace(bytes_per_second=None)
            for site, link in self.transport.measured().items()
        }

    @functools.cached_property
    def _groups(self) -> int:
        """Groups of the site's processes that hold the same stages."""
        return process_groups(self.mesh)


def exchange_of(transport: Transport, kind: str, membership: SiteMembership | None) -> Exchange:
    """Return an exchange of all sites, or of those that take part."""
    if membership is None:
        return Exchange(transport, kind)
    return Exchange(transport, kind, membership.agreed)
