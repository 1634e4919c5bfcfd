"""The port at which the peers of a process open all their connections, for the whole run."""

import socket
from collections.abc import Callable

from geojax.errors import UserError
from geojax.transport.handshake import ChannelHello, Handshakes, Party, Refused, read_hello
from geojax.transport.tcp import listen, serve, shut


class PeerListener:
    """A listening port; what strangers send there is ignored.

    Args:
        address: address that peers reach; port 0 for any.
        key: key of the run.

    Raises:
        UserError: this process cannot listen there.
    """

    def __init__(self, address: tuple[str, int], key: bytes):
        try:
            self._socket = listen(address)
        except OSError as error:
            host, port = address
            where, ports = (
                (
                    f"{host}, port {port}",
                    ", and set GEOJAX_ISLANDS_PORT to the first of several free ports",
                )
                if port
                else (host, "")
            )
            raise UserError(
                f"transport: cannot listen at {where} ({error.strerror or error}); give the "
                f"address of this host's tunnel to the other sites{ports}"
            ) from None
        self.address: tuple[str, int] = (address[0], self._socket.getsockname()[1])
        """Address and port that peers reach."""
        self._key = key
        self._handshakes = Handshakes()
        self._peers: dict[tuple[int, int], Party] = {}
        """The start of each peer that may connect, by group and process."""
        self._adopts: dict[tuple[int, int], Callable[[socket.socket, ChannelHello], None]] = {}

    def expect(self, peer: Party, adopt: Callable[[socket.socket, ChannelHello], None]) -> None:
        """Give each connection that a peer opens to `adopt`, and refuse its earlier starts.

        Args:
            peer: a start of a peer.
            adopt: takes a connection, or raises `Refused` or `OSError`.
        """
        self._adopts[peer.group, peer.process] = adopt
        self._peers[peer.group, peer.process] = peer

    def forget(self, group: int) -> None:
        """Refuse the connections of all peers of a group from now on."""
        self._peers = {place: peer for place, peer in self._peers.items() if place[0] != group}

    def serve(self, own: Party) -> None:
        """Accept connections from now on."""
        self._own = own
        serve(self._socket, self._admit)

    def close(self) -> None:
        """Take no more connections."""
        shut(self._socket)
        self._socket.close()

    def _admit(self, connection: socket.socket) -> None:
        try:
            with self._handshakes.room_for(connection):
                hello = read_hello(connection, self._key, self._own, self._peers)
            self._adopts[hello.group, hello.process](connection, hello)
        except (OSError, Refused):
            connection.close()
