"""A site that is killed in mid-transfer and returns, again and again, beside one that is not.

As a program it starts the processes of that site: each is a copy of a process that has imported JAX
already, so that a return takes a fraction of a second.
"""

import collections
import contextlib
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path
from typing import NamedTuple

if __name__ == "__main__":  # for JAX, before it is imported
    os.environ.update(JAX_PLATFORMS="cpu", NPROC="8", XLA_FLAGS="")

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from geojax.errors import RunError
from geojax.job.island_env import IslandSettings
from geojax.transport import Membership, MessageKey, Streams
from geojax.transport.carrier import CarrierTransport, Limits
from geojax.transport.connect import Joined, begin
from geojax.transport.endpoint import ProcessOfSite

SITES = ("east", "west", "north")
KILLED, UNDISTURBED, SURVIVOR = range(3)
WINDOW = 3
"""Messages in flight each way."""
LIMITS = Limits(Streams(2, 1 << 18), 1 << 28, 20.0)


class Site(NamedTuple):
    """An end of a transport, and how others reach it."""

    joined: Joined
    transport: CarrierTransport
    endpoint: object

    @classmethod
    def start(cls, site):
        """Open its port."""
        island = IslandSettings(
            site=SITES[site], sites=SITES, coordinators=("127.0.0.1:1",), key="k" * 32
        )
        joined = begin(Membership(island, 0, 1, {}), LIMITS)
        return cls(joined, joined.transport, joined.endpoint)

    def take_up(self, other, endpoint):
        """Join it to another site."""
        self.transport.take_up(self.joined.peers(other, [ProcessOfSite("here", endpoint)]))


class Exchange:
    """Messages both ways between two sites, each with values of its own."""

    def __init__(self, transport, other, size):
        self._transport, self._other = transport, other
        self._values = np.arange(size // 4, dtype=np.float32)
        device = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        self._like = jax.ShapeDtypeStruct(self._values.shape, np.float32, sharding=device)
        self._numbers = itertools.count()
        self._fetches = collections.deque()

    def step(self):
        """Offer a message, and fetch one; compare the oldest that is under way, if all are."""
        key = MessageKey(next(self._numbers), "values")
        values = jax.device_put(self._expected(self._transport.site, key.step), jax.devices()[0])
        self._fetches.append((key.step, self._transport.fetch(self._other, key, [self._like])))
        self._transport.offer(self._other, key, [values])
        if len(self._fetches) > WINDOW:
            number, fetch = self._fetches.popleft()
            (got,) = fetch.result()
            np.testing.assert_array_equal(got, self._expected(self._other, number))

    def go_on(self):
        """Exchange messages until the other site is lost."""
        while True:
            self.step()

    def _expected(self, site, number):
        return self._values + np.float32(1000 * number + site)


class Resources(NamedTuple):
    """Memory and handles of this process."""

    resident_bytes: int
    open_files: int
    threads: int

    @classmethod
    def now(cls):
        """Look at them."""
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return cls(
            pages * os.sysconf("SC_PAGE_SIZE"),
            len(os.listdir("/proc/self/fd")),
            threading.active_count(),
        )


class Kills(NamedTuple):
    """Figures of kills in mid-transfer."""

    resources: list
    """Before each kill, while all sites exchange messages."""
    within_a_message: int
    """Kills at which a message had come in part."""
    detection_seconds: list
    undisturbed_messages: int
    """Messages that were exchanged with the third site meanwhile."""


def kill_and_return(times, size, seed=0):
    """Kill a peer in mid-transfer and take it up again, so often, beside an undisturbed site.

    Raises:
        AssertionError: some bytes differ, or the third site was disturbed.
    """
    delays = random.Random(seed)
    survivor, undisturbed = Site.start(SURVIVOR), Site.start(UNDISTURBED)
    survivor.take_up(UNDISTURBED, undisturbed.endpoint.text())
    undisturbed.take_up(SURVIVOR, survivor.endpoint.text())
    ends = [
        Exchange(one.transport, other, 1 << 16)
        for one, other in ((survivor, UNDISTURBED), (undisturbed, SURVIVOR))
    ]
    messages, failures, over = itertools.count(), [], threading.Event()

    def exchange_until_it_is_over():
        try:
            while not over.is_set():
                for end in ends:
                    end.step()
                next(messages)
                time.sleep(0.002)
        except Exception as error:
            failures.append(error)

    begun, killed_at = [], []

    def is_within_a_message():
        arriving = list(survivor.transport.links[KILLED].lanes[0].link._inbox._arriving.values())
        return any(0 < each.missing < size for each in arriving)

    def kill_within_a_message(process):
        deadline = time.monotonic() + 1.0
        while not (begun_one := is_within_a_message()) and time.monotonic() < deadline:
            time.sleep(1e-4)
        begun.append(begun_one)
        os.kill(process, signal.SIGKILL)
        killed_at.append(time.monotonic())

    beside = threading.Thread(target=exchange_until_it_is_over)
    kills = Kills([], 0, [], 0)
    with _nursery() as born:
        beside.start()
        try:
            for _ in range(times):
                process, endpoint = born(survivor.endpoint.text(), size)
                survivor.take_up(KILLED, endpoint)
                exchange = Exchange(survivor.transport, KILLED, size)
                for _ in range(WINDOW + 2):
                    exchange.step()
                kills.resources.append(Resources.now())
                killer = threading.Timer(
                    delays.uniform(0.0, 0.05), kill_within_a_message, (process,)
                )
                killer.start()
                with pytest.raises(RunError, match="site east"):
                    exchange.go_on()
                kills.detection_seconds.append(time.monotonic() - killed_at[-1])
                killer.join()
                assert not failures, failures
        finally:
            over.set()
            beside.join()
            for site in (survivor, undisturbed):
                site.transport.close(failed=True)
    assert not failures, failures
    return kills._replace(within_a_message=sum(begun), undisturbed_messages=next(messages))


@contextlib.contextmanager
def _nursery():
    """Let processes of the site that is killed be born."""
    nursery = subprocess.Popen(
        [sys.executable, __file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )

    def born(endpoint, size):
        print(json.dumps([endpoint, size]), file=nursery.stdin, flush=True)
        return json.loads(nursery.stdout.readline())

    try:
        yield born
    finally:
        nursery.stdin.close()
        nursery.wait()


def _be_born():
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    warnings.simplefilter("ignore")  # JAX warns of threads, which it has not started yet
    for line in sys.stdin:
        if os.fork() == 0:
            _live(*json.loads(line))


def _live(endpoint, size):
    site = Site.start(KILLED)
    print(json.dumps([os.getpid(), site.endpoint.text()]), flush=True)
    site.take_up(SURVIVOR, endpoint)
    exchange = Exchange(site.transport, SURVIVOR, size)
    jnp.zeros(1).block_until_ready()
    exchange.go_on()


if __name__ == "__main__":
    _be_born()
