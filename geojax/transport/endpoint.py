"""Endpoints: how each process tells the others where it is, and a site where all of its are."""

import base64
import binascii
import ipaddress
import json
import socket
import zlib
from collections.abc import Sequence
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


class ProcessOfSite(NamedTuple):
    """A process as its site presents it to others."""

    host: str
    """Name of its host."""
    endpoint: str
    """Text of its endpoint."""


_MOST_BYTES = 1 << 22
"""Size of the processes of the largest site as JSON."""


def as_text(processes: Sequence[ProcessOfSite]) -> str:
    """Return the processes of a site as one text, compressed: they differ in little."""
    text = json.dumps(processes, separators=(",", ":"))
    return base64.b64encode(zlib.compress(text.encode())).decode()


def processes_of(text: str | None, who: str) -> tuple[ProcessOfSite, ...]:
    """Return the processes in a site's text, in their order.

    Raises:
        UserError: it tells none.
    """
    try:
        stream = zlib.decompressobj()
        content = json.loads(
            stream.decompress(base64.b64decode(text or "", validate=True), _MOST_BYTES)
        )
        found = tuple(ProcessOfSite(*map(str, each)) for each in content)
    except (binascii.Error, zlib.error, ValueError, TypeError, RecursionError):
        found = ()
    if not found:
        raise UserError(
            f"transport: {who} does not say where its processes are; all sites need the same "
            "version of geojax, and dc.join=islands"
        )
    return found


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
