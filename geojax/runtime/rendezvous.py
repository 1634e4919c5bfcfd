"""Before JAX connects the processes: all of them meet, say where they run, and hear who else does.

JAX's own start-up ends the process (in C++, with a stack trace and no word on who is missing) when
a process does not come in time. So process 0 first listens on the coordinator's port itself, with
one line of JSON for each message:

    process i  → process 0    {"process": i, "count": n, "site": ..., "host": ..., ...}
    process 0  → everyone     {"missing": [...]}      whenever somebody came
    process 0  → everyone     {"present": [{...}, ...]}  when all have come; then it stops listening
                           or {"error": "..."}        when they do not fit together, or time is up

`token` tells a process that connects again from two that claim the same number.
"""

import contextlib
import ipaddress
import json
import os
import selectors
import socket
import time
import uuid
from typing import Any, TypedDict

from geojax.errors import UserError
from geojax.runtime.coordination import MissingProcessesError

_LONGEST_MESSAGE = 1 << 20
_REDIAL_SECONDS = 0.2


class Presence(TypedDict):
    """What one process says of itself."""

    process: int
    count: int
    site: str | None
    host: str
    token: str
    gpus: str | None
    """CUDA_VISIBLE_DEVICES, if set."""
    address: str | None
    """What the host's own name stands for on it; None when it cannot be looked up."""


def roll_call(
    process: int, count: int, coordinator: str, site: str | None, timeout_seconds: float
) -> list[Presence]:
    """Meet the other processes of the job; returns what each says, in the order of their numbers.

    Raises:
        MissingProcessesError: some process did not come in time; it names them. In the others than
            process 0 also when the coordinator cannot be reached.
        UserError: processes disagree on their number, two claim the same, some give a site and
            others none, or the coordinator's port is taken.
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
        return _Desk(own, int(port), timeout_seconds).serve(deadline)
    return _attend(own, host.strip("[]"), int(port), timeout_seconds, deadline)


class _Desk:
    """Process 0's side."""

    def __init__(self, own: Presence, port: int, timeout_seconds: float):
        self.own = own
        self.timeout_seconds = timeout_seconds
        self.present = {0: own}
        self.seen = {0}
        self.visitors: dict[int, socket.socket] = {}
        self.unread: dict[socket.socket, bytes] = {}
        self.selector = selectors.DefaultSelector()
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
        try:
            while len(self.present) < self.own["count"]:
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    # Some that came may have given up before: those that never came are to blame.
                    blame = [process for process in self.missing if process not in self.seen]
                    blame = blame or self.missing
                    error = _missing_sentence(blame, self.own["count"], self.timeout_seconds)
                    self.tell({"error": error, "missing": blame})
                    raise MissingProcessesError(error, blame)
                for key, _ in self.selector.select(timeout=min(remaining, 1.0)):
                    self.attend_to(key.fileobj)
            everyone = [self.present[process] for process in sorted(self.present)]
            if problem := _disagreement(everyone):
                self.refuse(problem)
            self.tell({"present": everyone})
            return everyone
        finally:
            for connection in [self.listener, *self.unread]:
                with contextlib.suppress(OSError):
                    connection.close()
            self.selector.close()

    @property
    def missing(self) -> list[int]:
        return [process for process in range(self.own["count"]) if process not in self.present]

    def attend_to(self, source: Any) -> None:
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
            self.leave(source)
        elif b"\n" in self.unread[source]:
            line, self.unread[source] = self.unread[source].split(b"\n", 1)
            self.greet(source, line)

    def greet(self, source: socket.socket, line: bytes) -> None:
        try:
            presence: Presence = json.loads(line)
            process, count = int(presence["process"]), int(presence["count"])
            presence["token"], presence["host"], presence["site"]
            presence["gpus"], presence["address"]
        except (ValueError, KeyError, TypeError):
            self.leave(source)  # not one of ours: a port scan, a stray client
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
        self.seen.add(process)
        self.visitors[process] = source
        self.tell({"missing": self.missing})

    def leave(self, source: socket.socket) -> None:
        self.selector.unregister(source)
        source.close()
        del self.unread[source]
        for process in [p for p, visitor in self.visitors.items() if visitor is source]:
            del self.visitors[process], self.present[process]

    def refuse(self, problem: str) -> None:
        self.tell({"error": problem})
        raise UserError(problem)

    def tell(self, message: dict[str, Any]) -> None:
        line = json.dumps(message).encode() + b"\n"
        for visitor in self.unread:
            with contextlib.suppress(OSError):
                visitor.setblocking(True)
                visitor.settimeout(5.0)
                visitor.sendall(line)
                visitor.setblocking(False)


def _attend(
    own: Presence, host: str, port: int, timeout_seconds: float, deadline: float
) -> list[Presence]:
    """The side of every process but the first."""
    reached, problem, missing = False, "no answer", [0]
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), timeout=remaining) as connection:
                connection.sendall(json.dumps(own).encode() + b"\n")
                for line in _lines(connection, deadline):
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
    """Whether `host`, a name or an address, leads to nothing but the machine that asks."""
    try:
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, None)}
    except OSError:
        return False
    return all(ipaddress.ip_address(address.partition("%")[0]).is_loopback for address in found)


def _own_address() -> str | None:
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return None


def _lines(connection: socket.socket, deadline: float) -> Any:
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
