"""Links between sites, measured between the first process of each, one pair after the other."""

import contextlib
import functools
import itertools
import json
import secrets
from collections.abc import Callable, Sequence
from socket import socket

import jax

from geojax.network_names import HostPort
from geojax.probe.context import ProbeContext
from geojax.probe.exchange import TIMEOUT_SECONDS, await_note, collect
from geojax.probe.figures import ProbedLink
from geojax.probe.streams import (
    Listener,
    answer,
    call,
    own_address,
    packet_share,
    receive,
    round_trip,
    send,
)
from geojax.runtime import describe
from geojax.runtime.key_value_store import publish

# Longest time of a pair, at a round trip of three seconds, for each direction and stream count.
_PHASE_SECONDS = 100.0


def measured_links(
    context: ProbeContext, coordinator: str, streams: Sequence[int]
) -> list[ProbedLink]:
    """Measure both directions of every link; every process of the job calls this.

    Args:
        context: the processes and their sites.
        coordinator: host:port of process 0, as the others reach it; a process uses its address that
            faces the coordinator.
        streams: numbers of TCP streams with which throughput is measured, one after the other.

    Raises:
        MissingProcessesError: some process did not arrive.
        RunError: one site cannot reach another.
    """
    found: list[ProbedLink] = []
    for pair in itertools.combinations(context.first_processes.items(), 2):
        own = ""
        if jax.process_index() in (process for _, process in pair):
            own = _received(pair, coordinator, streams).model_dump_json()
        name = "link " + " to ".join(site for site, _ in pair)
        timeout = TIMEOUT_SECONDS + 2 * len(streams) * _PHASE_SECONDS
        answers = collect(name, own, timeout)
        received = [ProbedLink.model_validate_json(each) for each in answers if each]
        found += sorted(received, key=lambda link: link.source != pair[0][0])
    return found


def _received(
    pair: Sequence[tuple[str, int]], coordinator: str, streams: Sequence[int]
) -> ProbedLink:
    """Measure the direction in which this process, one of a pair of (site, process), receives."""
    (_, caller), (_, called) = pair
    own = jax.process_index()
    (source, peer), (target, _) = pair if own == called else reversed(pair)
    name = describe([peer])
    address = own_address(HostPort.parse(coordinator).host)
    key = f"address/{caller}-{called}"
    with contextlib.ExitStack() as stack:
        connect: Callable[[], socket]
        if own == called:
            token = secrets.token_bytes(32)
            listener = Listener(address, token, name)
            stack.callback(listener.close)
            publish(f"probe/{key}", json.dumps([address, listener.port, token.hex()]))
            connect, measure = listener.accept, answer
        else:
            host, port, known = json.loads(await_note(key, peer, TIMEOUT_SECONDS))
            connect = functools.partial(call, address, (host, port), bytes.fromhex(known), name)
            measure = round_trip
        with connect() as connection:
            seconds, share = measure(connection, name), packet_share(connection)
        rates = {}
        for sender, count in itertools.product((caller, called), streams):
            with contextlib.ExitStack() as opened:
                connections = [opened.enter_context(connect()) for _ in range(count)]
                if sender == own:
                    send(connections, name)
                else:
                    rates[count] = receive(connections, seconds, name)
    return ProbedLink(
        source=source,
        target=target,
        round_trip_seconds=seconds,
        bytes_per_second=rates,
        packet_share=share,
    )
