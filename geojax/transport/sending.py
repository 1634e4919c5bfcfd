"""The messages to one peer, cut into pieces over its connections.

A message is sent when it has been offered, is computed, and the peer has asked for it, in either
order. Each connection takes the next piece when it has room for one, so that none waits for a
slower one. The message that lacks the fewest bytes goes first: a small one never waits for a large
one that began before, and of equal ones one is there before the next begins.

    piece: identifier of the message, offset of the piece in it, bytes of the piece, then these

The bytes of a channel are numbered over all connections that it has had. Who opens it anew says how
many have come, and the sender goes on from there: it keeps a message until it is acknowledged.
"""

import itertools
import socket
import struct
import threading
from collections import deque
from typing import NamedTuple

from geojax.transport.handshake import ChannelHello, PeerRoute, Refused, confirm
from geojax.transport.host_memory import HostBytes
from geojax.transport.tcp import shut
from geojax.transport.yielding import UrgentTraffic

PIECE_HEADER = struct.Struct("!QQQ")
MOST_VIEWS = 512
"""Places in memory that one call sends or fills; Linux takes twice as many."""


class Outbox:
    """Messages for one peer that are computed and not acknowledged.

    Args:
        piece_bytes: most bytes of a piece.
        urgent: traffic of all links for which messages that yield wait.
    """

    def __init__(self, piece_bytes: int, urgent: UrgentTraffic):
        self.changed = threading.Condition()
        self.piece_bytes, self.urgent = piece_bytes, urgent
        self._closed = False
        self._asked: set[int] = set()
        self._computed: dict[int, HostBytes] = {}
        self._rest: dict[int, int] = {}
        """Bytes that are in no piece yet, of each message that is asked for and computed."""
        self._yielding: set[int] = set()
        """Messages that wait while others of any link are to be sent."""
        self._spare = 0
        """Bytes of them that may go yet without another look: a message may be smaller."""

    def ask(self, message: int) -> None:
        """Note that the peer has asked for a message."""
        with self.changed:
            if self._closed:
                return
            self._asked.add(message)
            self._begin(message)

    def computed(self, message: int, content: HostBytes, *, yields: bool = False) -> None:
        """Note that a message is computed; one that yields goes when no other is to be sent."""
        with self.changed:
            if self._closed:
                return
            if yields:
                self._yielding.add(message)
            self._computed[message] = content
            self._begin(message)

    def forget(self, message: int) -> None:
        """Let go of a message that the peer has."""
        with self.changed:
            self._asked.discard(message)
            self._computed.pop(message, None)
            self._yielding.discard(message)

    def withdraw(self, message: int) -> bool:
        """Let go of a message unless the peer has asked for it; return True if it had not."""
        with self.changed:
            if message in self._asked:
                return False
            self._computed.pop(message, None)
            self._yielding.discard(message)
            return True

    def next_piece(self, connection: socket.socket) -> tuple[int, int, int] | None:
        """Return message, offset and bytes of a piece to send over a connection; None: nothing."""
        most, ready = self.piece_bytes, self._rest.keys() - self._yielding
        if ready or not self._rest or self.urgent.waits():
            self._spare = 0
        if not self._rest:
            return None
        if not ready:
            self._spare = self._spare or self.urgent.spare_bytes(connection)
            most = min(most, self._spare)
        if not most:
            return None
        message = min(ready or self._rest, key=self._rest.__getitem__)
        rest = self._rest[message]
        count = min(rest, most)
        if message in self._yielding:
            self._spare -= count
        else:
            self.urgent.add(-count)
        if rest == count:
            del self._rest[message]
        else:
            self._rest[message] = rest - count
        return message, self._computed[message].size - rest, count

    def patience(self, connection: socket.socket | None) -> float | None:
        """Return the seconds until a message that yields may go; None: there is none."""
        if connection is None or not self._yielding & self._rest.keys():
            return None
        return self.urgent.patience()

    def content(self, message: int) -> HostBytes | None:
        """Return the bytes of a message; None: the peer has it."""
        return self._computed.get(message)

    def close(self) -> None:
        """Let go of all messages, and take no more."""
        with self.changed:
            self._closed = True
            rest = self._rest.items()
            self.urgent.add(-sum(size for each, size in rest if each not in self._yielding))
            for messages in (self._asked, self._computed, self._rest, self._yielding):
                messages.clear()
            self.changed.notify_all()

    def _begin(self, message: int) -> None:
        if message in self._asked and message in self._computed:
            size = self._rest[message] = self._computed[message].size
            if message not in self._yielding:
                self.urgent.add(size)
            self.changed.notify_all()


class _PieceOfChannel(NamedTuple):
    start: int
    """Number of its first byte in the channel."""
    message: int
    offset: int
    size: int

    @property
    def end(self) -> int:
        return self.start + PIECE_HEADER.size + self.size


