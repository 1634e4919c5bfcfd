"""The carrier's transport between two meshes of one process, as two sites."""

import contextlib
import gc
import re
import socket
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.ports import free_port
from support.processes import PATIENCE_SECONDS, wait_until
from support.tcp_resets import connections, reset

from geojax.errors import MissingProcessesError, RunError, UserError
from geojax.job.island_env import IslandSettings
from geojax.transport import Membership, MessageKey, Streams, connect, streams_for

KEY = MessageKey(step=5, kind="bucket", chunk=1)
SMALL = Streams(4, 1 << 16)


def island(names, site, coordinator, key="k" * 32):
    return IslandSettings(site=names[site], sites=names, coordinators=(coordinator,), key=key)


@contextlib.contextmanager
def joined_sites(
    names=("east", "west"),
    limit_bytes=1 << 20,
    keys=None,
    settings=None,
    silence_seconds=20.0,
    timeout_seconds=PATIENCE_SECONDS,
    goes_on=False,
):
    settings = settings or [{}] * len(names)
    coordinator = f"127.0.0.1:{free_port()}"

    def start(site):
        key = (keys or ["k" * 32] * len(names))[site]
        members = Membership(island(names, site, coordinator, key), 0, 1, settings[site])
        return connect(
            members, SMALL, limit_bytes, silence_seconds, timeout_seconds, goes_on=goes_on
        )

    with ThreadPoolExecutor(len(names)) as pool:
        transports = list(pool.map(start, range(len(names))))
        try:
            yield transports
        finally:
            list(pool.map(lambda each: each.close(), transports))


@pytest.fixture
def like():
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("data",))
    return jax.ShapeDtypeStruct(
        (8, 4), jnp.float32, sharding=jax.sharding.NamedSharding(mesh, jax.P("data"))
    )


def filled(like, value):
    return jax.device_put(jnp.full(like.shape, value, like.dtype), like.sharding)


def test_a_process_exchanges_with_its_counterpart_in_each_group_of_each_site():
    members = Membership(island(("east", "west"), 1, "east:1"), 3, 4, {}, groups=2)
    assert members.group == 3
    assert [list(members.counterparts(group, 4)) for group in range(4)] == [[1], [3], [1], [3]]


def test_three_sites_exchange_and_finish(like):
    with joined_sites(("east", "west", "north")) as sites:
        scale = jax.ShapeDtypeStruct((), jnp.bfloat16, sharding=like.sharding.update(spec=jax.P()))
        fetches = {
            (here, there): sites[here].fetch(there, KEY, [like, scale])
            for here in range(3)
            for there in range(3)
            if here != there
        }
        assert not any(fetch.arrived() for fetch in fetches.values())
        for here, there in fetches:
            sites[here].offer(there, KEY, [filled(like, 10 * here + there), filled(scale, here)])
        for (here, there), fetch in fetches.items():
            got, got_scale = fetch.result(PATIENCE_SECONDS)
            np.testing.assert_array_equal(got, filled(like, 10 * there + here))
            assert got.sharding == like.sharding
            assert got_scale == there
        for site in sites:
            site.drain()
        for here, there in fetches:
            counters = sites[here].counters[there]
            assert (counters.acknowledged_bytes, counters.messages_in_flight) == (128 + 2, 0)
        sites[1].close()
        sites[0].check()  # a site that has finished is not lost
        with pytest.raises(RunError, match=r"site west .* has finished without bucket of step 6"):
            sites[0].fetch(1, KEY._replace(step=6), [like]).result()


def test_offers_wait_for_acknowledgments(like):
    with joined_sites(limit_bytes=300) as (east, west):
        keys = [KEY._replace(part=part) for part in range(6)]
        sender = threading.Thread(
            target=lambda: [east.offer(1, key, [filled(like, 1)]) for key in keys]
        )
        sender.start()
        wait_until(lambda: east.counters[1].bytes_in_flight == 256)
        sender.join(0.3)
        assert sender.is_alive()
        assert east.counters[1].bytes_in_flight == 256
        for key in keys:
            west.fetch(0, key, [like]).result(PATIENCE_SECONDS)
        sender.join(PATIENCE_SECONDS)
        east.drain()
        assert east.counters[1].acknowledged_messages == 6


def test_a_message_is_here_before_one_that_was_asked_for_first(like):
    with joined_sites() as (east, west):
        first, second = (west.fetch(0, KEY._replace(part=part), [like]) for part in range(2))
        east.offer(1, KEY._replace(part=1), [filled(like, 1)])
        second.result(PATIENCE_SECONDS)
        assert not first.arrived()


