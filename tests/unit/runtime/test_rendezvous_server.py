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
from support.strangers import (
    KEY,
    OTHER_KEY,
    dial,
    disturb,
    greeted,
    hello,
    line_of,
    recorded_lines,
    say,
)

from geojax.errors import MissingProcessesError, UserError
from geojax.runtime.rendezvous import join, server
from geojax.runtime.rendezvous.messages import Hello, Verdict, fresh_for, own_hello
from geojax.runtime.rendezvous.server import RendezvousServer
from geojax.runtime.rendezvous.signatures import TO_CLIENT, TO_SERVER, signed, verified
from geojax.runtime.rendezvous.sockets import allow_connections

PROCESSES = 3001


@pytest.fixture
def port():
    return free_port()


@contextlib.contextmanager
def serving(count, port, timeout=PATIENCE_SECONDS, key=KEY):
    """Process 0 of `count` in a thread: the server, and the future of its result."""
    own = own_hello(0, count, None)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        listening = RendezvousServer(
            own, "127.0.0.1", port, key, timeout, note=None, waits=lambda missing: None
        )
        yield listening, pool.submit(listening.serve, time.monotonic() + timeout)


def told(line, said, nonce, key=KEY):
    """The verdict that a process that `said` a hello reads in a line."""
    message = verified(key, TO_CLIENT, fresh_for(nonce, Hello.model_validate_json(said)), line)
    return Verdict.model_validate_json(message)


def join_as(process, count, port, key=KEY, timeout=PATIENCE_SECONDS):
    return join(process, count, f"127.0.0.1:{port}", None, timeout, key=key)


class CheapClients:
    """All processes but the first, in one thread: each sends one line and reads two."""

    def __init__(self, count, port):
        self.selector = selectors.DefaultSelector()
        self.said, self.received, self.nonces = {}, {}, {}
        facts = json.loads(hello(1, count))
        for process in range(1, count):
            connection = dial(port)
            facts |= {"process": process, "token": f"t{process}", "host": f"n{process:04}"}
            self.said[process] = json.dumps(facts).encode() + b"\n"
            connection.setblocking(False)
            self.received[process] = b""
            self.selector.register(connection, selectors.EVENT_READ, process)

    def talk(self):
        while self.selector.get_map():
            for key, _ in self.selector.select():
                process = key.data
                self.received[process] += key.fileobj.recv(1 << 20)
                if not self.received[process].endswith(b"\n"):
                    continue
                if process not in self.nonces:
                    self.nonces[process] = json.loads(self.received[process])["nonce"]
                    self.received[process] = b""
                    line = signed(KEY, TO_SERVER, self.nonces[process], self.said[process])
                    key.fileobj.sendall(line)
                    continue
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
def test_three_thousand_processes_meet_in_seconds_with_three_messages_each(port):
    started = time.monotonic()
    with serving(PROCESSES, port) as (_, first):
        clients = CheapClients(PROCESSES, port)
        clients.talk()
        everyone = first.result()
    assert time.monotonic() - started < PATIENCE_SECONDS
    assert [process.host for process in everyone.processes[1:]] == [
        f"n{process:04}" for process in range(1, PROCESSES)
    ]
    assert len(set(clients.nonces.values())) == len(clients.received) == PROCESSES - 1
    lines = {line.partition(b" ")[2] for line in clients.received.values()}
    assert len(lines) == 1
    (line,) = lines
    assert line.count(b"\n") == 1
    assert len(line) < 20 * PROCESSES, "the list of all goes to all, so it has to be compact"
    verdict = told(clients.received[7], clients.said[7], clients.nonces[7])
    assert verdict.result(own_hello(7, PROCESSES, None), KEY, 1.0) == everyone


def test_nothing_that_strangers_send_at_any_moment_ends_or_delays_a_start(port):
    recorded = recorded_lines(port)
    with serving(3, port) as (listening, first), concurrent.futures.ThreadPoolExecutor(1) as pool:
        half, _ = greeted(port)  # says nothing, for the whole start
        dying, nonce = greeted(port)
        dying.sendall(signed(KEY, TO_SERVER, nonce, hello(1, 3))[:80])  # and not the rest
        disturb(port, recorded)
        second = pool.submit(join_as, 1, 3, port)
        wait_until(lambda: 1 in listening.joined)
        disturb(port, recorded)
        dying.close()
        assert join_as(2, 3, port) == first.result() == second.result()
        half.close()


def test_a_start_that_times_out_says_who_came_with_another_key(port):
    with serving(2, port, timeout=2.0) as (_, first):
        for _ in range(3):
            connection, _ = say(port, hello(1, 2), OTHER_KEY)
            assert connection.recv(1 << 16) == b'"other key"\n'
            assert connection.recv(1) == b""
            connection.close()
        unsigned, _ = greeted(port)
        unsigned.sendall(hello(1, 2))
        assert unsigned.recv(1 << 16) == b""
        with pytest.raises(MissingProcessesError) as error:
            first.result()
    assert str(error.value) == (
        "1 of 2 processes did not start within 2 seconds: missing process 1; 3 hellos with another "
        "key came from 127.0.0.1; 1 hello without a signature came from 127.0.0.1"
    )


