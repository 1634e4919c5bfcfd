"""Offer and fetch arrays between separate JAX runtimes; there is no training in it.

A process of one site offers arrays to its counterpart in another site under a `MessageKey`; the
counterpart fetches them under the same key. Transfers are asynchronous on both sides.
"""

from geojax.transport.carrier import CarrierTransport
from geojax.transport.connect import Membership, connect, meet
from geojax.transport.link_clock import MeasuredLink
from geojax.transport.loopback import loopback
from geojax.transport.protocol import (
    Fetch,
    LostPeerError,
    MessageKey,
    PeerCounters,
    SocketFigures,
    ToldFigures,
    Transport,
)
from geojax.transport.streams import Streams, streams_for

__all__ = [
    "CarrierTransport",
    "Fetch",
    "LostPeerError",
    "MeasuredLink",
    "Membership",
    "MessageKey",
    "PeerCounters",
    "SocketFigures",
    "Streams",
    "ToldFigures",
    "Transport",
    "connect",
    "loopback",
    "meet",
    "streams_for",
]
