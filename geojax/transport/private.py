"""All that the transports use of JAX beyond its documented interface; JAX 0.10 and 0.11 have it."""

import contextlib
from collections.abc import Sequence
from typing import Any, cast

import jax
from jax.experimental import transfer


def is_ready(array: jax.Array) -> bool:
    """Return True if the array is computed and here, or can never be."""
    return cast(Any, array).is_ready()


def pull_error(arrays: Sequence[jax.Array]) -> str | None:
    """Return the error of pulled arrays that are ready, in one line; None if they are whole."""
    try:
        jax.block_until_ready(arrays)
    except (jax.errors.JaxRuntimeError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None


def start_server(address: str, streams: int, transfer_bytes: int, copies: int) -> Any:
    """Start this process's transfer server at a loopback address, at ports that the system picks.

    A fixed port for the streams aborts the process at the first connection.

    Args:
        address: the address.
        streams: number of TCP connections that carry data to one peer.
        transfer_bytes: largest piece that is sent at once.
        copies: pieces that are staged at once; the process keeps copies x pieces in host memory.
    """
    return transfer.start_transfer_server(
        jax.local_devices()[0].client,
        f"{address}:0",
        [f"{address}:0"] * streams,
        max_num_parallel_copies=copies,
        transfer_size=transfer_bytes,
    )


def listening_ports(address: str) -> list[int]:
    """Return the TCP ports at which somebody listens at `address`, an IPv4 address of this host.

    The server tells only one of its ports; Linux knows all.
    """
    wanted = bytes(map(int, reversed(address.split(".")))).hex().upper()
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table][1:]
    local = [row[1].split(":") for row in rows if row[3] == "0A"]
    return [int(port, 16) for host, port in local if host == wanted]


def forget(server: Any, connections: Sequence[Any]) -> None:
    """Fail all pulls and free all offers; the server's `timeout` arguments have no effect."""
    for connection in connections:
        with contextlib.suppress(jax.errors.JaxRuntimeError, ValueError):  # it has failed already
            connection._poison_connection()
    server._reset_rendevous_table()
