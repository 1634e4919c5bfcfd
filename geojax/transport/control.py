"""The control connections with one peer: heartbeats, acknowledgments and the end of the run.

Each side opens a connection, over which it sends frames of eight bytes: heartbeats, identifiers of
messages that it asks for (even) and has fetched (the same, odd), and the end. The other side
answers each heartbeat with the number of other frames that have come so far, in eight bytes too.

Figures of a step go between the frames, and are not counted: what a cut takes is not sent again,
and newer ones replace those that nobody has sent yet. Notes are frames with content, and counted.

A side whose heartbeats are not answered for three seconds, or whose connection ends, opens it anew
until it succeeds: TCP itself sends later and later after a cut. What the other side has not counted
is sent again, so that no frame is lost or taken twice.
"""

import contextlib
import itertools
import os
import select
import socket
import struct
import threading
import time
from collections import deque
from collections.abc import Callable

from geojax.transport.handshake import (
    CONTROL,
    ChannelHello,
    PeerRoute,
    Refused,
    confirm,
    open_channel,
)
from geojax.transport.message_id import FIRST_ID

MOST_CONTENT_BYTES = 1024
"""Size of the largest figures or note that one side sends the other."""

_FRAME = struct.Struct("!Q")
_HEARTBEAT, _FINISHED, _FAILED = 0, 1, 2
_FIGURES, _NOTE = 3, 4
"""Frames before the number of bytes of figures or a note, and these in whole frames."""
HEARTBEAT_SECONDS = 1.0
"""Longest time from one heartbeat to the next."""
_ANSWER_SECONDS = 3.0
"""Time without an answer after which the connection is opened anew, and that of an attempt."""
_PAUSE_SECONDS = 0.3
"""Between two attempts, where one fails at once."""


def heartbeat_seconds(route: PeerRoute) -> float:
    """Return the time from one heartbeat to the next."""
    return min(HEARTBEAT_SECONDS, route.retry_seconds)