def test_another_shape_is_never_taken(like):
    with joined_sites() as (east, west):
        east.offer(1, KEY, [filled(like, 1)])
        other = jax.ShapeDtypeStruct((8, 8), like.dtype, sharding=like.sharding)
        with pytest.raises(RunError, match=r"bucket of step 5.* did not come from site east"):
            west.fetch(0, KEY, [other]).result(0.3)


def test_a_site_that_ends_early_is_named(like):
    with joined_sites() as (east, west):
        fetch = west.fetch(0, KEY, [like])
        for one, other in ((east, 1), (west, 0)):
            one.offer(other, KEY._replace(part=1), [filled(like, 1)])
        east.close()
        with pytest.raises(RunError, match=r"lost .*site east \(process 0, host"):
            fetch.result(PATIENCE_SECONDS)
        with pytest.raises(RunError, match="site east"):
            west.drain()


def test_a_site_that_finishes_without_its_messages_is_named(like):
    with joined_sites() as (east, west):
        east.offer(1, KEY, [filled(like, 1)])
        west.close()
        with pytest.raises(RunError, match=r"west .* has finished without fetching 1 messages"):
            east.drain()


def test_a_silent_site_is_named(like, monkeypatch):
    monkeypatch.setattr("geojax.transport.control.heartbeat_seconds", lambda route: 1e3)
    with (
        joined_sites(silence_seconds=1.0) as (_, west),
        pytest.raises(RunError, match=r"site east .* has been silent for 1 seconds"),
    ):
        west.fetch(0, KEY, [like]).result(PATIENCE_SECONDS)


def test_a_site_that_ends_with_an_error_is_lost(like):
    with joined_sites() as (east, west):
        fetch = west.fetch(0, KEY, [like])
        east.close(failed=True)
        with pytest.raises(RunError, match=r"lost the connection to site east \(process 0, host"):
            fetch.result(PATIENCE_SECONDS)


def test_what_a_lost_site_was_offered_is_freed():
    numbers = np.zeros(1 << 16, np.uint8)
    aligned = numbers[-numbers.ctypes.data % 64 :][: 1 << 15]
    with joined_sites() as (east, west):
        device = jax.devices()[0]
        shared = jax.device_put(aligned, device, may_alias=True)
        assert shared.unsafe_buffer_pointer() == aligned.ctypes.data, "nothing is copied"
        east.offer(1, KEY, [shared])
        kept = weakref.ref(numbers)
        del shared, aligned, numbers
        gc.collect()
        assert kept() is not None
        west.close(failed=True)
        with pytest.raises(RunError, match="lost the connection to site west"):
            east.drain()
        wait_until(lambda: gc.collect() is not None and kept() is None)
        for use in (lambda: east.offer(1, KEY, []), lambda: east.fetch(1, KEY, [])):
            with pytest.raises(RunError, match="lost the connection to site west"):
                use()


def test_connections_that_are_reset_again_and_again_lose_nothing(like):
    before = connections()
    big = jax.ShapeDtypeStruct((1 << 12, 4), jnp.float32, sharding=like.sharding)
    with joined_sites(limit_bytes=1 << 26) as sites:
        resets, count = 0, 60
        for step in range(count):
            for site, other in ((0, 1), (1, 0)):
                sites[site].offer(other, KEY._replace(part=step), [filled(big, 100 * step + site)])
        fetches = {}
        for step in range(count):
            for site, other in ((0, 1), (1, 0)):
                fetches[site, step] = sites[site].fetch(other, KEY._replace(part=step), [big])
            if step % 10 == 5:
                resets += reset(connections() - before)
        for (site, step), fetch in fetches.items():
            (got,) = fetch.result(PATIENCE_SECONDS)
            np.testing.assert_array_equal(got, filled(big, 100 * step + 1 - site))
        assert resets > 6
        for site in sites:
            site.drain()
            site.check()


def test_a_small_message_does_not_wait_for_a_large_one(like):
    large = jax.ShapeDtypeStruct((1 << 22, 4), jnp.float32, sharding=like.sharding)
    with joined_sites(limit_bytes=1 << 28) as (east, west):
        first = west.fetch(0, KEY, [large])
        second = west.fetch(0, KEY._replace(part=1), [like])
        value, small = filled(large, 1).block_until_ready(), filled(like, 2).block_until_ready()
        east.offer(1, KEY, [value])
        east.offer(1, KEY._replace(part=1), [small])
        second.result(PATIENCE_SECONDS)
        assert not first.arrived()
        np.testing.assert_array_equal(first.result(PATIENCE_SECONDS)[0], value)


