"""Sites of one process: messages, the byte limit, counters and the end."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.processes import PATIENCE_SECONDS, wait_until

from geojax.errors import RunError, UserError
from geojax.transport import MessageKey, loopback

KEY = MessageKey(step=3, kind="activation", microbatch=1)


def mesh_of(devices):
    return jax.sharding.Mesh(np.array(devices), ("data",))


def like(mesh, shape=(8, 4), dtype=jnp.float32):
    return jax.ShapeDtypeStruct(
        shape, dtype, sharding=jax.sharding.NamedSharding(mesh, jax.P("data"))
    )


def array_on(mesh, shape=(8, 4)):
    return jax.device_put(
        jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape), like(mesh).sharding
    )


@pytest.fixture
def meshes():
    devices = jax.devices()
    return mesh_of(devices[:2]), mesh_of(devices[2:4])


@pytest.mark.parametrize("asked_first", [True, False])
def test_an_array_comes_to_the_other_mesh(meshes, asked_first):
    east, west = loopback(2)
    sent = array_on(meshes[0])
    if asked_first:
        fetch = west.fetch(0, KEY, [like(meshes[1])])
        assert not fetch.arrived()
    east.offer(1, KEY, [sent])
    if not asked_first:
        fetch = west.fetch(0, KEY, [like(meshes[1])])
    (got,) = fetch.result()
    assert fetch.arrived()
    assert got.sharding == like(meshes[1]).sharding
    np.testing.assert_array_equal(got, sent)


def test_a_sender_may_donate_what_was_acknowledged(meshes):
    east, west = loopback(2)
    sent = array_on(meshes[0])
    east.offer(1, KEY, [sent])
    assert east.counters[1].messages_in_flight == 1
    (got,) = west.fetch(0, KEY, [like(meshes[0])]).result()
    assert east.counters[1].messages_in_flight == 0
    want = np.array(sent)
    jax.jit(lambda x: x + 1, donate_argnums=0)(sent).block_until_ready()
    np.testing.assert_array_equal(got, want)


def test_an_offer_waits_for_room(meshes):
    size = array_on(meshes[0]).nbytes
    east, west = loopback(2, limit_bytes=2 * size)
    keys = [KEY._replace(microbatch=microbatch) for microbatch in range(3)]
    sender = threading.Thread(
        target=lambda: [east.offer(1, key, [array_on(meshes[0])]) for key in keys]
    )
    sender.start()
    wait_until(lambda: east.counters[1].bytes_in_flight == 2 * size)
    sender.join(0.3)
    assert sender.is_alive()
    assert east.counters[1].bytes_in_flight == 2 * size
    west.fetch(0, keys[0], [like(meshes[1])]).result()
    sender.join(PATIENCE_SECONDS)
    assert not sender.is_alive()
    assert east.counters[1].offer_wait_seconds > 0


def test_a_message_beyond_the_limit_is_refused(meshes):
    east, _ = loopback(2, limit_bytes=100)
    with pytest.raises(UserError, match=r"activation of step 3.* 128 bytes.* raise the limit"):
        east.offer(1, KEY, [array_on(meshes[0])])


def test_what_never_comes_is_named(meshes):
    _, west = loopback(2)
    with pytest.raises(RunError, match=r"activation of step 3, microbatch 1.* from site 0 within"):
        west.fetch(0, KEY, [like(meshes[1])]).result(timeout_seconds=0.1)


def test_a_site_that_left_is_named(meshes):
    east, west, north = loopback(3)
    fetch = north.fetch(1, KEY, [like(meshes[1])])
    for site in (0, 2):
        west.offer(site, KEY._replace(kind="gradient"), [array_on(meshes[1])])
    west.close()
    with pytest.raises(RunError, match="site 1 has left"):
        fetch.result()
    with pytest.raises(RunError, match="site 1 has left"):
        east.offer(1, KEY, [array_on(meshes[0])])


def test_a_site_that_has_nothing_in_flight_leaves_without_an_error(meshes):
    east, west = loopback(2)
    east.offer(1, KEY, [array_on(meshes[0])])
    west.fetch(0, KEY, [like(meshes[1])]).result()
    east.drain()
    east.close()
    west.check()
    with pytest.raises(RunError, match="site 0 has finished without gradient of step 4"):
        west.fetch(0, MessageKey(4, "gradient"), [like(meshes[1])]).result()