class ControlConnection:
    """This side's connection to a peer, and the peer's to this side.

    Args:
        route: way to the peer.
    """

    def __init__(self, route: PeerRoute):
        self.asked: Callable[[int], None] = lambda message: None
        """Called with the identifier of each message that the peer asks for."""
        self.acknowledged: Callable[[int], None] = lambda message: None
        """Called with the identifier of each message that the peer has fetched."""
        self.echoed: Callable[[float], None] = lambda seconds: None
        """Called with the seconds from each heartbeat to the peer's answer."""
        self.told: Callable[[bytes], None] = lambda figures: None
        """Called with the figures that the peer tells."""
        self.noted: Callable[[bytes], None] = lambda note: None
        """Called with each note of the peer, once and in their order."""
        self.reopened: Callable[[], None] = lambda: None
        """Called when this side has opened a connection anew, after a cut or a reset."""
        self.finished = False
        """The peer has said that it needs nothing more."""
        self.lost: str | None = None
        """Reason why the peer is lost; None: it is not."""
        self.over = threading.Event()
        """Set when the peer has finished or is lost."""
        self.problem: str | None = "no answer"
        """Reason why this side has no connection to the peer now; None: it has one."""
        self.reached, self.was_reached = threading.Event(), threading.Event()
        """Set when this side has first reached the peer, and the peer this side."""
        self._route, self._heard = route, time.monotonic()
        self._frames: deque[int | bytes] = deque()
        """Frames that the peer has not counted; bytes are a note."""
        self._counted = 0
        """Frames that it has."""
        self._figures: bytes | None = None
        """Figures that were not sent yet."""
        self._changed = threading.Condition()
        self._hurry, self._speaking, self._closed = False, True, threading.Event()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK)
        self._number, self._received = 0, 0
        """Number of the peer's connection, and of the frames that have come from it."""
        self._adopting = threading.Lock()
        self._incoming: socket.socket | None = None
        self._outgoing: socket.socket | None = None
        self._listener: threading.Thread | None = None
        self._speaker = threading.Thread(target=self._speak, name="geojax control", daemon=True)
        self._speaker.start()

    @property
    def silent_seconds(self) -> float:
        """Time since the last sign of the peer."""
        return time.monotonic() - self._heard

    def hear(self) -> None:
        """Note a sign of the peer that came another way."""
        self._heard = time.monotonic()

    def ask(self, message: int) -> None:
        """Ask the peer for a message."""
        self._say(message)

    def acknowledge(self, message: int) -> None:
        """Tell the peer that a message has been fetched."""
        self._say(message | 1)

    def tell(self, figures: bytes) -> None:
        """Tell the peer figures, soon or never: `MOST_CONTENT_BYTES` at most."""
        assert len(figures) <= MOST_CONTENT_BYTES, "figures of a step are few"
        with self._changed:
            if not self._closed.is_set():
                self._figures = figures
                os.eventfd_write(self._wake, 1)

    def note(self, content: bytes) -> None:
        """Send the peer a note of at most `MOST_CONTENT_BYTES`, which no cut takes."""
        assert len(content) <= MOST_CONTENT_BYTES, "a note is short"
        self._say(content)

    @property
    def sockets(self) -> list[socket.socket]:
        """The connection to the peer, if there is one."""
        connection = self._outgoing  # another thread sets it to None when the connection ends
        return [] if connection is None else [connection]

    def adopt(self, connection: socket.socket, hello: ChannelHello) -> None:
        """Listen to the peer over the connection that it has opened, instead of earlier ones.

        Raises:
            Refused: a later one is there, or this side has closed.
            OSError: it has ended.
        """
        with self._adopting:
            if hello.number <= self._number or self._closed.is_set():
                raise Refused("there is a later connection")
            self._stop_listening()
            self._number = hello.number
            confirm(connection, self._route.key, hello, self._received, self._route.silence_seconds)
            self._incoming = connection
            self._listener = threading.Thread(
                target=self._listen, args=(connection,), name="geojax control", daemon=True
            )
            self._listener.start()
        self.hear()
        self.was_reached.set()

    def say_goodbye(self, finished: bool) -> None:
        """Tell the peer that all is well, or else that this side has failed."""
        self._say(_FINISHED if finished else _FAILED, at_once=True)

    def close(self, seconds: float) -> None:
        """End both connections; wait at most so long for the peer to hear what was said."""
        with self._changed:
            self._changed.wait_for(
                lambda: not self._frames or self.lost is not None or not self._speaking, seconds
            )
            if self._closed.is_set():
                return
            self._closed.set()
            os.eventfd_write(self._wake, 1)
        self._speaker.join()
        with self._adopting:
            self._stop_listening()
        os.close(self._wake)

    def _say(self, frame: int | bytes, at_once: bool = False) -> None:
        with self._changed:
            if not self._closed.is_set():  # a message may arrive while this side closes
                self._frames.append(frame)
                self._hurry |= at_once
                os.eventfd_write(self._wake, 1)

    def _lose(self, reason: str) -> None:
        with self._changed:
            if not self.finished and self.lost is None:
                self.lost = reason
            self.over.set()
            self._changed.notify_all()

    def _speak(self) -> None:
        """Keep a connection to the peer open until the end of either side."""
        for number in itertools.count(1):
            if self._closed.is_set() or self.over.is_set():
                break
            try:
                connection, counted = open_channel(self._route, CONTROL, number, 0, _ANSWER_SECONDS)
            except ConnectionRefusedError:
                host, port = self._route.address
                self._lose(
                    f"it refuses connections at {host}:{port}, so that its process has ended"
                )
            except (OSError, Refused) as error:
                self.problem = _in_words(error)
                self._closed.wait(min(_PAUSE_SECONDS, self._route.retry_seconds))
            else:
                self.problem = None
                self.hear()
                if self.reached.is_set():
                    self.reopened()
                self.reached.set()
                with connection:
                    self._outgoing = connection
                    try:
                        self.problem = self._converse(connection, counted)
                    except OSError as error:
                        self.problem = _in_words(error)
                    self._outgoing = None
        with self._changed:
            self._speaking = False
            self._changed.notify_all()

    def _converse(self, connection: socket.socket, counted: int) -> str | None:
        """Send frames until this side closes or the connection is of no use; return the reason."""
        self._count(counted)
        connection.settimeout(_ANSWER_SECONDS)
        poll = select.poll()
        for readable in (connection.fileno(), self._wake):
            poll.register(readable, select.POLLIN)
        heartbeats: deque[float] = deque()
        sent, due, unread = counted, time.monotonic(), b""
        while not self._closed.is_set():
            now = time.monotonic()
            with self._changed:
                frames = list(itertools.islice(self._frames, sent - self._counted, None))
                hurry, self._hurry = self._hurry, False
                figures, self._figures = self._figures, None
            sent += len(frames)
            if hurry or now >= due:
                frames.append(_HEARTBEAT)
                heartbeats.append(now)
                due = now + heartbeat_seconds(self._route)
            if frames or figures is not None:
                pieces = [_packed(frame) for frame in frames]
                if figures is not None:
                    pieces.append(_with_content(_FIGURES, figures))
                connection.sendall(b"".join(pieces))
            patience = heartbeats[0] + _ANSWER_SECONDS - now if heartbeats else due - now
            events = dict(poll.poll(1e3 * max(0.0, min(due - now, patience))))
            if self._wake in events:
                os.eventfd_read(self._wake)
            if connection.fileno() in events:
                if not (piece := connection.recv(1 << 12)):
                    return "it has closed the connection"
                self.hear()
                counts, unread = _frames(unread + piece)
                for count in counts:
                    if not heartbeats:
                        return "it answers what it was not asked"
                    self.echoed(time.monotonic() - heartbeats.popleft())
                    self._count(count)
            elif heartbeats and time.monotonic() - heartbeats[0] > _ANSWER_SECONDS:
                return f"no answer for {_ANSWER_SECONDS:g} s"
        return None

    def _count(self, frames: int) -> None:
        """Forget the frames that the peer has."""
        with self._changed:
            while self._frames and self._counted < frames:
                self._frames.popleft()
                self._counted += 1
            self._changed.notify_all()

    def _listen(self, connection: socket.socket) -> None:
        unread = b""
        with contextlib.suppress(OSError, Refused), connection:  # the peer opens another
            while piece := connection.recv(1 << 16):
                self.hear()
                frames, unread = _frames_and_contents(unread + piece)
                for frame, content in frames:
                    if frame == _FIGURES:
                        self.told(content)
                    elif frame == _HEARTBEAT:
                        connection.sendall(_FRAME.pack(self._received))
                    else:
                        self._received += 1
                        self._act(frame, content)

    def _stop_listening(self) -> None:
        if self._incoming is not None and self._listener is not None:
            with contextlib.suppress(OSError):
                self._incoming.shutdown(socket.SHUT_RDWR)
            self._listener.join()
            self._incoming.close()

    def _act(self, frame: int, content: bytes) -> None:
        if frame >= FIRST_ID:
            (self.acknowledged if frame & 1 else self.asked)(frame & ~1)
        elif frame == _NOTE:
            self.noted(content)
        elif frame == _FINISHED:
            self.finished = True
            self.over.set()
        elif frame == _FAILED:
            self._lose("it has ended with an error")


