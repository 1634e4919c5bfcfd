"""Sites of different numbers of processes: each exchanges with those that hold the same shards."""

import contextlib
from concurrent.futures import ThreadPoolExecutor

import jax
import numpy as np
import pytest
from support.ports import free_port
from support.processes import PATIENCE_SECONDS, wait_until
from support.thread_talk import SharedTalk, ThreadTalk

from geojax.errors import RunError, UserError
from geojax.job.island_env import IslandSettings
from geojax.transport import Membership, MessageKey, Streams
from geojax.transport.carrier import Limits
from geojax.transport.connect import begin, meet_all
from geojax.transport.shards import HeldArray

KEY = MessageKey(step=5, kind="bucket", chunk=1)
SITES = ("east", "west")
WHOLE = np.arange(32, dtype=np.float32).reshape(8, 4)


def member(site, process, processes, coordinator, talk, devices=(), groups=1):
    """A process of a site."""
    island = IslandSettings(site=site, sites=SITES, coordinators=(coordinator,), key="k" * 32)
    return Membership(island, process, processes, {}, groups, 0, devices, talk)


@contextlib.contextmanager
def one_and_two_processes():
    """East, one process of two devices; and west's two, each of one device."""
    coordinator, shared = f"127.0.0.1:{free_port()}", SharedTalk(2)
    alone, devices = ThreadTalk(0, SharedTalk(1)), jax.devices()
    members = [
        member("east", 0, 1, coordinator, alone, devices[:2]),
        member("west", 0, 2, coordinator, ThreadTalk(0, shared), devices[2:3]),
        member("west", 1, 2, coordinator, ThreadTalk(1, shared), devices[3:4]),
    ]

    def start(each):
        joined = begin(each, Limits(Streams(1, 1 << 16), 1 << 20, 20.0))
        return meet_all(joined, 20.0, PATIENCE_SECONDS).transport

    with ThreadPoolExecutor(3) as pool:
        transports = list(pool.map(start, members))
        try:
            yield transports
        finally:
            list(pool.map(lambda each: each.close(), transports))


def of_devices(devices, spec):
    """The sharding of arrays over devices."""
    return jax.sharding.NamedSharding(jax.sharding.Mesh(np.array(devices), ("data",)), spec)


def like(shape, sharding):
    """A float32 array of a sharding."""
    return jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding)


@pytest.fixture
def here():
    """East's shards of an array, and its copies of another."""
    devices = jax.devices()[:2]
    return of_devices(devices, jax.P("data")), of_devices(devices, jax.P())


def test_each_process_gets_the_shards_that_it_holds(here):
    sharded, replicated = here
    with one_and_two_processes() as (east, *west):
        there = [of_devices([jax.devices()[2 + each]], jax.P()) for each in range(2)]
        fetches = [
            process.fetch(0, KEY, [like((4, 4), own), like((3,), own)])
            for process, own in zip(west, there, strict=True)
        ]
        scale = np.array([1.0, 2.0, 3.0], np.float32)
        east.offer(1, KEY, [jax.device_put(WHOLE, sharded), jax.device_put(scale, replicated)])
        for half, fetch in enumerate(fetches):
            rows, copy = fetch.result(PATIENCE_SECONDS)
            np.testing.assert_array_equal(rows, WHOLE[4 * half :][:4])
            np.testing.assert_array_equal(copy, scale)
        assert east.counters[1].offered_messages == 2
        assert east.counters[1].offered_bytes == WHOLE.nbytes + 2 * scale.nbytes

        back = east.fetch(1, KEY, [like((8, 4), sharded), like((3,), replicated)])
        for half, (process, own) in enumerate(zip(west, there, strict=True)):
            assert not back.arrived()
            rows = jax.device_put(WHOLE[4 * half :][:4] + 1, own)
            process.offer(0, KEY, [rows, jax.device_put(scale, own)])
        rows, copy = back.result(PATIENCE_SECONDS)
        assert (rows.sharding, copy.sharding) == (sharded, replicated)
        np.testing.assert_array_equal(rows, WHOLE + 1)
        np.testing.assert_array_equal(copy, scale)
        for transport in (east, *west):
            transport.drain()


def test_what_is_held_in_host_memory_is_divided_too(here):
    sharded, _ = here
    with one_and_two_processes() as (east, *west):
        east.offer_held(1, KEY, HeldArray.of(jax.device_put(WHOLE, sharded)))
        for half, process in enumerate(west):
            own = of_devices([jax.devices()[2 + half]], jax.P())
            (rows,) = process.fetch(0, KEY, [like((4, 4), own)]).result(PATIENCE_SECONDS)
            np.testing.assert_array_equal(rows, WHOLE[4 * half :][:4])


def test_a_site_is_lost_with_any_of_its_processes():
    with one_and_two_processes() as (east, first, second):
        east.note(1, b"to the first")
        wait_until(lambda: not first.notes.empty())
        assert second.notes.empty()
        second.close(failed=True)
        wait_until(lambda: east.links[1].lost_contact is not None)
        with pytest.raises(RunError, match=r"site west \(process 1, .*ended with an error"):
            east.check()
        assert not east.links[1].finished
        assert east.links[1].is_lost
        first.check()


@pytest.mark.parametrize(
    ("own", "there", "process", "wanted"),
    [(1, 4, 0, [0, 1, 2, 3]), (2, 4, 1, [2, 3]), (4, 2, 3, [1]), (4, 1, 2, [0]), (2, 2, 1, [1])],
)
def test_a_process_exchanges_with_all_that_hold_its_shards(own, there, process, wanted):
    members = member("east", process, own, "here:1", None)
    assert list(members.counterparts(1, there)) == wanted


def test_groups_keep_to_themselves():
    members = member("east", 3, 4, "here:1", None, groups=2)
    assert [list(members.counterparts(group, 8)) for group in (2, 3)] == [[2, 3], [6, 7]]


@pytest.mark.parametrize(("own", "there", "groups"), [(2, 3, 1), (3, 2, 1), (4, 3, 2), (2, 1, 2)])
def test_numbers_of_processes_that_do_not_fit_are_refused(own, there, groups):
    members = member("east", 0, own, "here:1", None, groups=groups)
    told = f"site east has {own} processes and site west {there}: start equally many"
    with pytest.raises(UserError, match=told):
        members.counterparts(groups, there)
