"""TCP ports for servers that a test starts."""

import itertools
import os
import secrets
import socket

# Below the ports that Linux deals out: between the choice and the server's start, seconds later,
# any connection of another test might get one of those.
_FIRST, _PER_WORKER, _WORKERS = 12_000, 2_000, 10

_worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw")) % _WORKERS
_numbers = itertools.count(secrets.randbelow(_PER_WORKER))


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody uses and no other test is given soon."""
    for number in _numbers:
        port = _FIRST + _PER_WORKER * _worker + number % _PER_WORKER
        with socket.socket() as candidate:
            try:
                candidate.bind(("127.0.0.1", port))
            except OSError:
                continue
        return port
    raise AssertionError("the numbers never end")
