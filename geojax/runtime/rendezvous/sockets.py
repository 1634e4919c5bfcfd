"""Sockets of the rendezvous: where process 0 listens, and how many connections it may hold."""

import errno
import ipaddress
import resource
import socket
import time

from geojax.errors import RunError, UserError
from geojax.network_names import is_loopback

# The kernel cuts it to net.core.somaxconn; who finds the queue full tries again.
_BACKLOG = 4096
_RETRY_SECONDS = 0.5
# Files of process 0 other than the connections: those it has open and those that it will want.
_OTHER_FILES = 512
_FEWEST_OTHER_FILES = 64


def listen(host: str, port: int, deadline: float) -> list[socket.socket]:
    """Return listening sockets at the addresses of this machine that `host` stands for.

    Args:
        host: name or address; 0.0.0.0 or :: for every address of the machine.
        port: the port.
        deadline: when to stop asking what the name stands for, on the monotonic clock.

    Raises:
        UserError: the port is taken, or the address is none of this machine's.
        RunError: the name has no address until the deadline.
    """
    listeners: list[socket.socket] = []
    for family, address in _resolve(host, port, deadline):
        try:
            listener = socket.create_server(address, family=family, backlog=_BACKLOG)
        except OSError as error:
            if error.errno in (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT):
                continue
            for listener in listeners:
                listener.close()
            raise UserError(
                f"process 0 cannot listen on port {port} for the other processes "
                f"({error.strerror}); is another job running here? give the coordinator a free port"
            ) from None
        listener.setblocking(False)
        listeners.append(listener)
    if not listeners:
        raise UserError(
            f"the coordinator's address, {host}, is none of the host of process 0, "
            f"{socket.gethostname()}. Give an address of that host. If a network translates the "
            "address, set GEOJAX_BIND_ADDRESS to the address to listen on"
        )
    return listeners


def _resolve(host: str, port: int, deadline: float) -> list[tuple[socket.AddressFamily, tuple]]:
    while True:
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as error:
            if time.monotonic() < deadline:  # a pod's own name may come late
                time.sleep(_RETRY_SECONDS)
                continue
            raise RunError(
                f"the coordinator's name, {host}, has no address on the host of process 0, "
                f"{socket.gethostname()} ({error.strerror}): give one that all hosts know"
            ) from None
        return list(dict.fromkeys((entry[0], entry[4]) for entry in found))


def is_name_of_loopback(host: str) -> bool:
    """Return True if `host` is the name of a machine that the machine itself takes for loopback.

    On Debian a host's own name often leads to 127.0.1.1 there.
    """
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return host != "localhost" and is_loopback(host)
    return False


def keep_alive(connection: socket.socket) -> None:
    """Let the system close a connection whose other end is gone without a word."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, seconds in (("TCP_KEEPIDLE", 20), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if hasattr(socket, option):  # Linux
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), seconds)


def allow_connections(count: int) -> None:
    """Raise this process's limit of open files, so that it can hold `count` connections.

    JAX's coordination service, which takes over the port, needs as many.

    Raises:
        UserError: the system does not permit as many open files.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count + _OTHER_FILES
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return
    if hard != resource.RLIM_INFINITY and hard < wanted:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, wanted))
            return
        except (ValueError, OSError):
            wanted = hard
    if wanted < count + _FEWEST_OTHER_FILES:
        raise UserError(
            f"process 0 may open {hard} files, and {count} processes connect to it. Raise the "
            f"limit of its host to {count + _OTHER_FILES} (ulimit -Hn, or LimitNOFILE of the "
            "service that starts it)"
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
