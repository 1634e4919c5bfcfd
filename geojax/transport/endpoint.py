"""Endpoints: how each process tells the others where it is."""

import ipaddress
import json
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
    host: str
    """Address of the process, as other hosts reach it."""
    port: int
    """The only one of the process that others reach."""
    settings: str
    """Digests of what must be the same at all sites (`geojax.transport.shared_settings`)."""

    @property
    def address(self) -> tuple[str, int]:
        """Address and port."""
        return self.host, self.port

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