def test_what_has_arrived_is_never_written_again(like):
    with joined_sites() as (east, west):
        arrived = []
        for part in range(20):
            key = KEY._replace(part=part)
            fetch = west.fetch(0, key, [like])
            east.offer(1, key, [filled(like, part)])
            arrived += fetch.result(PATIENCE_SECONDS)
        for part, array in enumerate(arrived):
            np.testing.assert_array_equal(array, filled(like, part))


def test_a_message_of_no_bytes_and_one_of_many_shards_arrive(like):
    empty = jax.ShapeDtypeStruct((0, 4), jnp.float32, sharding=like.sharding)
    many = [
        jax.ShapeDtypeStruct((2 + 2 * number,), jnp.int8, sharding=like.sharding)
        for number in range(300)
    ]
    with joined_sites() as (east, west):
        nothing = west.fetch(0, KEY, [empty])
        numbers = west.fetch(0, KEY._replace(part=1), many)
        ones = [jax.device_put(np.ones(each.shape, each.dtype), each.sharding) for each in many]
        east.offer(1, KEY, [filled(empty, 0)])
        east.offer(1, KEY._replace(part=1), ones)
        assert nothing.result(PATIENCE_SECONDS)[0].shape == (0, 4)
        assert all(np.asarray(array).all() for array in numbers.result(PATIENCE_SECONDS))


def test_a_lost_site_disturbs_no_other(like):
    with joined_sites(("east", "west", "north")) as (east, west, north):
        north.close(failed=True)
        with pytest.raises(RunError, match="site north"):
            east.fetch(2, KEY, [like]).result(PATIENCE_SECONDS)
        with pytest.raises(RunError, match="site north"):
            east.check()
        fetch = west.fetch(0, KEY, [like])
        east.offer(1, KEY, [filled(like, 3)])
        np.testing.assert_array_equal(fetch.result(PATIENCE_SECONDS)[0], filled(like, 3))


def test_sites_go_on_without_one_that_is_given_up(like):
    with joined_sites(("east", "west", "north"), goes_on=True) as (east, west, north):
        east.offer(2, KEY, [filled(like, 1)])
        north.close(failed=True)
        for site in (east, west):
            (link,) = [lane.link for lane in site.links[2].lanes]
            wait_until(lambda link=link: link.control.lost is not None)
            site.give_up(2)
            assert set(site.counters) == {1 - site.site}
            site.check()
        west.offer(0, KEY, [filled(like, 5)])
        (got,) = east.fetch(1, KEY, [like]).result(PATIENCE_SECONDS)
        np.testing.assert_array_equal(got, filled(like, 5))
        west.drain()
        west.close()
        assert east.links[1].lanes[0].link.control.over.wait(PATIENCE_SECONDS)
        assert east.links[1].finished, "which is no failure"


def test_a_silent_site_is_not_lost_where_the_caller_decides(like, monkeypatch):
    with joined_sites(goes_on=True) as (east, _):
        monkeypatch.setattr(type(east.links[1].lanes[0].link.control), "silent_seconds", 100.0)
        east.check()


def test_notes_of_all_sites_come_in_the_order_of_each():
    with joined_sites(("east", "west", "north"), goes_on=True) as (east, west, north):
        for number in range(20):
            west.note(0, b"west %d" % number)
            north.note(0, b"north %d" % number)
        wait_until(lambda: east.notes.qsize() == 40)
        came = [east.notes.get() for _ in range(40)]
    for site, name in ((1, b"west"), (2, b"north")):
        wanted = [name + b" %d" % number for number in range(20)]
        assert [note for sender, note in came if sender == site] == wanted


def test_offers_of_an_earlier_membership_are_withdrawn_unless_they_are_asked_for(like):
    first, second = (KEY._replace(membership_id=1, part=part) for part in range(2))
    with joined_sites(limit_bytes=300, goes_on=True) as (east, west):
        asked = west.fetch(0, first, [like])
        (link,) = [lane.link for lane in east.links[1].lanes]
        wait_until(lambda: link._outbox._asked)
        with link._outbox.changed:  # nothing leaves yet
            for key in (first, second):
                east.offer(1, key, [filled(like, 1)])
            east.withdraw(2)
            assert east.counters[1].messages_in_flight == 1
        east.offer(1, KEY._replace(membership_id=2), [filled(like, 3)])
        (got,) = west.fetch(0, KEY._replace(membership_id=2), [like]).result(PATIENCE_SECONDS)
        np.testing.assert_array_equal(got, filled(like, 3))
        asked.result(PATIENCE_SECONDS)
        east.drain()
        assert not west.fetch(0, second, [like]).wait(0.2)


