"""Names in a network: sites, hosts, and hosts with a port.

Each is checked where it is read, from a file, a variable or an argument: site names become folders
and words of commands, hosts become arguments of ssh.
"""

import ipaddress
import re
import socket
from typing import Annotated, NamedTuple

from pydantic import AfterValidator, Field

_LONGEST_LABEL = 63
_LONGEST_NAME = 253

LAST_PORT = 65_535
"""The highest TCP port."""

Port = Annotated[int, Field(ge=1, le=LAST_PORT)]
"""A TCP port."""


def _checked_site(name: str) -> str:
    # Digits alone are the folder of a step, and to the launcher a number of sites.
    allowed = rf"[A-Za-z0-9_][A-Za-z0-9_-]{{0,{_LONGEST_LABEL - 1}}}"
    if not re.fullmatch(allowed, name) or name.isdecimal():
        raise ValueError(
            f"{name[:80]!r} is no name of a site; give 1 to {_LONGEST_LABEL} ASCII letters, "
            "digits, '-' and '_', no '-' at the beginning, and not digits alone"
        )
    return name


SiteName = Annotated[str, AfterValidator(_checked_site)]
"""Name of a site."""


def is_site_name(name: str) -> bool:
    """Return True if a site may be called `name`."""
    try:
        return _checked_site(name) == name
    except ValueError:
        return False


def checked_ssh_host(host: str) -> str:
    """Return a host as ssh knows it.

    Raises:
        ValueError: it is none.
    """
    # It is an argument of ssh, which takes a first '-' for an option.
    if not re.fullmatch(r"([A-Za-z0-9_.][^\s@]*@)?[A-Za-z0-9_.:\[][^\s@]*", host):
        raise ValueError(
            f"{host[:80]!r} is no host for ssh; give a name or an address, such as east1 or "
            "me@10.1.0.1"
        )
    return host


SshHost = Annotated[str, AfterValidator(checked_ssh_host)]
"""Host as ssh knows it: `east1`, `me@10.1.0.1`."""


class HostPort(NamedTuple):
    """A host, by name or address, and a TCP port there."""

    host: str
    """Name or address, without brackets."""
    port: int

    @classmethod
    def parse(cls, text: str) -> "HostPort":
        """Read host:port; an IPv6 address is in brackets.

        Raises:
            ValueError: it is none.
        """
        host, colon, port = text.rpartition(":")
        if not colon or not host:
            raise ValueError(f"{text[:80]!r} is no host:port; give one, such as 10.1.0.1:61440")
        if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= LAST_PORT:
            raise ValueError(f"{text[:80]!r}: its port is no number from 1 to {LAST_PORT}")
        if host.startswith("[") and host.endswith("]"):
            return cls(str(_ipv6(host[1:-1])), int(port))
        if ":" in host:
            raise ValueError(
                f"{text[:80]!r}: an IPv6 address goes in brackets, such as [fd00::1]:61440"
            )
        return cls(_checked_host(host), int(port))

    def __str__(self) -> str:
        """Return host:port, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def _ipv6(text: str) -> ipaddress.IPv6Address:
    try:
        return ipaddress.IPv6Address(text)
    except ValueError:
        raise ValueError(f"{text[:80]!r} is no IPv6 address") from None


def _checked_host(host: str) -> str:
    if ":" in host:
        try:
            return str(_ipv6(host))
        except ValueError:
            raise ValueError(
                f"{host[:80]!r} is neither a host's name nor its address; give one without a port"
            ) from None
    labels = host.removesuffix(".").split(".")
    if re.fullmatch("[0-9]+", labels[-1]):  # no domain is a number: such a host is an address
        try:
            return str(ipaddress.IPv4Address(host))
        except ValueError:
            raise ValueError(
                f"{host[:80]!r} is no IPv4 address; give four numbers from 0 to 255, or a name"
            ) from None
    label = re.compile(rf"[A-Za-z0-9_]([A-Za-z0-9_-]{{0,{_LONGEST_LABEL - 2}}}[A-Za-z0-9_])?")
    if len(host) > _LONGEST_NAME or not all(map(label.fullmatch, labels)):
        raise ValueError(
            f"{host[:80]!r} is no host's name; give ASCII letters, digits and '-', with a dot "
            f"after at most {_LONGEST_LABEL} of them, or an address"
        )
    return host


def _checked_host_port(text: str) -> str:
    return str(HostPort.parse(text))


Host = Annotated[str, AfterValidator(_checked_host)]
"""Name or address of a host; an IPv6 address without brackets."""

HostAndPort = Annotated[str, AfterValidator(_checked_host_port)]
"""host:port, as `HostPort.parse` reads it."""


def address_of(host: str) -> str:
    """Return the address of `host` as this machine knows it, that of IPv4 if it has both.

    Raises:
        OSError: it has none.
    """
    found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    found.sort(key=lambda entry: entry[0] != socket.AF_INET)
    return str(found[0][4][0])


def is_loopback(host: str) -> bool:
    """Return True if `host`, a name or an address, leads only to the machine that asks."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)
