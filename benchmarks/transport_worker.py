"""One process of one site in `benchmarks/transport.py`; prints its figures as JSON."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ |= {"JAX_PLATFORMS": "cpu", "NPROC": "32"}

import jax
import jax.numpy as jnp
import numpy as np

from geojax.job.island_env import IslandSettings
from geojax.transport import Membership, MessageKey, connect, streams_for

SITES = ("east", "west")
WARM_UP = 20
RATE_BYTES, TICK_BYTES = 8 << 20, 1_000_000
"""Bytes of the messages of all processes of a site together."""
LIMIT_BYTES = 1 << 28
SAMPLES = 10


class Transported:
    """Messages through geojax's transport: each process exchanges its shard of a global array."""

    def __init__(self, work: dict[str, Any]):
        self.other = 1 - work["site"]
        island = IslandSettings(
            site=SITES[work["site"]],
            sites=SITES,
            coordinators=(work["coordinator"],),
            key="benchmark-of-transports",
        )
        members = Membership(island, work["process"], work["processes"], {})
        streams = streams_for(work["bytes_per_second"] / work["processes"])
        self.transport = connect(members, streams, LIMIT_BYTES)
        mesh = jax.sharding.Mesh(np.array(jax.devices()), ("data",))
        self.sharding = jax.sharding.NamedSharding(mesh, jax.P("data"))
        self.add = jax.jit(jnp.add)
        self.fetches: list[Any] = []
        self.sent = 0

    def begin(self, size: int) -> None:
        shape = (size // 4 * jax.process_count(),)
        self.base = jax.make_array_from_callback(
            shape, self.sharding, lambda index: np.zeros(shape, np.float32)[index]
        )
        self.like = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=self.sharding)

    def ask(self) -> None:
        key = MessageKey(self.sent, "bucket")
        self.fetches.append(self.transport.fetch(self.other, key, [self.like]))

    def send(self) -> None:
        value = self.add(self.base, np.float32(self.sent))
        self.transport.offer(self.other, MessageKey(self.sent, "bucket"), [value])
        self.sent += 1

    def receive(self) -> float:
        (array,) = self.fetches.pop(0).result()
        return float(array.addressable_shards[0].data[-1])

    def close(self) -> None:
        self.transport.drain()
        self.transport.close()