class OutgoingChannel:
    """A channel to a peer, which the peer opens, and the thread that sends over it.

    Args:
        outbox: messages for the peer.
        route: way to the peer.
    """

    def __init__(self, outbox: Outbox, route: PeerRoute):
        self._outbox, self._route = outbox, route
        self._adopting = threading.Lock()
        self._number, self._closed = 0, False
        self._adopted: tuple[socket.socket, int] | None = None
        """A new connection, and the bytes that have come there over earlier ones."""
        self._connection: socket.socket | None = None
        self._sent: deque[_PieceOfChannel] = deque()
        self._unsent: deque[_PieceOfChannel] = deque()
        self._cursor, self._end = 0, 0
        """Numbers of the next byte to send and of the first one that is in no piece yet."""
        self._thread = threading.Thread(target=self._run, name="geojax sender", daemon=True)
        self._thread.start()

    def adopt(self, connection: socket.socket, hello: ChannelHello) -> None:
        """Send over a connection that the peer has opened, instead of earlier ones.

        Raises:
            Refused: a later one is there, or this side has closed.
            OSError: it has ended.
        """
        with self._adopting:
            with self._outbox.changed:
                if hello.number <= self._number or self._closed:
                    raise Refused("there is a later connection")
                if not self._first_kept <= hello.received <= self._end:
                    raise Refused("it has bytes that were not sent")
                self._number = hello.number
            confirm(connection, self._route.key, hello, 0, self._route.silence_seconds)
            with self._outbox.changed:
                if self._closed:
                    raise Refused("this side has closed")
                if self._connection is not None:
                    shut(self._connection)
                if self._adopted is not None:
                    self._adopted[0].close()
                self._adopted = connection, hello.received
                self._outbox.changed.notify_all()

    @property
    def sockets(self) -> list[socket.socket]:
        """The connection to the peer, if there is one."""
        connection = self._connection
        return [] if connection is None else [connection]

    def stop(self) -> None:
        """Take no connection any more, and end the one that there is."""
        with self._outbox.changed:
            self._closed = True
            if self._connection is not None:
                shut(self._connection)
            if self._adopted is not None:
                self._adopted[0].close()
                self._adopted = None
            self._outbox.changed.notify_all()

    def close(self) -> None:
        """End the connection and the thread."""
        self.stop()
        self._thread.join()

    def _run(self) -> None:
        while self._send():
            pass

    def _send(self) -> bool:
        """Send some bytes as soon as there are any; return False at the end."""
        if (work := self._next()) is None:
            return False
        connection, views = work
        try:
            count = connection.sendmsg(views)
        except OSError:  # the peer opens another
            with self._outbox.changed:
                self._drop()
        else:
            with self._outbox.changed:
                self._advance(count)
        return True

    def _next(self) -> tuple[socket.socket, list[memoryview]] | None:
        """Wait for a connection and bytes to send over it; return None at the end."""
        with self._outbox.changed:
            while not self._closed:
                if self._adopted is not None:
                    self._drop()
                    self._connection, received = self._adopted
                    self._outbox.urgent.watch(self._connection)
                    self._adopted = None
                    self._go_on_from(received)
                connection = self._connection
                if connection is not None and (self._unsent or self._take_piece(connection)):
                    return connection, self._views(self._unsent[0])
                self._outbox.changed.wait(self._outbox.patience(connection))
            self._drop()
        return None

    def _take_piece(self, connection: socket.socket) -> bool:
        while self._sent and self._outbox.content(self._sent[0].message) is None:
            self._sent.popleft()
        if (piece := self._outbox.next_piece(connection)) is None:
            return False
        self._unsent.append(_PieceOfChannel(self._end, *piece))
        self._end = self._unsent[-1].end
        return True

    def _views(self, piece: _PieceOfChannel) -> list[memoryview]:
        sent = self._cursor - piece.start
        content = self._outbox.content(piece.message)
        assert content is not None, "a message is kept until it is acknowledged"
        header = memoryview(PIECE_HEADER.pack(piece.message, piece.offset, piece.size))
        sent_content = max(0, sent - PIECE_HEADER.size)
        views = content.part(piece.offset + sent_content, piece.size - sent_content)
        return (
            [header[sent:], *views][:MOST_VIEWS] if sent < PIECE_HEADER.size else views[:MOST_VIEWS]
        )

    def _advance(self, count: int) -> None:
        self._cursor += count
        if self._cursor == self._unsent[0].end:
            self._sent.append(self._unsent.popleft())

    def _go_on_from(self, received: int) -> None:
        pieces = [*self._sent, *self._unsent]
        self._sent.clear()
        self._unsent = deque(piece for piece in pieces if piece.end > received)
        self._cursor = received

    @property
    def _first_kept(self) -> int:
        pieces = [*itertools.islice(self._sent, 1), *itertools.islice(self._unsent, 1)]
        return pieces[0].start if pieces else self._end

    def _drop(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