@pytest.mark.parametrize("key", [OTHER_KEY, b""])
def test_a_process_with_another_key_learns_it_when_its_time_is_up(port, key):
    with serving(2, port, timeout=2.0) as (_, first):
        with pytest.raises(MissingProcessesError, match="it has another key than this process, or"):
            join_as(1, 2, port, key=key, timeout=1.0)
        with pytest.raises(MissingProcessesError, match=r"hellos? with another key came from 127"):
            first.result()


def test_a_false_coordinator_is_not_believed(port):
    """It may sign with another key, and repeat what the true one said at an earlier start."""
    recorded = recorded_lines(port)
    nonce = "0" * 32
    lie = Verdict(error="go away").line()
    answers = [
        recorded[1],
        lie,
        signed(OTHER_KEY, TO_CLIENT, f"{nonce} t", lie),
        b'"other key"\n',
    ]

    def deceive(listener):
        for number in range(1 << 20):
            with contextlib.suppress(OSError), listener.accept()[0] as connection:
                connection.sendall(json.dumps({"nonce": nonce}).encode() + b"\n")
                said = line_of(connection)
                # Its own hello, too, comes back to it.
                connection.sendall([*answers, said][number % (len(answers) + 1)])
            if listener.fileno() < 0:
                return

    with socket.create_server(("127.0.0.1", port)) as listener:
        threading.Thread(target=deceive, args=(listener,), daemon=True).start()
        with pytest.raises(MissingProcessesError, match="could not"):
            join_as(1, 2, port, timeout=1.5)
        listener.shutdown(socket.SHUT_RDWR)


def test_the_key_of_a_start_crosses_no_wire(port):
    said = hello(1, 2)
    with serving(2, port) as (_, first):
        connection, nonce = say(port, said)
        with connection:
            verdict = told(line_of(connection), said, nonce)
        everyone = first.result()
    own = Hello.model_validate_json(said)
    assert verdict.result(own, KEY, 1.0).key == everyone.key
    assert verdict.result(own, OTHER_KEY, 1.0).key != everyone.key


@pytest.mark.parametrize(
    ("wrong", "part"),
    [
        (hello(1, 3, host="mallory"), "two processes say that they are number 1"),
        (hello(0, 3, host="mallory"), "two processes say that they are number 0"),
        (hello(5, 3, host="mallory"), "has an index beyond the 3 processes"),
        (hello(1, 9, host="mallory"), "was started as one of 9 processes"),
        (hello(2, 3, host="mallory", versions={"jax": "9.9"}), "runs jax 9.9, but process 0"),
    ],
)
def test_a_process_with_the_key_that_does_not_fit_ends_the_start_by_name(port, wrong, part):
    """Who comes first is not known, so that the start must not go on with either."""
    right = hello(1, 3)
    with serving(3, port) as (listening, first):
        real, nonce = say(port, right)
        wait_until(lambda: 1 in listening.joined)
        other, others_nonce = say(port, wrong)
        with other:
            refused = line_of(other)
        with pytest.raises(UserError, match="mallory") as error:
            first.result()
    assert part in str(error.value)
    assert part in told(refused, wrong, others_nonce).error
    with real:
        assert part in told(line_of(real), right, nonce).error


def test_a_signed_line_of_another_version_of_geojax_is_an_error_of_a_person(port):
    with serving(2, port) as (_, first):
        connection, _ = say(port, b'{"later": true}\n')
        with pytest.raises(UserError, match=r"127\.0\.0\.1 with this run.s key .* same version"):
            first.result()
        connection.close()


def test_a_process_that_died_may_come_again(port):
    with serving(3, port) as (listening, first), concurrent.futures.ThreadPoolExecutor(1) as pool:
        before, _ = say(port, hello(1, 3, token="before", host="gone"))
        with before:
            wait_until(lambda: 1 in listening.joined)
        wait_until(lambda: 1 not in listening.joined)
        again = pool.submit(join_as, 1, 3, port)
        second = join_as(2, 3, port)
        assert first.result() == second == again.result()
        assert second.processes[1].host != "gone"


def test_strangers_that_only_hold_connections_are_closed(port, monkeypatch):
    monkeypatch.setattr(server, "_MOST_STRANGERS", 8)
    with serving(2, port) as (_, first), contextlib.ExitStack() as stack:
        strangers = [stack.enter_context(dial(port)) for _ in range(20)]
        assert strangers[0].recv(1 << 10).endswith(b"\n")  # the greeting
        assert strangers[0].recv(1) == b""  # the oldest made room
        join_as(1, 2, port)
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
        join_as(1, 2, port)
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