class RawSocket:
    """The baseline: one TCP connection, one thread that sends and one that receives."""

    def __init__(self, work: dict[str, Any]):
        host, _, port = work["coordinator"].rpartition(":")
        address = (host, int(port) + 1 + work["process"])
        if work["site"] == 0:
            with socket.create_server(address) as listener:
                self.socket, _ = listener.accept()
        else:
            deadline = time.monotonic() + 60
            while True:
                try:
                    self.socket = socket.create_connection(address)
                    break
                except OSError:
                    if time.monotonic() > deadline:
                        raise
                    time.sleep(0.1)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sent = 0
        self.outgoing = threading.Semaphore(0)
        self.incoming = threading.Semaphore(0)
        self.ready: list[float] = []

    def begin(self, size: int) -> None:
        self.payload = np.zeros(size // 4, np.float32)

    def run(self, steps: int) -> None:
        """Start the two threads for so many messages."""
        threading.Thread(target=self._send, args=(steps, self.sent), daemon=True).start()
        threading.Thread(target=self._receive, args=(steps,), daemon=True).start()

    def _send(self, steps: int, first: int) -> None:
        for step in range(steps):
            self.outgoing.acquire()
            self.socket.sendall(self.payload + np.float32(first + step))

    def _receive(self, steps: int) -> None:
        for _ in range(steps):
            buffer = np.empty_like(self.payload)
            unread = memoryview(buffer).cast("B")
            while unread:
                unread = unread[self.socket.recv_into(unread) :]
            self.ready.append(float(buffer[-1]))
            self.incoming.release()

    def ask(self) -> None:
        pass

    def send(self) -> None:
        self.sent += 1
        self.outgoing.release()

    def receive(self) -> float:
        self.incoming.acquire()
        return self.ready.pop(0)

    def close(self) -> None:
        self.socket.shutdown(socket.SHUT_WR)
        self.socket.recv(1)


def resources() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return {
        "resident_megabytes": pages * os.sysconf("SC_PAGE_SIZE") / 1e6,
        "threads": len(os.listdir("/proc/self/task")),
        "open_files": len(os.listdir("/proc/self/fd")),
    }


def processor_seconds() -> float:
    """Processor time of this process and of its children."""
    total = time.process_time()
    for child in Path(f"/proc/self/task/{os.getpid()}/children").read_text().split():
        fields = Path(f"/proc/{child}/stat").read_text().split()
        total += (int(fields[13]) + int(fields[14])) / os.sysconf("SC_CLK_TCK")
    return total


def exchange(side: Any, size: int, steps: int, window: int, compute: Any = None) -> dict[str, Any]:
    """Exchange `steps` messages of `size` bytes both ways with at most `window` in flight."""
    side.begin(size)
    if isinstance(side, RawSocket):
        side.run(steps)
    first, waited, samples = side.sent, 0.0, []
    processor, start = processor_seconds(), time.monotonic()
    for step in range(steps + window):
        if step < steps:
            side.ask()
            if compute:
                compute()
            side.send()
        if step >= window:
            asked = time.monotonic()
            value = side.receive()
            waited += time.monotonic() - asked
            assert value == first + step - window, "messages arrive in order and whole"
        if step < steps and step % max(1, steps // SAMPLES) == 0:
            samples.append(resources())
    seconds = time.monotonic() - start
    return {
        "seconds": seconds,
        "waited_seconds": waited,
        "bits_per_second": 8 * size * steps / seconds,
        "seconds_per_message": seconds / steps,
        "processor_seconds_per_gigabyte": (processor_seconds() - processor)
        / (2 * size * steps / 1e9),
        "resources": samples,
    }


def computation(seconds: float) -> Callable[[], Any]:
    """Return something that computes about so long."""
    matrix = jnp.full((256, 256), 1 / 256, jnp.float32)

    @jax.jit
    def multiply(matrix: jax.Array, times: int) -> jax.Array:
        return jax.lax.fori_loop(0, times, lambda _, product: product @ matrix, matrix)

    multiply(matrix, 100).block_until_ready()
    start = time.monotonic()
    multiply(matrix, 1000).block_until_ready()
    times = max(1, round(1000 * seconds / (time.monotonic() - start)))
    return lambda: multiply(matrix, times).block_until_ready()


def beside_computation(
    side: Any, size: int, ticks: int, window: int, compute: Callable[[], Any]
) -> dict[str, float]:
    """Time ticks of computation alone, then with a message both ways in each."""
    start = time.monotonic()
    for _ in range(ticks):
        compute()
    alone = (time.monotonic() - start) / ticks
    figures = exchange(side, size, ticks, window, compute)
    return {
        "compute_seconds": alone,
        "tick_seconds": figures["seconds_per_message"],
        "waited_seconds": figures["waited_seconds"] / ticks,
    }


def main() -> None:
    work = json.loads(sys.argv[1])
    if work["processes"] > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(work["site_coordinator"], work["processes"], work["process"])
    side = {"transport": Transported, "socket": RawSocket}[work["side"]](work)
    share = 1 / work["processes"]
    exchange(side, 1 << 20, WARM_UP, 4)
    figures: dict[str, Any] = {
        "rate": exchange(side, int(RATE_BYTES * share), work["rate_messages"], 4),
        "ticks": [],
    }
    compute = computation(work["tick_seconds"])
    for window in work["windows"]:
        rounds = [
            beside_computation(side, int(TICK_BYTES * share), work["ticks"], window, compute)
            for _ in range(work["rounds"])
        ]
        figures["ticks"].append({"window": window, "rounds": rounds})
    figures["endurance"] = exchange(side, int(TICK_BYTES * share), work["steps"], 4)
    side.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
