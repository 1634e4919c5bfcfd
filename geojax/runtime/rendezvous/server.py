"""The server of the rendezvous, in process 0: one thread, one selector, and no blocking call."""

import contextlib
import errno
import selectors
import socket
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import pydantic

from geojax.errors import MissingProcessesError, UserError
from geojax.runtime.rendezvous.messages import (
    OTHER_KEY,
    SAY_SECONDS,
    WHO_IS_MISSING,
    Everyone,
    Greeting,
    Hello,
    Presence,
    Verdict,
    Waits,
    fresh_for,
    longest_hello,
    missing_sentence,
    pack,
)
from geojax.runtime.rendezvous.signatures import (
    TO_CLIENT,
    TO_SERVER,
    derived_key,
    is_signed,
    new_nonce,
    signed,
    verified,
)
from geojax.runtime.rendezvous.sockets import (
    allow_connections,
    is_name_of_loopback,
    keep_alive,
    listen,
)
from geojax.runtime.rendezvous.strangers import OTHER_KEY as WITH_OTHER_KEY
from geojax.runtime.rendezvous.strangers import UNSIGNED, IgnoredHellos

_POLL_SECONDS = 1.0
# Time in which a new connection has to say which process it is.
_HELLO_SECONDS = 20.0
# New connections that have said nothing yet, beyond those of processes that are still to come; the
# oldest makes room for the next.
_MOST_STRANGERS = 256
_ACCEPTED_AT_ONCE = 256
# Time in which the verdict is sent to all, and in which those that have it close their connection.
_SEND_SECONDS = 20.0
_CLOSE_SECONDS = 1.0
_GONE_BEFORE_ACCEPTED = (errno.ECONNABORTED, errno.EINTR, errno.EPROTO)


class _Connection:
    """A connection, what it has sent and not been sent yet, and the process behind it."""

    def __init__(self, connected: socket.socket, address: str, now: float):
        self.socket = connected
        self.address = address
        self.accepted_at = now
        self.nonce = new_nonce()
        self.hello: Hello | None = None
        """Its signed hello; None: a stranger's connection, or that of a process to come."""
        self.unread = b""
        self.unsent = b""
        self.process: int | None = None
        """Process that has joined through it."""


