"""Two sites as network namespaces on a bridge: a cut drops packets, and no end is told of it.

`geojax wan cut` takes the devices of both ends down, of which their hosts know; here the port of
one site is taken from the bridge, as where a provider's network fails.
"""

import contextlib
import time
from collections.abc import Iterator
from typing import NamedTuple

from geojax.wan import require_namespaces
from geojax.wan.namespaces import call, remove


class BridgedSites(NamedTuple):
    """Two sites and the bridge between them, each a network namespace."""

    bridge: str
    namespaces: tuple[str, str]
    addresses: tuple[str, str] = ("10.77.0.1", "10.77.0.2")

    def command_prefix(self, site: int) -> list[str]:
        """Words before a command that runs in a site."""
        return ["ip", "netns", "exec", self.namespaces[site]]

    def cut(self) -> None:
        """Drop all packets between the sites from now on."""
        call("ip", "-n", self.bridge, "link", "set", "port1", "down")

    def restore(self) -> None:
        """Let packets pass again."""
        call("ip", "-n", self.bridge, "link", "set", "port1", "up")

    def cut_for(self, seconds: float) -> None:
        """Cut the link for so long."""
        self.cut()
        time.sleep(seconds)
        self.restore()


@contextlib.contextmanager
def bridged_sites(name: str) -> Iterator[BridgedSites]:
    """Make two sites, and remove them at the end; needs root.

    Args:
        name: of the namespaces, before their own.

    Raises:
        UserError: this user or machine cannot make them.
    """
    require_namespaces()
    sites = BridgedSites(f"{name}.bridge", (f"{name}.east", f"{name}.west"))
    try:
        call("ip", "netns", "add", sites.bridge)
        call("ip", "-n", sites.bridge, "link", "add", "bridge", "type", "bridge")
        call("ip", "-n", sites.bridge, "link", "set", "bridge", "up")
        for site, (namespace, address) in enumerate(
            zip(sites.namespaces, sites.addresses, strict=True)
        ):
            call("ip", "netns", "add", namespace)
            call("ip", "-n", namespace, "link", "set", "lo", "up")
            ends = ["ip", "-n", sites.bridge, "link", "add", f"port{site}", "type", "veth", "peer"]
            call(*ends, "name", "eth0", "netns", namespace)
            call("ip", "-n", sites.bridge, "link", "set", f"port{site}", "master", "bridge", "up")
            call("ip", "-n", namespace, "address", "add", f"{address}/24", "dev", "eth0")
            call("ip", "-n", namespace, "link", "set", "eth0", "up")
        yield sites
    finally:
        for namespace in (*sites.namespaces, sites.bridge):
            remove(namespace)
