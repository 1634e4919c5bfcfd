"""The rendezvous of all processes before JAX connects them: each joins and learns of the others.

JAX's own start-up ends the process (in C++, with a stack trace that does not name the process that
is missing) when one does not join in time. So process 0 first listens on the coordinator's port
itself; each message is one line of JSON:

    process i  → process 0    {"process": i, "count": n, "site": ..., "host": ..., ...}
    process 0  → all          {"missing": [...]}       on joining, and when it changes
    process 0  → all          {"present": [{...}, ...]}  when all have joined; it stops listening
                           or {"error": "..."}         when they do not fit together, or time is up

`token` tells a process that connects again from two that claim the same index.
"""

import contextlib
import ipaddress
import json
import os
import resource
import selectors
import socket
import time
import uuid
from collections.abc import Iterable, Iterator
from typing import Any, TypedDict

from geojax.errors import MissingProcessesError, UserError

_LONGEST_MESSAGE = 1 << 20
_REDIAL_SECONDS = 0.2
_BROADCAST_SECONDS = 1.0
# Files of this process other than the connections.
_OTHER_FILES = 512
# How much longer than the timeout a process waits for process 0 to name the missing ones.
_VERDICT_SECONDS = 2.0


class Presence(TypedDict):
    """Facts that one process tells the others about itself."""

    process: int
    count: int
    site: str | None
    host: str
    token: str
    gpus: str | None
    """CUDA_VISIBLE_DEVICES, if set."""
    address: str | None
    """Address that the host's own name resolves to on it; None if it cannot be resolved."""


def join(
    process: int, count: int, coordinator: str, site: str | None, timeout_seconds: float
) -> list[Presence]:
    """Meet the other processes of the job; return the facts of each, by process index.

    Raises:
        MissingProcessesError: some process did not join in time; it is named. In processes other
            than 0 also when the coordinator cannot be reached.
        UserError: processes disagree on their number, two claim the same index, some name a site
            and others none, or the coordinator's port is taken.
    """
    host, _, port = coordinator.rpartition(":")
    own = Presence(
        process=process,
        count=count,
        site=site,
        host=socket.gethostname(),
        token=uuid.uuid4().hex,
        gpus=os.environ.get("CUDA_VISIBLE_DEVICES"),
        address=_own_address(),
    )
    deadline = time.monotonic() + timeout_seconds
    if process == 0:
        return RendezvousServer(own, int(port), timeout_seconds).serve(deadline)
    return _join_server(own, host.strip("[]"), int(port), timeout_seconds, deadline)


class RendezvousServer:
    """The server in process 0, which waits for all others and lists the present."""

    def __init__(self, own: Presence, port: int, timeout_seconds: float):
        self.own = own
        self.timeout_seconds = timeout_seconds
        self.present = {0: own}
        self.ever_joined = {0}
        self.connections: dict[int, socket.socket] = {}
        self.unread: dict[socket.socket, bytes] = {}
        self.next_broadcast = 0.0
        self.selector = selectors.DefaultSelector()
        _allow_open_files(own["count"] + _OTHER_FILES)
        dual = socket.has_dualstack_ipv6()
        try:
            self.listener = socket.create_server(
                ("", port),
                family=socket.AF_INET6 if dual else socket.AF_INET,
                dualstack_ipv6=dual,
                backlog=1024,
            )
        except OSError as error:
            raise UserError(
                f"process 0 cannot listen on port {port} for the other processes "
                f"({error.strerror}); is another job running here? give the coordinator a free port"
            ) from None
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ)

    def serve(self, deadline: float) -> list[Presence]:
        """Wait until all processes have joined; return the facts of each, by process index."""
        announced = self.missing
        try:
            while self.missing:
                now = time.monotonic()
                if now >= deadline:
                    self.give_up()
                for key, _ in self.selector.select(timeout=min(deadline - now, _BROADCAST_SECONDS)):
                    self.receive(key.fileobj)
                if self.missing != announced and now >= self.next_broadcast:
                    announced, self.next_broadcast = self.missing, now + _BROADCAST_SECONDS
                    self.send({"missing": announced}, self.unread)
            everyone = [self.present[process] for process in sorted(self.present)]
            if problem := _disagreement(everyone):
                self.refuse(problem)
            self.send({"present": everyone}, self.unread)
            return everyone
        finally:
            for connection in [self.listener, *self.unread]:
                with contextlib.suppress(OSError):
                    connection.close()
            self.selector.close()

    @property
    def missing(self) -> list[int]:
        """Processes that are not connected now."""
        return [process for process in range(self.own["count"]) if process not in self.present]

    def give_up(self) -> None:
        """Send all processes the list of the missing, and raise the error for process 0 itself."""
        # Some of those that joined may have given up just before; they are not the cause.
        never_joined = [process for process in self.missing if process not in self.ever_joined]
        blamed = never_joined or self.missing
        error = _missing_sentence(blamed, self.own["count"], self.timeout_seconds)
        self.send({"error": error, "missing": blamed}, self.unread)
        raise MissingProcessesError(error, blamed)

    def receive(self, source: Any) -> None:
        """Accept a connection, or read from one."""
        if source is self.listener:
            connection, _ = self.listener.accept()
            connection.setblocking(False)
            self.unread[connection] = b""
            self.selector.register(connection, selectors.EVENT_READ)
            return
        try:
            piece = source.recv(65536)
        except OSError:
            piece = b""
        self.unread[source] += piece
        if not piece or len(self.unread[source]) > _LONGEST_MESSAGE:
            self.disconnect(source)
        elif b"\n" in self.unread[source]:
            line, self.unread[source] = self.unread[source].split(b"\n", 1)
            self.add(source, line)

    def add(self, source: socket.socket, line: bytes) -> None:
        """Add the process that sent `line` to those that have joined."""
        try:
            presence: Presence = json.loads(line)
            process, count = int(presence["process"]), int(presence["count"])
            presence["token"], presence["host"], presence["site"]
            presence["gpus"], presence["address"]
        except (ValueError, KeyError, TypeError):
            self.disconnect(source)  # not one of ours: a port scan, a stray client
            return
        if count != self.own["count"]:
            self.refuse(
                f"process {process} (host {presence['host']}) was started as one of {count} "
                f"processes, but process 0 (host {self.own['host']}) as one of {self.own['count']}"
            )
        known = self.present.get(process)
        if known is not None and known["token"] != presence["token"]:
            self.refuse(
                f"two processes say that they are number {process}: one on host {known['host']}, "
                f"one on host {presence['host']}"
            )
        self.present[process] = presence
        self.ever_joined.add(process)
        self.connections[process] = source
        self.send({"missing": self.missing}, [source])

    def disconnect(self, source: socket.socket) -> None:
        """Forget a connection and the process that joined through it."""
        self.selector.unregister(source)
        source.close()
        del self.unread[source]
        for process in [p for p, connection in self.connections.items() if connection is source]:
            del self.connections[process], self.present[process]

    def refuse(self, problem: str) -> None:
        """Tell all processes why the job cannot start, and raise the same error here."""
        self.send({"error": problem}, self.unread)
        raise UserError(problem)

    def send(self, message: dict[str, Any], connections: Iterable[socket.socket]) -> None:
        """Send one message over each of `connections`; a broken one is skipped."""
        line = json.dumps(message).encode() + b"\n"
        for connection in connections:
            with contextlib.suppress(OSError):
                connection.setblocking(True)
                connection.settimeout(5.0)
                connection.sendall(line)
                connection.setblocking(False)


