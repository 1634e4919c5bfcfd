"""The client of the rendezvous, in every process but 0."""

import random
import socket
import time

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.runtime.rendezvous.messages import (
    LONGEST_VERDICT,
    WHO_IS_MISSING,
    Everyone,
    Hello,
    Verdict,
)
from geojax.runtime.rendezvous.sockets import is_loopback, keep_alive

# Waits between attempts grow, and are random, so that thousands do not dial at once.
_FIRST_REDIAL_SECONDS, _LONGEST_REDIAL_SECONDS = 0.1, 1.5
_DIAL_SECONDS = 20.0
# How much longer than the timeout a process waits for process 0 to name the missing ones.
_VERDICT_SECONDS = 2.0


def join_server(
    own: Hello, host: str, port: int, timeout_seconds: float, deadline: float
) -> Everyone:
    """Join the rendezvous at `host`:`port`; `geojax.runtime.rendezvous.join` says what may fail."""
    problem, redial_seconds = "no answer", _FIRST_REDIAL_SECONDS
    while (remaining := deadline - time.monotonic()) > 0:
        try:
            with socket.create_connection((host, port), min(remaining, _DIAL_SECONDS)) as server:
                keep_alive(server)
                server.sendall(own.line())
                if line := _read_verdict(server, deadline):
                    return Verdict.model_validate_json(line).result(own, timeout_seconds)
        except OSError as error:
            problem = error.strerror or str(error)
        except (UserError, RunError):
            raise
        except ValueError:  # pydantic's are among them
            problem = "what listens there is no geojax process"
        pause = random.uniform(0.5, 1.0) * redial_seconds
        redial_seconds = min(1.5 * redial_seconds, _LONGEST_REDIAL_SECONDS)
        time.sleep(max(0.0, min(pause, deadline - time.monotonic())))
    question = "is process 0 running, and is that its address?"
    if is_loopback(host):
        question = (
            f"is process 0 running on this host, {own.host}? From another host, {host} does not "
            "lead to it: give an address that all hosts reach"
        )
    raise MissingProcessesError(
        f"process {own.process} could not reach the coordinator, process 0 at {host}:{port}, "
        f"within {timeout_seconds:g} seconds ({problem}): {question}",
        [0],
    )


def _read_verdict(server: socket.socket, deadline: float) -> bytes | None:
    """Read the server's line; None if it sends none.

    When the deadline is over, ask who is missing: the server may have started later, and go on.
    """
    unread, asked = bytearray(), False
    while len(unread) <= LONGEST_VERDICT:
        server.settimeout(max(0.01, deadline - time.monotonic()))
        try:
            piece = server.recv(1 << 16)
        except TimeoutError:
            if asked:
                raise
            asked, deadline = True, deadline + _VERDICT_SECONDS
            server.sendall(WHO_IS_MISSING)
            continue
        if not piece:
            return None
        line, newline, _ = piece.partition(b"\n")
        unread += line
        if newline:
            return bytes(unread)
    raise ValueError("its line is too long")
