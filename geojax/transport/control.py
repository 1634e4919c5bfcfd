"""The control connection to one peer: heartbeats, acknowledgments and the end of the run.

A frame is eight bytes: an identifier of a message that has been fetched, or one of those below.
"""

import contextlib
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable

from geojax.transport.message_id import FIRST_ID

_FRAME = struct.Struct("!Q")
_HEARTBEAT, _FINISHED, _SEEN, _ECHO = 0, 1, 2, 3
_HEARTBEAT_SECONDS = 1.0
_GOODBYE_SECONDS = 5.0


class ControlConnection:
    """A control connection that is established.

    Args:
        connection: its socket.
        acknowledged: called with the identifier of each message that the peer has fetched.
        echoed: called with the seconds from each heartbeat to the peer's echo of it.
    """

    def __init__(
        self,
        connection: socket.socket,
        acknowledged: Callable[[int], None],
        echoed: Callable[[float], None],
    ):
        self._connection, self._acknowledged, self._echoed = connection, acknowledged, echoed
        self._heartbeat: float | None = None
        """Time of the heartbeat that the peer has not echoed; None: there is none."""
        self._outgoing: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._heard = time.monotonic()
        self.finished = False
        """The peer has said that it needs nothing more."""
        self.closed = threading.Event()
        """Set when the connection has ended."""
        self._seen = threading.Event()
        self._threads = [
            threading.Thread(target=each, daemon=True) for each in (self._send, self._receive)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def silent_seconds(self) -> float:
        """Time since the last sign of the peer."""
        return time.monotonic() - self._heard

    def acknowledge(self, message: int) -> None:
        """Tell the peer that a message has been fetched."""
        self._outgoing.put(message)

    def close(self, finished: bool) -> None:
        """End the connection; with `finished`, tell the peer that all is well."""
        if finished:
            self._outgoing.put(_FINISHED)
            self._seen.wait(_GOODBYE_SECONDS)
        self._outgoing.put(None)
        self._threads[0].join(_GOODBYE_SECONDS)
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        self._connection.close()

    def _send(self) -> None:
        due = time.monotonic() + _HEARTBEAT_SECONDS
        with contextlib.suppress(OSError):
            while True:
                try:
                    frame = self._outgoing.get(timeout=max(0.0, due - time.monotonic()))
                except queue.Empty:
                    due = time.monotonic() + _HEARTBEAT_SECONDS
                    frame = _HEARTBEAT
                    if self._heartbeat is None:
                        self._heartbeat = time.monotonic()
                if frame is None:
                    return
                self._connection.sendall(_FRAME.pack(frame))

    def _receive(self) -> None:
        unread = b""
        with contextlib.suppress(OSError):
            while piece := self._connection.recv(1 << 16):
                self._heard = time.monotonic()
                unread += piece
                whole = len(unread) // _FRAME.size * _FRAME.size
                for (frame,) in _FRAME.iter_unpack(unread[:whole]):
                    self._act(frame)
                unread = unread[whole:]
        self.closed.set()
        self._seen.set()

    def _act(self, frame: int) -> None:
        if frame >= FIRST_ID:
            self._acknowledged(frame)
        elif frame == _HEARTBEAT:
            self._outgoing.put(_ECHO)
        elif frame == _ECHO:
            if self._heartbeat is not None:
                self._echoed(time.monotonic() - self._heartbeat)
                self._heartbeat = None
        elif frame == _FINISHED:
            self.finished = True
            self._outgoing.put(_SEEN)
        elif frame == _SEEN:
            self._seen.set()