class RendezvousServer:
    """The server in process 0, which waits for all others and tells each who is there."""

    def __init__(
        self,
        own: Hello,
        host: str,
        port: int,
        key: bytes,
        timeout_seconds: float,
        note: str | None,
        waits: Waits,
    ):
        self.own, self.key, self.note, self.waits = own, key, note, waits
        self.timeout_seconds = timeout_seconds
        self.joined = {0: own}
        self.ever_joined = {0}
        self.connections: dict[int, _Connection] = {}
        """Connections of the processes that have joined."""
        self.strangers: dict[_Connection, None] = {}
        """Connections of nobody yet, the oldest first."""
        self.ignored = IgnoredHellos()
        allow_connections(own.count)
        self.longest_hello = longest_hello(_MOST_STRANGERS + own.count)
        self.host, self.port = host, port
        self.listeners: list[socket.socket] = []
        self.listening_again_at: float | None = None
        self.decided = False
        """True once the verdict is known; nobody is listened to after that."""
        self.selector = selectors.DefaultSelector()

    def serve(self, deadline: float) -> Everyone:
        """Wait until all processes have joined; return the facts of each."""
        self.listeners = listen(self.host, self.port, deadline)
        for listener in self.listeners:
            self.selector.register(listener, selectors.EVENT_READ)
        try:
            say_at = time.monotonic() + SAY_SECONDS
            while len(self.joined) < self.own.count:
                if time.monotonic() >= deadline:
                    self.give_up()
                if time.monotonic() >= say_at:
                    self.waits(self.missing)
                    say_at = deadline
                self.wait(deadline)
            hellos = [self.joined[process] for process in range(self.own.count)]
            if problem := _disagreement(hellos):
                self.refuse(problem)
            nonce = new_nonce()
            self.tell_everyone(Verdict(everyone=pack(hellos, nonce), note=self.note))
            presences = [_presence(hello) for hello in hellos]
            return Everyone(presences, derived_key(self.key, nonce), self.note)
        finally:
            for listener in self.listeners:
                listener.close()
            for connection in [*self.connections.values(), *self.strangers]:
                connection.socket.close()
            self.selector.close()

    @property
    def missing(self) -> list[int]:
        """Processes that are not connected now."""
        return [process for process in range(self.own.count) if process not in self.joined]

    def wait(self, deadline: float) -> None:
        """Wait for what comes next, and act on it."""
        now = time.monotonic()
        if self.listening_again_at is not None and now >= self.listening_again_at:
            self.listening_again_at = None
            for listener in self.listeners:
                self.selector.register(listener, selectors.EVENT_READ)
        seconds = 0.05 if self.listening_again_at is not None else _POLL_SECONDS
        for key, events in self.selector.select(max(0.0, min(deadline - now, seconds))):
            if key.data is None:
                self.accept(key.fileobj)
            elif key.fd == key.data.socket.fileno():  # not closed by an event before it
                if events & selectors.EVENT_WRITE:
                    self.send(key.data, b"")
                if events & selectors.EVENT_READ:
                    self.receive(key.data)
        while self.strangers:
            oldest = next(iter(self.strangers))
            if now - oldest.accepted_at < _HELLO_SECONDS:
                break
            self.disconnect(oldest)

    def accept(self, listener: Any) -> None:
        """Accept the connections that wait; without files for more, make room or wait."""
        for _ in range(_ACCEPTED_AT_ONCE):
            try:
                accepted, address = listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno in _GONE_BEFORE_ACCEPTED:
                    continue
                if self.strangers:
                    self.disconnect(next(iter(self.strangers)))
                    continue
                self.pause_listening()
                return
            accepted.setblocking(False)
            keep_alive(accepted)
            connection = _Connection(accepted, address[0], time.monotonic())
            self.strangers[connection] = None
            self.selector.register(accepted, selectors.EVENT_READ, connection)
            if len(self.strangers) > _MOST_STRANGERS + self.own.count - len(self.joined):
                self.disconnect(next(iter(self.strangers)))
            self.send(connection, Greeting(nonce=connection.nonce).line())

    def pause_listening(self) -> None:
        """Leave new connections in the system's queue for a moment."""
        for listener in self.listeners:
            self.selector.unregister(listener)
        self.listening_again_at = time.monotonic() + 0.2

    def receive(self, connection: _Connection) -> None:
        """Read from a connection; close it when its other end did, or is no process of ours."""
        try:
            piece = connection.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            piece = b""
        connection.unread += piece
        if not piece or len(connection.unread) > self.longest_hello:
            self.disconnect(connection)
            return
        line, newline, rest = connection.unread.partition(b"\n")
        if not newline or self.decided:
            return
        connection.unread = rest
        if connection.process is None:
            self.add(connection, line + newline)
        elif line + newline == WHO_IS_MISSING:
            self.tell(connection, Verdict(missing=self.missing).line())
        else:
            self.disconnect(connection)

    def add(self, connection: _Connection, line: bytes) -> None:
        """Add the process that sent `line` to those that have joined; ignore what is not signed."""
        message = verified(self.key, TO_SERVER, connection.nonce, line)
        if message is None:
            self.ignore(connection, line)
            return
        try:
            hello = Hello.model_validate_json(message)
        except pydantic.ValidationError:
            self.refuse(
                f"a process at {connection.address} with this run's key sends a hello of another "
                "version of geojax; all processes of a job need the same version"
            )
        connection.hello, process = hello, hello.process
        known = self.joined.get(process)
        if problem := self.why_not(hello, known):
            self.refuse(problem)
        if known is not None:  # it connects again, and its first connection is broken
            self.disconnect(self.connections[process])
        del self.strangers[connection]
        connection.process = process
        self.connections[process] = connection
        self.joined[process] = hello
        self.ever_joined.add(process)

    def ignore(self, connection: _Connection, line: bytes) -> None:
        """Count a line without this run's signature, if it is a hello, and hang up."""
        if is_signed(line):
            self.ignored.add(WITH_OTHER_KEY, connection.address)
            self.send(connection, OTHER_KEY)
        else:
            with contextlib.suppress(pydantic.ValidationError):  # a port scan, a stray client
                Hello.model_validate_json(line)
                self.ignored.add(UNSIGNED, connection.address)
        self.disconnect(connection)

    def why_not(self, hello: Hello, known: Hello | None) -> str | None:
        """Return why the job cannot start with the process that says `hello`; None if it can."""
        own = self.own
        who, first = _name(hello), _name(own)
        if hello.versions != own.versions:
            return (
                f"{who} runs {_versions(hello)}, but {first} {_versions(own)}: all processes of a "
                "job need the same versions"
            )
        if hello.count != own.count:
            return (
                f"{who} was started as one of {hello.count} processes, but {first} as one of "
                f"{own.count}"
            )
        if hello.process >= own.count:
            return f"{who} has an index beyond the {own.count} processes of the job"
        if known is not None and known.token != hello.token:
            return (
                f"two processes say that they are number {hello.process}: one on host "
                f"{known.host}, one on host {hello.host}"
            )
        return None

    def disconnect(self, connection: _Connection) -> None:
        """Forget a connection and the process that joined through it."""
        self.selector.unregister(connection.socket)
        connection.socket.close()
        self.strangers.pop(connection, None)
        if connection.process is not None:
            del self.connections[connection.process], self.joined[connection.process]

    def send(self, connection: _Connection, message: bytes) -> None:
        """Send a message as far as the connection takes it now; the rest is sent later."""
        connection.unsent += message
        try:
            sent = connection.socket.send(connection.unsent)
        except BlockingIOError:
            sent = 0
        except OSError:
            connection.unsent = b""  # reading finds out, and disconnects
            return
        connection.unsent = connection.unsent[sent:]
        wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if connection.unsent else 0)
        if wanted != self.selector.get_key(connection.socket).events:
            self.selector.modify(connection.socket, wanted, connection)

    def tell(self, connection: _Connection, line: bytes) -> None:
        """Send the line of a verdict to a process, signed for it."""
        assert connection.hello is not None, "a verdict is for a process that has said who it is"
        fresh = fresh_for(connection.nonce, connection.hello)
        self.send(connection, signed(self.key, TO_CLIENT, fresh, line))

    def tell_everyone(self, verdict: Verdict) -> None:
        """Send a verdict to all that have said who they are, and leave each the time to take it."""
        now = time.monotonic()
        self.decided = True
        for listener in self.listeners:
            if self.listening_again_at is None:
                self.selector.unregister(listener)
        self.listening_again_at = None
        for stranger in list(self.strangers):
            if stranger.hello is None:
                self.disconnect(stranger)
        line = verdict.line()
        for connection in [*self.connections.values(), *self.strangers]:
            self.tell(connection, line)
        while left := [*self.connections.values(), *self.strangers]:
            sending = any(connection.unsent for connection in left)
            deadline = now + (_SEND_SECONDS if sending else _CLOSE_SECONDS)
            if time.monotonic() >= deadline:
                return
            self.wait(deadline)

    def give_up(self) -> None:
        """Tell all processes who is missing, and raise the error for process 0 itself."""
        # Some of those that joined may have given up just before; they are not the cause.
        never_joined = [process for process in self.missing if process not in self.ever_joined]
        blamed = never_joined or self.missing
        error = missing_sentence(blamed, self.own.count, self.timeout_seconds)
        if is_name_of_loopback(self.host):
            error += (
                f" (on the host of process 0 the coordinator's name, {self.host}, leads to that "
                "host only: give an address that all hosts reach)"
            )
        if ignored := self.ignored.sentence():
            error += f"; {ignored}"
        self.tell_everyone(Verdict(error=error, missing=blamed))
        raise MissingProcessesError(error, blamed)

    def refuse(self, problem: str) -> NoReturn:
        """Tell all processes why the job cannot start, and raise the same error here."""
        self.tell_everyone(Verdict(error=problem))
        raise UserError(problem)


def _presence(hello: Hello) -> Presence:
    return Presence(**{name: getattr(hello, name) for name in Presence.model_fields})


def _name(hello: Hello) -> str:
    site = "" if hello.site is None else f"site {hello.site}, "
    return f"process {hello.process} ({site}host {hello.host})"


def _versions(hello: Hello) -> str:
    return ", ".join(f"{name} {version}" for name, version in hello.versions.items())


def _disagreement(hellos: Sequence[Hello]) -> str | None:
    without = [hello.process for hello in hellos if hello.site is None]
    if without and len(without) < len(hellos):
        return (
            f"process {without[0]} names no site while others do: set GEOJAX_SITE (or --site) for "
            "all processes or for none"
        )
    return None
