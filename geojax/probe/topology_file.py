"""Figures of a probe as a topology, and a topology as a YAML file that `Topology.load` reads."""

from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

import yaml

from geojax.accelerators import CATALOG, Accelerator
from geojax.errors import UserError
from geojax.probe.figures import CollectiveFigures, Figures, NetworkFigures, ProbedLink, Scope
from geojax.topology import Link, Site, SiteLink, Topology

_NETWORKS: dict[Scope, str] = {"inside host": "inside_host", "between hosts": "between_hosts"}


def measured_topology(running: Topology, figures: Figures) -> Topology:
    """Return the topology `running` with measured figures in place of described ones.

    An accelerator whose published peaks are known keeps them; another one (a CPU, say) gets the
    rates that it reached. A network's bandwidth is the bus bandwidth of the largest all-gather, a
    link's the payload at the number of streams that carries most. A described link that several
    hosts share keeps its description, since only one host was measured.
    """
    sites = tuple(_site(site, figures) for site in running.sites)
    pairs = {frozenset((link.source, link.target)) for link in figures.links}
    kept = [link for link in running.links if frozenset(link.sites) not in pairs]
    links = [
        _link([link for link in figures.links if {link.source, link.target} == pair], running)
        for pair in pairs
    ]
    links = sorted([*links, *kept], key=lambda link: _order(running, link))
    return running.model_copy(update={"sites": sites, "links": tuple(links)})


def save_topology(topology: Topology, path: Path, remarks: Sequence[str]) -> None:
    """Write a topology as YAML, with `remarks` as comments at its head.

    The processes of each site are left out: they differ from run to run.

    Raises:
        UserError: the file cannot be written.
    """
    content: dict[str, Any] = {"sites": [_site_content(site) for site in topology.sites]}
    if topology.links:
        content["links"] = [
            {"sites": list(link.sites)} | _link_content(link, "bit/s") for link in topology.links
        ]
    head = "".join(f"# {remark}\n" for remark in remarks)
    body = yaml.safe_dump(content, sort_keys=False, default_flow_style=None, width=100)
    try:
        path.write_text(head + body, encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None


def _order(topology: Topology, link: SiteLink) -> tuple[int, ...]:
    return tuple(sorted(map(topology.site_names.index, link.sites)))


def _site(site: Site, figures: Figures) -> Site:
    changes: dict[str, Any] = {}
    devices = [device for device in figures.devices if device.site == site.name]
    if devices and not site.accelerator.peak_flops_per_second:
        changes["accelerator"] = Accelerator(
            name=site.accelerator.name,
            peak_flops_per_second={figures.dtype: median(d.flops_per_second for d in devices)},
            memory_bytes=site.accelerator.memory_bytes,
            memory_bytes_per_second=median(d.bytes_per_second for d in devices),
        )
    for scope, field in _NETWORKS.items():
        gathers = [
            each
            for each in figures.collectives
            if (each.site, each.scope, each.collective) == (site.name, scope, "all-gather")
        ]
        networks = [n for n in figures.networks if (n.site, n.scope) == (site.name, scope)]
        if gathers and networks:
            changes[field] = _network(gathers[0], networks[0])
    changes["shared_cores"] = figures.shared_cores or site.shared_cores
    return site.model_copy(update=changes)


def _network(gather: CollectiveFigures, network: NetworkFigures) -> Link:
    rates = gather.bus_bytes_per_second
    return Link(round_trip_seconds=network.round_trip_seconds, bytes_per_second=rates[max(rates)])


def _link(directions: Sequence[ProbedLink], running: Topology) -> SiteLink:
    there, back = directions
    sites = (there.source, there.target)
    rates = {"bytes_per_second": there.best, "reverse_bytes_per_second": back.best}
    described = [link for link in running.links if set(link.sites) == set(sites)]
    if described and min(site.hosts for site in running.sites) > 1:
        rates = {
            "bytes_per_second": running.link(*sites).bytes_per_second,
            "reverse_bytes_per_second": running.link(*reversed(sites)).bytes_per_second,
        }
    return SiteLink(sites=sites, round_trip_seconds=there.round_trip_seconds, **rates)


def _site_content(site: Site) -> dict[str, Any]:
    accelerator: Any = site.accelerator.name
    if CATALOG.get(accelerator) != site.accelerator:
        accelerator = site.accelerator.model_dump(exclude_defaults=True, exclude={"device_kinds"})
        rates = accelerator.get("peak_flops_per_second", {})
        rates.update({name: _written(rate, "FLOP/s") for name, rate in rates.items()})
        if moved := accelerator.get("memory_bytes_per_second"):
            accelerator["memory_bytes_per_second"] = _written(moved, "B/s")
    content = {
        "name": site.name,
        "hosts": site.hosts,
        "accelerators_per_host": site.accelerators_per_host,
        "accelerator": accelerator,
    }
    for field in _NETWORKS.values():
        network = getattr(site, field)
        if network is not None:
            content[field] = _link_content(network, "B/s")
    if site.shared_cores is not None:
        content["shared_cores"] = site.shared_cores.model_dump()
    return content


def _link_content(link: Link, unit: str) -> dict[str, str]:
    content = {"round_trip_seconds": f"{link.round_trip_seconds * 1e3:.4g}ms"}
    rates = {"bytes_per_second": link.bytes_per_second}
    if isinstance(link, SiteLink) and link.reverse_bytes_per_second is not None:
        rates["reverse_bytes_per_second"] = link.reverse_bytes_per_second
    bits = 8 if unit == "bit/s" else 1
    return content | {name: _written(bits * rate, unit) for name, rate in rates.items()}


def _written(rate: float, unit: str) -> str:
    """Format a rate with four significant digits, as `geojax.quantities` reads it."""
    scale, prefix = next(
        (scale, prefix)
        for scale, prefix in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
        if rate >= scale or not prefix
    )
    return f"{rate / scale:.4g}{prefix}{unit}"
