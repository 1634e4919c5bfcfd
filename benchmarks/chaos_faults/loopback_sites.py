"""Sites that share this machine's loopback, on which nothing but a connection can be broken."""

from typing import NamedTuple

from support.ports import free_port

from chaos_faults.traffic_of_sites import reset_connections


class LoopbackSites(NamedTuple):
    """Sites with a loopback address each."""

    addresses: tuple[str, ...]
    coordinators: tuple[str, ...]
    """host:port of each site, at which other sites start."""
    ports: tuple[int, ...]
    """Port at which each site is reached by others."""

    def command_prefix(self, site: int) -> list[str]:
        """Words before a command that runs in a site."""
        return []

    def restore(self) -> None:
        """Let all packets pass, as they always do."""

    def limit_rate(self, site: int, bits_per_second: float) -> None:
        """Let a site send as fast as it can, as it always does."""

    def reset(self, site: int, other: int) -> int:
        """Reset all connections to one of two sites; return their number."""
        return sum(reset_connections(self.addresses[end]) for end in (site, other))


def loopback_sites(count: int) -> LoopbackSites:
    """Choose addresses and ports of so many sites, none of which others use on this machine."""
    addresses = tuple(f"127.0.0.{site + 2}" for site in range(count))
    coordinators = tuple(f"{address}:{free_port()}" for address in addresses)
    return LoopbackSites(addresses, coordinators, tuple(free_port() for _ in addresses))