def test_an_offer_that_is_never_computed_ends_its_link_with_the_reason():
    with joined_sites(("east", "west", "north")) as (east, _, _):
        east.links[1].lanes[0].link.fail_to_depart(KEY, "it was deleted")
        told = f"cannot send {KEY} to site west .*: it was deleted"
        with pytest.raises(RunError, match=told):
            east.offer(1, KEY, [])
        east.links[2].check()


def test_what_is_waited_for_is_known(like):
    with joined_sites(limit_bytes=128) as (east, west):
        fetch, late = west.fetch(0, KEY, [like]), KEY._replace(part=1)
        with ThreadPoolExecutor(2) as pool:
            result = pool.submit(fetch.result, PATIENCE_SECONDS)
            wait_until(lambda: west.missing_from_peer() is not None)
            waits_for = rf"transport: {KEY} did not come from site east \(process 0, host \S+\)$"
            assert re.match(waits_for, west.missing_from_peer())
            east.offer(1, KEY, [filled(like, 1)])
            result.result()
            east.offer(1, KEY._replace(part=2), [filled(like, 1)])
            offer = pool.submit(east.offer, 1, late, [filled(like, 1)])
            wait_until(lambda: east.missing_from_peer() is not None)
            assert re.search(rf"{late} .* fetched by site west", east.missing_from_peer())
            west.fetch(0, KEY._replace(part=2), [like]).result(PATIENCE_SECONDS)
            offer.result()
        west.fetch(0, late, [like]).result(PATIENCE_SECONDS)
        assert east.missing_from_peer() is west.missing_from_peer() is None


def test_sites_that_do_not_come_are_named():
    sites = ("east", "west", "north")
    members = Membership(island(sites, 0, f"127.0.0.1:{free_port()}"), 0, 1, {})
    with pytest.raises(MissingProcessesError, match=r"process 1, 2 \(site west, site north\)$"):
        connect(members, SMALL, 1 << 20, timeout_seconds=0.2)


def test_another_key_is_refused():
    with (
        pytest.raises(MissingProcessesError, match=r"with another key came from .* \(site west\)"),
        joined_sites(keys=["k" * 32, "l" * 32], timeout_seconds=1.0),
    ):
        pass


def test_sites_with_other_settings_are_refused_with_the_first_that_differs():
    east = {"geojax version": "1", "mesh.data": 2, "batch.microbatches": 4, "steps": 10}
    west = east | {"batch.microbatches": 8, "steps": 20}
    told = (
        r"site (east .* another batch.microbatches than site west, which has 8|"
        r"west .* another batch.microbatches than site east, which has 4); give all sites the same"
    )
    with pytest.raises(UserError, match=told), joined_sites(settings=[east, west]):
        pass


def reached_at(monkeypatch, port):
    """Let all processes seem to listen at one port."""
    monkeypatch.setattr("geojax.transport.endpoint.Endpoint.address", ("127.0.0.1", port))


def test_a_peer_that_refuses_connections_at_the_start_is_named_with_its_port(monkeypatch):
    reached_at(monkeypatch, free_port())
    told = r"(east cannot reach west|west cannot reach east):\d+, site \w+ \(.*\) at 127\.0\.0\.1"
    with pytest.raises(RunError, match=told + r" \(refused\); is the tunnel up"), joined_sites():
        pass


def test_a_peer_that_does_not_answer_at_the_start_is_named_with_its_port(monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        reached_at(monkeypatch, silent.getsockname()[1])
        told = r"cannot reach \w+:\d+, .* \(no answer, for 1 s\); is the tunnel up"
        with pytest.raises(RunError, match=told), joined_sites(silence_seconds=1.0):
            pass


def test_streams_follow_the_link():
    assert streams_for(125e6) == Streams(1, 1 << 19)
    assert streams_for(1e6) == Streams(1, 1 << 18)
    assert streams_for(1.25e9) == Streams(3, 1 << 23)
    assert streams_for(12.5e9) == Streams(8, 1 << 23)


def test_a_process_that_ends_while_it_fetches_ends_well():
    script = f"""
import sys
sys.path[:0] = {[str(Path(__file__).parent), str(Path(__file__).parents[2])]!r}
import jax, jax.numpy as jnp
from test_carrier import KEY, joined_sites
fetched = jax.ShapeDtypeStruct(
    (8,), jnp.float32, sharding=jax.sharding.NamedSharding(jax.make_mesh((1,), "x"), jax.P("x"))
)
sites = joined_sites()
_, west = sites.__enter__()
west.fetch(0, KEY, [fetched])
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, timeout=PATIENCE_SECONDS
    )
    assert ended.returncode == 0, ended.stderr
