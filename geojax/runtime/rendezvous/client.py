"""The client of the rendezvous, in every process but 0."""

import random
import socket
import time

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.network_names import is_loopback
from geojax.runtime.rendezvous.messages import (
    LONGEST_GREETING,
    LONGEST_VERDICT,
    OTHER_KEY,
    SAY_SECONDS,
    WHO_IS_MISSING,
    Everyone,
    Greeting,
    Hello,
    Verdict,
    Waits,
    fresh_for,
)
from geojax.runtime.rendezvous.signatures import TO_CLIENT, TO_SERVER, is_signed, signed, verified
from geojax.runtime.rendezvous.sockets import keep_alive

# Waits between attempts grow, and are random, so that thousands do not dial at once.
_FIRST_REDIAL_SECONDS, _LONGEST_REDIAL_SECONDS = 0.1, 1.5
# A process with another key hardly ever gets a better answer; so much longer are its waits.
_OTHER_KEY_PATIENCE = 5
_DIAL_SECONDS = 20.0
# How much longer than the timeout a process waits for process 0 to name the missing ones.
_VERDICT_SECONDS = 2.0


class _OtherKeyError(Exception):
    """The other end says that it has another key, or signs with one."""


def join_server(
    own: Hello,
    host: str,
    port: int,
    key: bytes,
    timeout_seconds: float,
    deadline: float,
    waits: Waits,
) -> Everyone:
    """Join the rendezvous at `host`:`port`; `geojax.runtime.rendezvous.join` says the rest."""
    failure: Exception = TimeoutError("no answer")
    redial_seconds, say_at = _FIRST_REDIAL_SECONDS, time.monotonic() + SAY_SECONDS
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(remaining, _DIAL_SECONDS)) as server:
                keep_alive(server)
                return _verdict(server, own, key, deadline).result(own, key, timeout_seconds)
        except (UserError, RunError):
            raise
        except (OSError, ValueError, _OtherKeyError) as error:
            # The last attempt has no time to find out anything.
            if not isinstance(error, TimeoutError) or isinstance(failure, TimeoutError):
                failure = error
        if time.monotonic() >= say_at:
            waits([0])
            say_at = deadline
        pause = random.uniform(0.5, 1.0) * redial_seconds
        redial_seconds = min(1.5 * redial_seconds, _LONGEST_REDIAL_SECONDS)
        if isinstance(failure, _OtherKeyError):
            pause *= _OTHER_KEY_PATIENCE
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
    raise MissingProcessesError(_why_not(own, host, port, timeout_seconds, failure), [0])


def _why_not(own: Hello, host: str, port: int, seconds: float, failure: Exception) -> str:
    """Return the sentence about a process that could not join, and the last reason for it."""
    if isinstance(failure, socket.gaierror):
        return (
            f"process {own.process}: the coordinator's name, {host}, had no address within "
            f"{seconds:g} seconds ({failure.strerror}). Correct the name, or start process 0 if "
            "its host gets the name only then"
        )
    where = f"the coordinator, process 0 at {host}:{port}, within {seconds:g} seconds"
    if isinstance(failure, _OtherKeyError):
        return (
            f"process {own.process} could not join {where}: it has another key than this process, "
            "or one of them has none; give all processes the same GEOJAX_KEY"
        )
    question = "is process 0 running, and is that its address?"
    if is_loopback(host):
        question = (
            f"is process 0 running on this host, {own.host}? From another host, {host} does not "
            "lead to it: give an address that all hosts reach"
        )
    problem = str(failure)
    if isinstance(failure, OSError):
        problem = failure.strerror or problem
    elif isinstance(failure, ValueError):  # pydantic's are among them
        problem = "what listens there is no geojax process"
    return f"process {own.process} could not reach {where} ({problem}): {question}"


def _verdict(server: socket.socket, own: Hello, key: bytes, deadline: float) -> Verdict:
    """Say who this process is; return the verdict of the server.

    When the deadline is over, ask who is missing: the server may have started later, and go on.

    Raises:
        OSError: it hung up, or did not answer in time.
        ValueError: it is no geojax process.
        _OtherKeyError: it has another key.
    """
    lines = _Lines(server)
    greeting = lines.read(LONGEST_GREETING, min(deadline, time.monotonic() + _DIAL_SECONDS))
    nonce = Greeting.model_validate_json(greeting).nonce
    server.sendall(signed(key, TO_SERVER, nonce, own.line()))
    try:
        line = lines.read(LONGEST_VERDICT, deadline)
    except TimeoutError:
        server.sendall(WHO_IS_MISSING)
        line = lines.read(LONGEST_VERDICT, deadline + _VERDICT_SECONDS)
    message = verified(key, TO_CLIENT, fresh_for(nonce, own), line)
    if message is None:
        if line == OTHER_KEY or is_signed(line):
            raise _OtherKeyError
        raise ValueError("its line is not signed")
    return Verdict.model_validate_json(message)


class _Lines:
    """Lines that arrive at a socket."""

    def __init__(self, connected: socket.socket):
        self._socket = connected
        self._unread = bytearray()

    def read(self, longest: int, deadline: float) -> bytes:
        """Read a line with its line break.

        Raises:
            TimeoutError: the deadline is over; a later call goes on with the same line.
            ConnectionError: the other end hung up before.
            ValueError: the line is longer than `longest`.
        """
        searched = 0
        while (end := self._unread.find(b"\n", searched)) < 0:
            searched = len(self._unread)
            if searched > longest:
                raise ValueError("its line is too long")
            self._socket.settimeout(max(0.01, deadline - time.monotonic()))
            piece = self._socket.recv(1 << 16)
            if not piece:
                raise ConnectionError("it hung up")
            self._unread += piece
        line = bytes(self._unread[: end + 1])
        del self._unread[: end + 1]
        return line
