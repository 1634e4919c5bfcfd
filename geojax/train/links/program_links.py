"""The links of one program over all sites, which moves the messages itself."""

import dataclasses
import functools
import math
from collections.abc import Mapping

import jax
from jax.sharding import Mesh

from geojax.config.run_config import RunConfig
from geojax.islands.traffic import LinkTraffic
from geojax.mesh import site_names
from geojax.runtime.liveness.heartbeat import read_heartbeats
from geojax.step.resolved import Step
from geojax.topology import Topology
from geojax.train.link_figures import PlannedWait
from geojax.train.links.agreement import AgreementOfOneProgram
from geojax.transport import MeasuredLink, ToldFigures


@dataclasses.dataclass(frozen=True)
class ProgramLinks:
    """The links of one program: a `geojax.train.links.run_links.RunLinks`."""

    config: RunConfig
    resolved: Step
    """The choices of the run, for the batch of the program."""
    mesh: Mesh

    @property
    def sent_bytes(self) -> float | None:
        """Bytes that the devices of a site send to other sites in a step; None with one site."""
        sent = self.resolved.bytes_between_sites
        return None if sent is None else sent.value

    @functools.cached_property
    def planned_wait(self) -> PlannedWait | None:
        """Wait for other sites that the plan expects of a step; None: there is none."""
        figure = self.resolved.wait_seconds
        _, *others = site_names(self.mesh, self.config.load_topology())
        return PlannedWait(figure.value, others) if others and figure is not None else None

    def traffic(self) -> Mapping[str, LinkTraffic]:
        """Return nothing: the host does not see the messages."""
        return {}

    def measured(self) -> Mapping[str, MeasuredLink]:
        """Return the least round trip of the heartbeats of each other site, on the first process.

        A process sends every two seconds, and tells the least of its last eight.
        """
        if jax.process_index() != 0:
            return {}
        topology = self.config.load_topology()
        trips = {process: beat.round_trip_seconds for process, beat in read_heartbeats().items()}
        of_sites = {
            site: [
                trips[device.process_index]
                for device in devices.flat
                if math.isfinite(trips.get(device.process_index, math.nan))
            ]
            for site, devices in zip(
                site_names(self.mesh, topology), self.mesh.devices, strict=True
            )
        }
        _, *others = of_sites
        return {site: MeasuredLink(min(of_sites[site], default=None)) for site in others}

    def exchange_figures(self, figures: bytes) -> Mapping[str, ToldFigures]:
        """Tell nobody: all sites have the same program."""
        return {}

    def agreement(self, topology: Topology) -> AgreementOfOneProgram:
        """Return the agreement on links that have changed, which all devices time together.

        Raises:
            UserError: the topology does not describe a link.
        """
        return AgreementOfOneProgram(self.mesh, site_names(self.mesh, topology), topology)

    def lines(self) -> list[str]:
        """Return what the log says of the messages between sites."""
        return list(self.resolved.notes)
