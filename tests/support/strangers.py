"""Clients of a rendezvous that speak its protocol line by line, and strangers who try to."""

import concurrent.futures
import contextlib
import json
import socket
import time

from support.processes import PATIENCE_SECONDS

from geojax.runtime.rendezvous import join
from geojax.runtime.rendezvous.messages import own_hello
from geojax.runtime.rendezvous.signatures import TO_CLIENT, TO_SERVER, signed

KEY, OTHER_KEY = b"k" * 32, b"o" * 32


def dial(port):
    """A connection to a server that is about to listen."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def greeted(port):
    """Such a connection, and the nonce with which the server greets it."""
    connection = dial(port)
    return connection, json.loads(line_of(connection))["nonce"]


def line_of(connection):
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1 << 16)
        assert piece, "the server must not hang up"
        line += piece
    return line


def hello(process, count, **facts):
    return own_hello(process, count, None).model_copy(update=facts).line()


def say(port, line, key=KEY):
    """A connection through which a process with `key` has said `line`, and its nonce."""
    connection, nonce = greeted(port)
    connection.sendall(signed(key, TO_SERVER, nonce, line))
    return connection, nonce


RUBBISH = [
    b"",
    b"\x00\xff\xfe" * 1000,
    b"GET / HTTP/1.1\r\n\r\n",
    b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    b"[" * 200_000 + b"\n",
    b"[" * 8000 + b"\n",
    b"[]\n",
    b'{"process": 1}\n',
    b'"missing?"\n',
    b'{"process": 1e999}\n',
    b"0" * 64 + b" \n",
    hello(1, 2)[:20],
    hello(1, 2)[:-1],
]
UNSIGNED = [
    b'{"process":1,"count":2,"token":"x","host":"evil","versions":{"jax":"9.9"},"site":"west"}\n',
    hello(1, 2),
    hello(1, 2, versions={"jax": "9.9"}),
    hello(1, 3),
    hello(7, 2),
    hello(0, 2),
]


def stranger_lines(nonce, recorded):
    """Lines of strangers who know the nonce of a connection but not the key."""
    return [
        *RUBBISH,
        *UNSIGNED,
        *recorded,
        *(signed(OTHER_KEY, TO_SERVER, nonce, line) for line in UNSIGNED),
        *(signed(b"", TO_SERVER, nonce, line) for line in UNSIGNED),
        signed(KEY, TO_CLIENT, nonce, hello(1, 2)),
    ]


def recorded_lines(port):
    """The lines of a whole start with the right key, as somebody on the way saw them."""
    said = hello(1, 2)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        first = pool.submit(join, 0, 2, f"127.0.0.1:{port}", None, PATIENCE_SECONDS, key=KEY)
        connection, nonce = say(port, said)
        with connection:
            answer = line_of(connection)
        first.result()
    return [signed(KEY, TO_SERVER, nonce, said), answer]


def disturb(port, recorded):
    """Say every line of a stranger to a rendezvous, each through a connection of its own.

    Raises:
        OSError: nobody listens there any more.
    """
    for number in range(len(stranger_lines("", recorded))):
        with dial(port) as stranger, contextlib.suppress(OSError):
            nonce = json.loads(line_of(stranger))["nonce"]
            stranger.sendall(stranger_lines(nonce, recorded)[number])
            stranger.shutdown(socket.SHUT_WR)
            assert b"everyone" not in stranger.recv(1 << 16), "strangers learn nothing"
