"""Identifiers, endpoints and shards: what two processes must agree on."""

import base64
import secrets
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from geojax.errors import UserError
from geojax.transport.endpoint import (
    Endpoint,
    ProcessOfSite,
    as_text,
    processes_of,
    require_private,
)
from geojax.transport.message_id import FIRST_ID, Direction, message_id
from geojax.transport.protocol import MessageKey
from geojax.transport.shards import joined, local_shapes, local_shards

KEY = bytes(32)
THERE = Direction((0, 3), (1, 3), "a", "b")
SHARDS = [jax.ShapeDtypeStruct((4, 2), jnp.float32)]


def test_every_fact_of_a_message_changes_its_identifier():
    first = MessageKey(1, "bucket")
    ids = {
        message_id(*facts)
        for facts in (
            (KEY, THERE, first, SHARDS),
            (bytes(31) + b"1", THERE, first, SHARDS),
            *((KEY, THERE._replace(**{name: "c"}), first, SHARDS) for name in THERE._fields),
            (KEY, THERE, first._replace(kind="gradient"), SHARDS),
            *((KEY, THERE, first._replace(**{name: 7}), SHARDS) for name in first._fields[2:]),
            (KEY, THERE, first._replace(step=2), SHARDS),
            (KEY, THERE, first, SHARDS * 2),
            (KEY, THERE, first, [jax.ShapeDtypeStruct((4, 2), jnp.bfloat16)]),
            (KEY, THERE, first, [jax.ShapeDtypeStruct((2, 4), jnp.float32)]),
        )
    }
    assert len(ids) == 16
    assert all(FIRST_ID <= each < 1 << 64 and each % 2 == 0 for each in ids)


SMALL_NUMBERS = st.integers(0, 12)
PROCESSES = st.tuples(SMALL_NUMBERS, SMALL_NUMBERS)
NONCES = st.text("01a', ()", max_size=3)
DIRECTIONS = st.builds(Direction, PROCESSES, PROCESSES, NONCES, NONCES)
KINDS = st.sampled_from(["activation", "cotangent", "bucket", "table", "scalars", "numbers"])
KEYS = st.builds(MessageKey, SMALL_NUMBERS, KINDS, *[SMALL_NUMBERS] * 5)


@given(st.lists(st.tuples(DIRECTIONS, KEYS), max_size=50, unique=True))
def test_messages_that_differ_in_any_fact_have_different_identifiers(messages):
    assert len({message_id(KEY, *message, SHARDS) for message in messages}) == len(messages)


def test_an_endpoint_goes_through_a_hello_as_text():
    own = Endpoint(0, 1, "n", "10.0.0.1", 4, "d")
    assert len(own.text()) < 1024
    assert Endpoint.parse(own.text(), "site west") == own
    for wrong in (None, "", "[]", "{", "[1]"):
        with pytest.raises(UserError, match="site west has joined without an endpoint"):
            Endpoint.parse(wrong, "site west")


def test_the_processes_of_a_large_site_are_one_short_text():
    settings = "abcd" * 60
    endpoints = [
        Endpoint(1, each, secrets.token_hex(8), f"10.0.0.{each % 250}", 1 << 14, settings)
        for each in range(3072)
    ]
    processes = [ProcessOfSite(f"host{each.process}", each.text()) for each in endpoints]
    text = as_text(processes)
    assert len(text) < 40 * len(processes)
    assert processes_of(text, "site west") == tuple(processes)


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        "",
        "no base 64",
        base64.b64encode(b"not compressed").decode(),
        *(base64.b64encode(zlib.compress(each)).decode() for each in (b"", b"[]", b"7", b"[[1]]")),
        base64.b64encode(zlib.compress(b"[" * 100_000)).decode(),
        base64.b64encode(zlib.compress(bytes(1 << 26))).decode(),
    ],
)
def test_what_tells_no_processes_is_refused(wrong):
    with pytest.raises(UserError, match="site west does not say where its processes are"):
        processes_of(wrong, "site west")


@pytest.mark.parametrize("address", ["0.0.0.0", "::", "8.8.8.8", "2a00:1450::1", "224.0.0.1"])
def test_a_public_address_is_refused(address):
    with pytest.raises(UserError, match=r"can be reached from the internet; .*WireGuard"):
        require_private(address)


@pytest.mark.parametrize("address", ["127.0.0.1", "10.77.0.1", "192.168.1.2", "fd00::1", "::1"])
def test_an_address_of_a_tunnel_is_taken(address):
    require_private(address)


@pytest.mark.parametrize(
    ("axes", "distinct"), [(("x", "y"), 8), (("y", "x"), 8), ("x", 2), ((None, "y"), 4), ((), 1)]
)
def test_each_distinct_shard_travels_once(axes, distinct):
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ("x", "y"))
    spec = jax.P(*axes) if isinstance(axes, tuple) else jax.P(axes)
    sharding = jax.sharding.NamedSharding(mesh, spec)
    array = jax.device_put(np.arange(64.0).reshape(8, 8), sharding)
    shards = local_shards(array)
    assert len(shards) == distinct
    like = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)
    assert [(each.shape, each.sharding) for each in local_shapes(like)] == [
        (each.shape, each.sharding) for each in shards
    ]
    again = joined(like, [(None, shards)])
    assert again.sharding == sharding
    np.testing.assert_array_equal(again, array)
    assert len(again.addressable_shards) == 8
