"""The connections over which a process fetches from each peer, and the pieces that they carry."""

import math
from typing import NamedTuple

MOST_STREAMS = 8
_STREAM_BYTES_PER_SECOND = 0.5e9
_PIECE_SECONDS = 0.004
_PIECE_BITS = range(18, 24)


class Streams(NamedTuple):
    """TCP connections that bring messages from one peer."""

    connections: int
    piece_bytes: int
    """Most bytes of one message that are sent at once: another message waits so long."""


def streams_for(bytes_per_second: float) -> Streams:
    """Return the connections for a process's share of a link: as few as the rate allows."""
    count = math.ceil(bytes_per_second / _STREAM_BYTES_PER_SECOND)
    bits = int(_PIECE_SECONDS * bytes_per_second).bit_length()
    piece = 1 << max(_PIECE_BITS[0], min(_PIECE_BITS[-1], bits))
    return Streams(max(1, min(MOST_STREAMS, count)), piece)
