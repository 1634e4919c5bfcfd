"""The rendezvous of thousands of processes, and what strangers send to its port."""

import concurrent.futures
import contextlib
import errno
import json
import resource
import selectors
import socket
import threading
import time

import pytest
from support.ports import free_port
from support.processes import PATIENCE_SECONDS, wait_until

from geojax.errors import MissingProcessesError, UserError
from geojax.runtime.rendezvous import join, server
from geojax.runtime.rendezvous.messages import Verdict, own_hello
from geojax.runtime.rendezvous.server import RendezvousServer
from geojax.runtime.rendezvous.sockets import allow_connections

PROCESSES = 3001


@pytest.fixture
def port():
    return free_port()


@contextlib.contextmanager
def serving(count, port, timeout=PATIENCE_SECONDS):
    """Process 0 of `count` in a thread: the server, and the future of its result."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        listening = RendezvousServer(own_hello(0, count, None), "127.0.0.1", port, timeout)
        yield listening, pool.submit(listening.serve, time.monotonic() + timeout)


def dial(port):
    """A connection to a server that is about to listen."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_SECONDS)
        except OSError:
            assert time.monotonic() < deadline
            time.sleep(0.01)


def hello(process, count, **facts):
    return own_hello(process, count, None).model_copy(update=facts).line()


class CheapClients:
    """All processes but the first, in one thread: each sends one line and reads one."""

    def __init__(self, count, port):
        self.selector = selectors.DefaultSelector()
        self.received = {}
        line = json.loads(hello(1, count))
        for process in range(1, count):
            connection = dial(port)
            facts = line | {"process": process, "token": f"t{process}", "host": f"n{process:04}"}
            connection.sendall(json.dumps(facts).encode() + b"\n")
            connection.setblocking(False)
            self.received[process] = b""
            self.selector.register(connection, selectors.EVENT_READ, process)

    def read(self):
        while self.selector.get_map():
            for key, _ in self.selector.select():
                self.received[key.data] += key.fileobj.recv(1 << 20)
                if self.received[key.data].endswith(b"\n"):
                    self.selector.unregister(key.fileobj)
                    key.fileobj.close()


@pytest.fixture
def both_ends():
    """Files for the connections of all processes, of which both ends are here."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    allow_connections(2 * PROCESSES)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.usefixtures("both_ends")
def test_three_thousand_processes_meet_in_seconds_with_two_messages_each(port):
    started = time.monotonic()
    with serving(PROCESSES, port) as (_, first):
        clients = CheapClients(PROCESSES, port)
        clients.read()
        everyone = first.result()
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert [process.host for process in everyone.processes[1:]] == [
        f"n{process:04}" for process in range(1, PROCESSES)
    ]
    lines = set(clients.received.values())
    assert len(lines) == 1
    assert len(clients.received) == PROCESSES - 1
    (line,) = lines
    assert line.count(b"\n") == 1
    assert len(line) < 20 * PROCESSES, "the list of all goes to all, so it has to be compact"
    told = Verdict.model_validate_json(line).result(own_hello(7, PROCESSES, None), 1.0)
    assert told == everyone


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
    hello(1, 2, host="evil\x1b[2J") + b"\n",
    hello(1, 2).replace(b'"process":1', b'"process":-1'),
    hello(1, 2)[:20],
    hello(1, 2)[:-1],
]


def test_what_strangers_send_is_ignored(port):
    with serving(2, port) as (_, first):
        half = dial(port)
        half.sendall(hello(1, 2)[:20])
        for rubbish in RUBBISH:
            with dial(port) as stranger, contextlib.suppress(OSError):
                stranger.sendall(rubbish)
        half.sendall(hello(1, 2)[20:-1])  # dies in the middle of its line
        half.close()
        second = join(1, 2, f"127.0.0.1:{port}", None, PATIENCE_SECONDS)
        assert second == first.result()


@pytest.mark.parametrize(
    ("forged", "part"),
    [
        (hello(1, 3, host="mallory"), "two processes say that they are number 1"),
        (hello(0, 3, host="mallory"), "two processes say that they are number 0"),
        (hello(5, 3, host="mallory"), "has an index beyond the 3 processes"),
        (hello(1, 9, host="mallory"), "was started as one of 9 processes"),
    ],
)
def test_a_forged_process_ends_the_start_by_name(port, forged, part):
    """Who comes first is not known, so that the start must not go on with either."""
    with serving(3, port) as (listening, first):
        real = dial(port)
        real.sendall(hello(1, 3))
        wait_until(lambda: 1 in listening.joined)
        with dial(port) as stranger:
            stranger.sendall(forged)
            refused = stranger.recv(1 << 16)
        with pytest.raises(UserError, match="mallory") as error:
            first.result()
    assert part in str(error.value)
    assert part in Verdict.model_validate_json(refused).error
    assert part in Verdict.model_validate_json(real.recv(1 << 16)).error
    real.close()


def test_a_process_that_died_may_come_again(port):
    with serving(3, port) as (listening, first), concurrent.futures.ThreadPoolExecutor(1) as pool:
        with dial(port) as before:
            before.sendall(hello(1, 3, token="before", host="gone"))
            wait_until(lambda: 1 in listening.joined)
        wait_until(lambda: 1 not in listening.joined)
        again = pool.submit(join, 1, 3, f"127.0.0.1:{port}", None, PATIENCE_SECONDS)
        second = join(2, 3, f"127.0.0.1:{port}", None, PATIENCE_SECONDS)
        assert first.result() == second == again.result()
        assert second.processes[1].host != "gone"


def test_strangers_that_only_hold_connections_are_closed(port, monkeypatch):
    monkeypatch.setattr(server, "_MOST_STRANGERS", 8)
    with serving(2, port) as (_, first), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(port)) for _ in range(20)]
        assert strangers[0].recv(1) == b""  # the oldest made room
        join(1, 2, f"127.0.0.1:{port}", None, PATIENCE_SECONDS)
        first.result()


def test_errors_of_accept_are_survived(port, monkeypatch):
    """Without files for more connections the server goes on with those that it has."""
    errors = [errno.EMFILE, errno.ECONNABORTED, errno.ENFILE, errno.ENOBUFS]
    real = socket.socket.accept

    def accept(listener):
        if errors and threading.current_thread() is not threading.main_thread():
            raise OSError(errors.pop(0), "no")
        return real(listener)

    monkeypatch.setattr(socket.socket, "accept", accept)
    with serving(2, port) as (_, first):
        join(1, 2, f"127.0.0.1:{port}", None, PATIENCE_SECONDS)
        first.result()
    assert not errors


@pytest.mark.parametrize(
    "answer", [b"SSH-2.0-OpenSSH\r\n", b"[" * 200_000 + b"\n", b'{"everyone": "eJw"}\n', b"{}\n"]
)
def test_a_stranger_on_the_coordinators_port_is_not_believed(port, answer):
    def be_strange(listener):
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.sendall(answer)

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=be_strange, args=(listener,), daemon=True).start()
        with pytest.raises(MissingProcessesError, match="could not reach the coordinator"):
            join(1, 2, f"127.0.0.1:{port}", None, 0.5)
        listener.shutdown(socket.SHUT_RDWR)
