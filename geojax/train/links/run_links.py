"""The protocol of a run's links: what a trainer needs to know of the traffic between its sites."""

from collections.abc import Mapping
from typing import Protocol

from geojax.islands.traffic import LinkTraffic
from geojax.topology import Topology
from geojax.train.link_figures import PlannedWait
from geojax.train.links.agreement import LinkAgreement
from geojax.transport import MeasuredLink, ToldFigures


class RunLinks(Protocol):
    """The links between the sites of a run, as one process sees them."""

    @property
    def sent_bytes(self) -> float | None:
        """Bytes that the devices of a site send to other sites in a step; None with one site."""
        ...

    @property
    def planned_wait(self) -> PlannedWait | None:
        """Wait for other sites that the plan expects of a step; None: islands measure theirs."""
        ...

    def traffic(self) -> Mapping[str, LinkTraffic]:
        """Return the traffic of the last step with each other site, by name.

        Nothing in one program over all sites, whose messages the host does not see.
        """
        ...

    def measured(self) -> Mapping[str, MeasuredLink]:
        """Return what was measured of the link to each other site since the last call, by name.

        In one program over all sites the first process knows the round trips of the heartbeats.
        """
        ...

    def exchange_figures(self, figures: bytes) -> Mapping[str, ToldFigures]:
        """Tell the other sites figures; return the newest that each of them has told, by name.

        Nothing is told in one program over all sites.
        """
        ...

    def agreement(self, topology: Topology) -> LinkAgreement:
        """Return the way in which all processes agree on links that have changed.

        Raises:
            UserError: the topology does not describe a link.
        """
        ...

    def lines(self) -> list[str]:
        """Return what the log says of the messages between sites."""
        ...
