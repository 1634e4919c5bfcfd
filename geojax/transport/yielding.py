"""Messages that yield: they take of the links what no other message needs."""

import socket
import threading
import time
import weakref

from geojax.transport.tcp import TcpCounts, tcp_counts

LEAST_PIECE = 1 << 15
"""Bytes of the smallest piece. Another message waits for two and a quarter: 6 ms at 100 Mbit/s."""
_LOOK_SECONDS, _LONGEST_LOOK_SECONDS = 0.002, 0.02
"""Between two looks whether messages that yield may go: a third of the time since the last of their
bytes within these bounds. A look costs a tenth of a millisecond of a core."""
_PATHS = 1.25
"""Bytes in flight that are enough, in those that fill the path. More than one lets the measured
rate grow to the link's; what exceeds one waits in a router's queue, before others' bytes. A short
path counts as one that a piece fills, so that it is not empty from one look to the next."""


class UrgentTraffic:
    """The bytes of all links of a process for which messages that yield wait."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0
        self._yielded_at = time.monotonic()
        self._connections: weakref.WeakSet[socket.socket] = weakref.WeakSet()

    def add(self, count: int) -> None:
        """Count bytes that are to be handed to the kernel; a negative number of them was."""
        with self._lock:
            self._count += count

    def waits(self) -> bool:
        """Return True if bytes are to be handed to the kernel."""
        with self._lock:
            return self._count > 0

    def watch(self, connection: socket.socket) -> None:
        """Wait for what the kernel has not yet sent over a connection, too."""
        with self._lock:
            self._connections.add(connection)

    def spare_bytes(self, connection: socket.socket) -> int:
        """Return how many bytes that yield may go over a connection now.

        Bytes in the kernel cannot be called back. So there are few of them: none goes while the
        kernel holds others of any link, or while those on their way fill the path. No more go than
        fill it: TCP's rate is that of a round trip, and short bursts exceed the link's by far.
        """
        if self.waits():
            return 0
        with self._lock:
            counted = [tcp_counts(each) for each in self._connections]
        own = tcp_counts(connection) or TcpCounts()
        path = own.bytes_per_second * own.least_microseconds / 1e6
        room = int(_PATHS * max(path, LEAST_PIECE)) - own.segments_in_flight * own.segment_bytes
        if room < 0 or any(counts and counts.unsent_bytes for counts in counted):
            return 0
        self._yielded_at = time.monotonic()
        return max(LEAST_PIECE, min(room, int(2 * _LOOK_SECONDS * own.bytes_per_second)))

    def patience(self) -> float:
        """Return the seconds until the next look whether bytes that yield may go."""
        waited = time.monotonic() - self._yielded_at
        return min(max(waited / 3, _LOOK_SECONDS), _LONGEST_LOOK_SECONDS)
