"""A complete probe, from the running processes to its figures."""

import contextlib
import ipaddress
from collections.abc import Collection, Sequence
from typing import Literal

import jax

from geojax.accelerators import Precision
from geojax.errors import UserError
from geojax.network_names import HostPort
from geojax.probe.context import ProbeContext
from geojax.probe.devices import default_dtype, measured_devices
from geojax.probe.figures import DeviceFigures, Figures, ProbedLink
from geojax.probe.hosts import read_hosts
from geojax.probe.links import measured_links
from geojax.probe.networks import measured_networks
from geojax.probe.outliers import slow_ones
from geojax.probe.shared_cores import measured_shared_cores
from geojax.probe.streams import own_address
from geojax.probe.topology_file import measured_topology
from geojax.topology import Topology

Check = Literal["devices", "networks", "links", "hosts"]

CHECKS: tuple[Check, ...] = ("devices", "networks", "links", "hosts")

# Relative difference within which a link is as it was described.
_LINK_TOLERANCE = 0.1


def probe(
    context: ProbeContext,
    *,
    described_by: Topology | None,
    coordinator: str | None,
    checks: Collection[Check] = CHECKS,
    streams: Sequence[int],
    dtype: Precision | None = None,
) -> Figures:
    """Run `checks`; every process of the job calls this, and each gets all figures.

    Args:
        context: the processes, their sites and hosts.
        described_by: a topology that describes the links, if any.
        coordinator: host:port of process 0, as the others reach it; None in a job of one process.
        checks: names of what to measure.
        streams: numbers of TCP streams with which the links are measured.
        dtype: dtype of the matrix products; None: the platform's default for training.

    Raises:
        MissingProcessesError: some process did not arrive.
        RunError: one site cannot reach another.
    """
    figures = Figures(
        processes=len(context.processes), dtype=dtype or default_dtype(jax.local_devices()[0])
    )
    if "devices" in checks:
        devices = measured_devices(context, figures.dtype)
        figures = figures.model_copy(update={"devices": tuple(devices)})
    if "networks" in checks:
        collectives, networks = measured_networks(context)
        found = {"collectives": tuple(collectives), "networks": tuple(networks)}
        figures = figures.model_copy(update=found)
    if "links" in checks and coordinator is not None:
        links = measured_links(context, coordinator, streams)
        hosts = min(site.hosts for site in context.topology.sites)
        judged = tuple(judged_links(links, described_by, hosts))
        figures = figures.model_copy(
            update={"links": judged, "shared_cores": measured_shared_cores(context)}
        )
    if "hosts" in checks:
        crossed = None
        if coordinator is not None and not _is_loopback(coordinator):
            crossed = measured_topology(context.topology, figures)
        figures = figures.model_copy(update={"hosts": tuple(read_hosts(context, crossed))})
    return figures.model_copy(update={"flagged": tuple(flagged(figures))})


def judged_links(
    links: Sequence[ProbedLink], described_by: Topology | None, hosts: int
) -> list[ProbedLink]:
    """Judge links by their description or, without one, by the other directions.

    Args:
        links: both directions of each link.
        described_by: a topology that describes them, if any.
        hosts: number of hosts of a site that share a link; one of them was measured.
    """
    slow = set(slow_ones({(link.source, link.target): link.best for link in links}))
    judged = []
    for link in links:
        wanted = None
        with contextlib.suppress(UserError):  # not every link need be described
            wanted = described_by.link(link.source, link.target) if described_by else None
        if wanted is None:
            is_slow = (link.source, link.target) in slow
        else:
            rate = link.best / link.packet_share
            is_slow = (
                rate < (1 - _LINK_TOLERANCE) * wanted.bytes_per_second / hosts
                or link.round_trip_seconds > (1 + _LINK_TOLERANCE) * wanted.round_trip_seconds
            )
        judged.append(link.model_copy(update={"verdict": "slow" if is_slow else "ok"}))
    return judged


def flagged(figures: Figures) -> list[str]:
    """List what is slow, a sentence each."""
    collectives = [each for each in figures.collectives if each.verdict == "slow"]
    return [
        *_flagged_devices(figures.devices),
        *(f"{each.collective} {each.scope} of site {each.site} is slow" for each in collectives),
        *(f"{link.name} is slow" for link in figures.links if link.verdict == "slow"),
    ]


def _flagged_devices(devices: Sequence[DeviceFigures]) -> list[str]:
    """List the slow devices; a host with several devices, all slow, is one entry."""
    by_host: dict[tuple[str, str], list[DeviceFigures]] = {}
    for device in devices:
        by_host.setdefault((device.site, device.host), []).append(device)
    findings = []
    for (site, host), members in by_host.items():
        slow = [device for device in members if device.verdict == "slow"]
        if len(slow) == len(members) > 1:
            findings.append(f"host {host} (site {site}) is slow: all of its {len(members)} devices")
        else:
            findings += [f"{device.name} is slow" for device in slow]
    return findings


def _is_loopback(coordinator: str) -> bool:
    address = own_address(HostPort.parse(coordinator).host)
    return ipaddress.ip_address(address).is_loopback
