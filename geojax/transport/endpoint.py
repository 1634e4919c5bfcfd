"""Endpoints: how each process tells the others where it is."""

import ipaddress
import json
import os
import secrets
import socket
from typing import NamedTuple

from geojax.errors import UserError


class Endpoint(NamedTuple):
    """Everything that peers need to reach a process.

    It goes through the rendezvous, which believes only processes of this start that have the key.
    """

    site: int
    process: int
    """Index of the process in its site."""
    nonce: str
    """New at every start."""
    network: str
    """Identifier of the process's network namespace: in the same one, peers need no guard."""
    engine: str
    """Loopback address of the process, chosen at random."""
    server_port: int
    control_port: int
    ports: list[int]
    """All ports at the loopback address."""
    guard_address: str
    """Address of the guard, as other hosts reach it."""
    guard_port: int
    settings: str
    """Digests of what must be the same at all sites (`geojax.transport.shared_settings`)."""

    @property
    def guard(self) -> tuple[str, int]:
        """Address and port of the guard."""
        return self.guard_address, self.guard_port

    def text(self) -> str:
        """Return the endpoint as text."""
        return json.dumps(self, separators=(",", ":"))

    @classmethod
    def parse(cls, text: str | None, who: str) -> "Endpoint":
        """Return the endpoint in another process's text.

        Raises:
            UserError: it is none.
        """
        try:
            return cls(*json.loads(text or ""))
        except (ValueError, TypeError):
            raise UserError(
                f"transport: {who} has joined without an endpoint; start it as an island too "
                "(dc.join=islands)"
            ) from None


def random_loopback() -> str:
    """Return an address in 127.0.0.0/8 that no other process uses, most probably."""
    return f"127.{1 + secrets.randbelow(254)}.{secrets.randbelow(256)}.{1 + secrets.randbelow(254)}"


def own_network() -> str:
    """Return the identifier of this process's network namespace among all machines."""
    with open("/proc/sys/kernel/random/boot_id") as boot:
        return f"{boot.read().strip()}/{os.stat('/proc/self/ns/net').st_ino}"


def address_towards(host: str, port: int) -> str:
    """Return the address of this host from which packets to `host` leave.

    Raises:
        UserError: no route, or no such name.
    """
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect(address)  # sends nothing
            return str(probe.getsockname()[0])
    except OSError as error:
        raise UserError(
            f"transport: no way to {host} ({error.strerror}); give the address of this host's "
            "tunnel to the other sites"
        ) from None


def require_private(address: str) -> None:
    """Refuse to listen where strangers are.

    Raises:
        UserError: the address is public, or stands for all addresses of the host.
    """
    found = ipaddress.ip_address(address)
    if found.is_unspecified or found.is_global or found.is_multicast:
        raise UserError(
            f"transport: {address} can be reached from the internet; listen at the address of a "
            "tunnel between the sites (WireGuard, IPsec) or at 127.0.0.1"
        )
