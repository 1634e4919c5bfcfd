"""The messages from one peer that have been asked for, and the connections over which they come."""

import itertools
import socket
import threading
from collections.abc import Callable, Sequence

import jax

from geojax.transport.handshake import PeerRoute, Refused, open_channel
from geojax.transport.host_memory import ArrivingShards, size_of
from geojax.transport.sending import MOST_VIEWS, PIECE_HEADER
from geojax.transport.tcp import shut

_ATTEMPT_SECONDS = 3.0
_PAUSE_SECONDS = 0.3
"""Between two attempts, where one fails at once."""


class Arriving:
    """A message that has been asked for.

    Args:
        shapes: shape, dtype and device of each shard.
        arrived: called with the shards, on their devices, when all are here.
    """

    def __init__(
        self,
        shapes: Sequence[jax.ShapeDtypeStruct],
        arrived: Callable[[list[jax.Array]], None],
    ):
        self.missing = size_of(shapes)
        """Bytes that have not come."""
        self.arrived = arrived
        self._shapes = shapes
        self._shards: ArrivingShards | None = None

    @property
    def shards(self) -> ArrivingShards:
        """Memory of the message, which it takes when its first bytes come."""
        if self._shards is None:
            self._shards = ArrivingShards(self._shapes)
        return self._shards


class Inbox:
    """Messages from one peer that have been asked for and are not here."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._arriving: dict[int, Arriving] = {}

    def expect(self, message: int, arriving: Arriving) -> None:
        """Take the pieces of a message from now on."""
        with self._lock:
            assert message not in self._arriving, "a message is fetched once"
            self._arriving[message] = arriving

    def place(self, message: int, offset: int, count: int) -> list[memoryview]:
        """Return the memory for a piece.

        Raises:
            Refused: nobody has asked for it.
        """
        with self._lock:
            arriving = self._arriving.get(message)
            if arriving is None or not 0 <= offset <= offset + count <= arriving.shards.bytes.size:
                raise Refused("it sends what it was not asked for")
            return arriving.shards.bytes.part(offset, count)

    def took(self, message: int, count: int) -> None:
        """Count the bytes of a piece that is here; hand its message over if that is whole now.

        Raises:
            RuntimeError: the devices have no room for it.
        """
        with self._lock:
            if (arriving := self._arriving.get(message)) is None:  # the link is closed by now
                return
            arriving.missing -= count
            if arriving.missing:
                return
            del self._arriving[message]
        arriving.arrived(arriving.shards.on_devices())

    def close(self) -> None:
        """Expect nothing any more."""
        with self._lock:
            self._arriving.clear()


class IncomingChannel:
    """A channel from a peer, and the thread that opens it, again and again, and receives over it.

    Args:
        channel: its number, the same at the peer.
        route: way to the peer.
        inbox: messages that have been asked for.
        over: set when the peer has finished or is lost.
        heard: called when bytes have come.
        failed: called with the reason if the peer breaks a rule, or a message finds no room.
    """

    def __init__(
        self,
        channel: int,
        route: PeerRoute,
        inbox: Inbox,
        over: threading.Event,
        heard: Callable[[], None],
        failed: Callable[[str], None],
    ):
        self._channel, self._route, self._inbox = channel, route, inbox
        self._over, self._heard, self._failed = over, heard, failed
        self._received = 0
        """Bytes that have come over all connections."""
        self._header = bytearray(PIECE_HEADER.size)
        self._piece: tuple[int, int] | None = None
        """Message and bytes of the piece that comes; None: its header comes."""
        self._missing = [memoryview(self._header)]
        """Memory of the next bytes."""
        self._lock, self._closed = threading.Lock(), threading.Event()
        self._connection: socket.socket | None = None
        self._thread = threading.Thread(target=self._run, name="geojax receiver", daemon=True)
        self._thread.start()

    def open_anew(self) -> None:
        """Give up the connection that there is, over which nothing may come any more."""
        with self._lock:
            if self._connection is not None:
                shut(self._connection)

    def stop(self) -> None:
        """Open no connection any more, and end the one that there is."""
        self._closed.set()
        self.open_anew()

    def close(self) -> None:
        """End the connection and the thread, and let go of what has come in part."""
        self.stop()
        self._thread.join()
        self._missing.clear()

    def _run(self) -> None:
        for number in itertools.count(1):
            if self._closed.is_set() or self._over.is_set():
                return
            received = self._received
            try:
                connection, _ = open_channel(
                    self._route, self._channel, number, received, _ATTEMPT_SECONDS
                )
                with self._lock:
                    self._connection = connection
                    if self._closed.is_set():
                        shut(connection)
                self._receive(connection)
            except (OSError, Refused):  # the control connection knows when the peer is lost
                pass
            finally:
                with self._lock:
                    if self._connection is not None:
                        self._connection.close()
                        self._connection = None
            if self._received == received:
                self._closed.wait(_PAUSE_SECONDS)

    def _receive(self, connection: socket.socket) -> None:
        while True:
            count = connection.recvmsg_into(self._missing[:MOST_VIEWS], 0, socket.MSG_WAITALL)[0]
            if not count:
                return
            self._received += count
            self._heard()
            self._take(count)

    def _take(self, count: int) -> None:
        """Count bytes that have come; where they end a header or a piece, go on to the next."""
        while self._missing and count >= self._missing[0].nbytes:
            count -= self._missing.pop(0).nbytes
        if self._missing:
            self._missing[0] = self._missing[0][count:]
            return
        try:
            if self._piece is None:
                message, offset, count = PIECE_HEADER.unpack(self._header)
                self._missing = self._inbox.place(message, offset, count)
                self._piece = message, count
            if not self._missing:
                self._inbox.took(*self._piece)
                self._piece, self._missing = None, [memoryview(self._header)]
        except (Refused, RuntimeError) as error:
            self._closed.set()
            self._failed(str(error).partition("\n")[0])
            raise Refused(str(error)) from None