def _join_server(
    own: Presence, host: str, port: int, timeout_seconds: float, deadline: float
) -> list[Presence]:
    """Join the rendezvous at `host`:`port`, as every process but the first does."""
    reached, problem, missing = False, "no answer", [0]
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=remaining) as connection:
                connection.sendall(json.dumps(own).encode() + b"\n")
                for line in _lines(connection, deadline + _VERDICT_SECONDS):
                    message = json.loads(line)
                    reached, missing = True, message.get("missing", missing)
                    if "present" in message:
                        return message["present"]
                    if "error" in message and "missing" in message:
                        raise MissingProcessesError(message["error"], missing)
                    if "error" in message:
                        raise UserError(message["error"])
        except OSError as error:
            problem = error.strerror or str(error)
        except ValueError as error:
            if isinstance(error, UserError):
                raise
            problem = "what listens there is no geojax process"
        time.sleep(max(0.0, min(_REDIAL_SECONDS, deadline - time.monotonic())))
    if reached:
        raise MissingProcessesError(
            _missing_sentence(missing, own["count"], timeout_seconds), missing
        )
    question = "is process 0 running, and is that its address?"
    if is_loopback(host):
        question = (
            f"is process 0 running on this host, {own['host']}? From another host, {host} does not "
            "lead to it: give an address that all hosts reach"
        )
    raise MissingProcessesError(
        f"process {own['process']} could not reach the coordinator, process 0 at {host}:{port}, "
        f"within {timeout_seconds:g} seconds ({problem}): {question}",
        [0],
    )


def is_loopback(host: str) -> bool:
    """Return whether `host`, a name or an address, leads only to the machine that asks."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _allow_open_files(count: int) -> None:
    """Raise this process's limit of open files to `count`, as far as the system permits."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = count if hard == resource.RLIM_INFINITY else min(count, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _own_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _lines(connection: socket.socket, deadline: float) -> Iterator[bytes]:
    unread = b""
    while (remaining := deadline - time.monotonic()) > 0:
        connection.settimeout(remaining)
        piece = connection.recv(65536)
        if not piece:
            return
        *lines, unread = (unread + piece).split(b"\n")
        yield from lines


def _missing_sentence(missing: list[int], count: int, timeout_seconds: float) -> str:
    names = ", ".join(map(str, missing[:8])) + (" ..." if len(missing) > 8 else "")
    return (
        f"{len(missing)} of {count} processes did not start within {timeout_seconds:g} seconds: "
        f"missing process {names}"
    )


def _disagreement(everyone: list[Presence]) -> str | None:
    without = [presence["process"] for presence in everyone if presence["site"] is None]
    if without and len(without) < len(everyone):
        return (
            f"process {without[0]} names no site while others do: set GEOJAX_SITE (or --site) for "
            "all processes or for none"
        )
    return None
