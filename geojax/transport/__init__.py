"""Offer and fetch arrays between separate JAX runtimes; there is no training in it.

A process of one site offers arrays to its counterpart in another site under a `MessageKey`; the
counterpart fetches them under the same key. Transfers are asynchronous on both sides.
"""

from geojax.transport.connect import Membership, Staging, connect, meet, staging
from geojax.transport.engine import EngineTransport
from geojax.transport.link_clock import MeasuredLink
from geojax.transport.loopback import loopback
from geojax.transport.protocol import Fetch, MessageKey, PeerCounters, Transport

__all__ = [
    "EngineTransport",
    "Fetch",
    "MeasuredLink",
    "Membership",
    "MessageKey",
    "PeerCounters",
    "Staging",
    "Transport",
    "connect",
    "loopback",
    "meet",
    "staging",
]