def _frames(unread: bytes) -> tuple[list[int], bytes]:
    """Split what has come into frames and a rest."""
    whole = len(unread) // _FRAME.size * _FRAME.size
    return [frame for (frame,) in _FRAME.iter_unpack(unread[:whole])], unread[whole:]


def _packed(frame: int | bytes) -> bytes:
    """Return a frame as it is sent; bytes are a note."""
    return _with_content(_NOTE, frame) if isinstance(frame, bytes) else _FRAME.pack(frame)


def _with_content(frame: int, content: bytes) -> bytes:
    padding = bytes(-len(content) % _FRAME.size)
    return _FRAME.pack(frame) + _FRAME.pack(len(content)) + content + padding


def _frames_and_contents(unread: bytes) -> tuple[list[tuple[int, bytes]], bytes]:
    """Split what has come into frames, each with its content if it has one, and a rest.

    Raises:
        Refused: a content is too large.
    """
    found: list[tuple[int, bytes]] = []
    at, size = 0, _FRAME.size
    while at + size <= len(unread):
        (frame,) = _FRAME.unpack_from(unread, at)
        at += size
        if frame not in (_FIGURES, _NOTE):
            found.append((frame, b""))
            continue
        if at + size > len(unread):
            return found, unread[at - size :]
        (count,) = _FRAME.unpack_from(unread, at)
        if count > MOST_CONTENT_BYTES:
            raise Refused("its figures or its note are too large")
        begin = at + size
        end = begin + count + -count % size
        if end > len(unread):
            return found, unread[at - size :]
        found.append((frame, unread[begin : begin + count]))
        at = end
    return found, unread[at:]


def _in_words(error: Exception) -> str:
    if isinstance(error, TimeoutError):
        return "timed out"
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
