"""Sites as network namespaces around a router: each way between two of them can be broken alone."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from chaos_faults.packet_drops import drop_packets
from chaos_faults.traffic_of_sites import reset_connections
from geojax.wan import require_namespaces
from geojax.wan.namespaces import call, inside, remove

_BURST_BYTES, _QUEUE_BYTES = 1 << 17, 1 << 22
_COORDINATOR_PORT, _PORT = 61439, 61400


class RoutedSites(NamedTuple):
    """Sites and the router between them, each a network namespace."""

    router: str
    namespaces: tuple[str, ...]
    addresses: tuple[str, ...]

    @property
    def coordinators(self) -> list[str]:
        """host:port of each site, at which other sites start."""
        return [f"{address}:{_COORDINATOR_PORT}" for address in self.addresses]

    @property
    def ports(self) -> list[int]:
        """Port at which each site is reached by others."""
        return [_PORT] * len(self.addresses)

    def command_prefix(self, site: int) -> list[str]:
        """Words before a command that runs in a site."""
        return ["ip", "netns", "exec", self.namespaces[site]]

    def drop(self, sender: int, receiver: int) -> None:
        """Drop all packets from one site to another, and tell nobody."""
        self._rule("add", sender, receiver)

    def cut(self, one: int, other: int) -> None:
        """Drop all packets between two sites."""
        self.drop(one, other)
        self.drop(other, one)

    def isolate(self, site: int) -> None:
        """Drop all packets from and to a site."""
        for other in range(len(self.namespaces)):
            if other != site:
                self.cut(site, other)

    def restore(self) -> None:
        """Let all packets pass again."""
        for sender in range(len(self.namespaces)):
            for receiver in range(len(self.namespaces)):
                with contextlib.suppress(Exception):  # most ways are not broken
                    self._rule("del", sender, receiver)

    def _rule(self, verb: str, sender: int, receiver: int) -> None:
        way = ["from", self.addresses[sender], "to", self.addresses[receiver]]
        number = str(100 + 10 * sender + receiver)
        call("ip", "-n", self.router, "rule", verb, "pref", number, *way, "blackhole")

    def limit_rate(self, site: int, bits_per_second: float) -> None:
        """Let a site send at this rate from now on."""
        shape = ["rate", f"{bits_per_second:.0f}bit", "burst", str(_BURST_BYTES)]
        place = ["qdisc", "replace", "dev", "eth0", "root", "handle", "1:", "tbf"]
        call("tc", "-n", self.namespaces[site], *place, *shape, "limit", str(_QUEUE_BYTES))

    def lose(self, site: int, share: float) -> Callable[[], None]:
        """Lose a share of the packets that a site sends; return what ends that."""
        return drop_packets(self.router, f"port{site}", share)

    def reset(self, site: int, other: int) -> int:
        """Reset all connections between two sites; return their number."""
        return reset_connections(self.addresses[other], self.command_prefix(site))


@contextlib.contextmanager
def routed_sites(name: str, count: int, bits_per_second: float) -> Iterator[RoutedSites]:
    """Make so many sites, each of which sends at a rate, and remove them at the end.

    Args:
        name: of the namespaces, before their own.
        count: number of sites.
        bits_per_second: the rate.

    Raises:
        UserError: this user or machine cannot make them.
    """
    require_namespaces()
    sites = RoutedSites(
        f"{name}.router",
        tuple(f"{name}.site{site}" for site in range(count)),
        tuple(f"10.78.{site}.1" for site in range(count)),
    )
    try:
        call("ip", "netns", "add", sites.router)
        with inside(sites.router):
            Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
        for site, namespace in enumerate(sites.namespaces):
            call("ip", "netns", "add", namespace)
            call("ip", "-n", namespace, "link", "set", "lo", "up")
            ends = ["ip", "-n", sites.router, "link", "add", f"port{site}", "type", "veth", "peer"]
            call(*ends, "name", "eth0", "netns", namespace)
            gate = f"10.78.{site}.254"
            call("ip", "-n", sites.router, "address", "add", f"{gate}/24", "dev", f"port{site}")
            call("ip", "-n", sites.router, "link", "set", f"port{site}", "up")
            address = f"{sites.addresses[site]}/24"
            call("ip", "-n", namespace, "address", "add", address, "dev", "eth0")
            call("ip", "-n", namespace, "link", "set", "eth0", "up")
            call("ip", "-n", namespace, "route", "add", "default", "via", gate)
            sites.limit_rate(site, bits_per_second)
        yield sites
    finally:
        for namespace in (*sites.namespaces, sites.router):
            remove(namespace)
