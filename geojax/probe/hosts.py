"""TCP settings of each host's kernel, and advice if they cannot fill the measured links."""

import collections
import os

from geojax.errors import UserError
from geojax.probe.context import ProbeContext
from geojax.probe.exchange import collect
from geojax.probe.figures import HostFigures
from geojax.runtime.advice.link_advice import TcpSettings, link_advice, nccl_sockets
from geojax.topology import Topology


def read_hosts(context: ProbeContext, links: Topology | None) -> list[HostFigures]:
    """Read the settings of every Linux host; every process of the job calls this.

    Args:
        context: the processes and their hosts.
        links: a topology with the links that hosts should fill; None: they cross none.

    Raises:
        MissingProcessesError: some process did not arrive.
    """
    own = _own(context, links)
    answers = collect("hosts", own.model_dump_json() if own is not None else "")
    found = [HostFigures.model_validate_json(answer) for answer in answers if answer]
    return _compared(
        list({(each.site, each.host): each for each in reversed(found)}.values())[::-1]
    )


def _own(context: ProbeContext, links: Topology | None) -> HostFigures | None:
    tcp = TcpSettings.read()
    if tcp is None:
        return None
    advice = _advice(context, links, tcp) if links is not None else []
    return HostFigures(
        site=context.own_site,
        host=context.own_host,
        send_buffer_bytes=tcp.tcp_wmem[2],
        receive_buffer_bytes=tcp.tcp_rmem[2],
        congestion_control=tcp.congestion_control,
        slow_start_after_idle=tcp.slow_start_after_idle,
        advice=tuple(advice),
        verdict="warn" if advice else "ok",
    )


def _advice(context: ProbeContext, links: Topology, tcp: TcpSettings) -> list[str]:
    lines: list[str] = []
    own = links.site(context.own_site)
    for site in links.sites:
        if site.name == own.name:
            continue
        try:
            link = links.link(own.name, site.name)
        except UserError:  # the link is not described
            continue
        pairs = min(len(own.processes), len(site.processes))
        name = f"link {own.name}-{site.name} (host {context.own_host})"
        streams = pairs * nccl_sockets(os.environ)
        lines += link_advice(name, link, streams, tcp, os.environ)
    return lines


def _compared(hosts: list[HostFigures]) -> list[HostFigures]:
    """Add advice to the hosts whose settings differ from those of most hosts of their site."""
    usual = {
        site: collections.Counter(_settings(each) for each in hosts if each.site == site)
        for site in {each.site for each in hosts}
    }
    compared = []
    for host in hosts:
        most = usual[host.site].most_common(1)[0][0]
        differing = [name for name, value in most if dict(_settings(host))[name] != value]
        if differing:
            line = f"host {host.host} differs from most of site {host.site}: {', '.join(differing)}"
            advice = (*host.advice, line)
            host = host.model_copy(update={"advice": advice, "verdict": "warn"})
        compared.append(host)
    return compared


def _settings(host: HostFigures) -> tuple[tuple[str, object], ...]:
    fields = host.model_dump(exclude={"site", "host", "advice", "verdict"})
    return tuple(fields.items())
