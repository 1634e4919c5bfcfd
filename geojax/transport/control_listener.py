"""The port at which the peers of a process open their control connections, for the whole run."""

import contextlib
import socket
from collections.abc import Mapping

from geojax.transport.control import ControlConnection
from geojax.transport.control_handshake import Party, read_hello
from geojax.transport.guard import Handshakes, Refused, serve


class ControlListener:
    """A listening control port; what strangers send there is ignored.

    Args:
        address: loopback address of this process.
        key: key of the run.
    """

    def __init__(self, address: str, key: bytes):
        self._socket = socket.create_server((address, 0))
        self.port: int = self._socket.getsockname()[1]
        self._key = key
        self._handshakes = Handshakes()

    def serve(
        self, own: Party, peers: Mapping[int, Party], controls: Mapping[int, ControlConnection]
    ) -> None:
        """Give each connection that a peer opens to its control connection, from now on."""
        self._own, self._peers, self._controls = own, peers, controls
        serve(self._socket, self._admit)

    def close(self) -> None:
        """Take no more connections."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _admit(self, connection: socket.socket) -> None:
        try:
            with self._handshakes.room_for(connection):
                hello = read_hello(connection, self._key, self._own, self._peers)
            self._controls[hello.group].adopt(connection, hello)
        except (OSError, Refused):
            connection.close()
