"""Endpoints: how each process tells the others where it is, signed with the run's key."""

import hmac
import ipaddress
import json
import os
import secrets
import socket
from typing import NamedTuple

from geojax.errors import UserError

_SIGNATURE_BYTES = 16


class Endpoint(NamedTuple):
    """Everything that peers need to reach a process."""

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

    def signed(self, key: bytes) -> str:
        """Return the endpoint as text with a signature."""
        text = json.dumps(self, separators=(",", ":"))
        return f"{_signature(key, text)}{text}"

    @classmethod
    def verified(cls, text: str | None, key: bytes, who: str) -> "Endpoint":
        """Return the endpoint that another process has signed.

        Raises:
            UserError: it has another key.
        """
        text = text or ""
        signature, facts = text[: 2 * _SIGNATURE_BYTES], text[2 * _SIGNATURE_BYTES :]
        if not hmac.compare_digest(signature.encode(), _signature(key, facts).encode()):
            raise UserError(
                f"transport: {who} has another key than this process; give all sites the same key"
            )
        return cls(*json.loads(facts))


def _signature(key: bytes, text: str) -> str:
    return hmac.digest(key, text.encode(), "sha256")[:_SIGNATURE_BYTES].hex()


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
