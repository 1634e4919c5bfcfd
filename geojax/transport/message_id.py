"""Identifiers of messages on the wire: 63 bits of a keyed hash, used once."""

import hashlib
from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np

from geojax.transport.protocol import MessageKey

FIRST_ID = 16
"""Smallest identifier; those below are control frames. Identifiers are even."""


class Direction(NamedTuple):
    """One direction between two processes, in this start of both."""

    sender: tuple[int, int]
    """Site and process."""
    receiver: tuple[int, int]
    sender_nonce: str
    """New at every start of the process, so that no identifier of an earlier start comes again."""
    receiver_nonce: str

    @property
    def back(self) -> "Direction":
        """The other direction between the two."""
        return Direction(self.receiver, self.sender, self.receiver_nonce, self.sender_nonce)


def message_id(
    run_key: bytes,
    direction: Direction,
    message: MessageKey,
    shards: Sequence[jax.Array | jax.ShapeDtypeStruct] | Sequence[np.ndarray],
) -> int:
    """Return the identifier of a message.

    It covers shapes and dtypes, so that a receiver that expects others waits in vain and says so.
    """
    contents = [(shard.shape, str(shard.dtype)) for shard in shards]
    text = repr((tuple(direction), tuple(message), contents)).encode()
    digest = hashlib.blake2b(text, digest_size=8, key=run_key).digest()
    return max(FIRST_ID, int.from_bytes(digest, "big") & ~1)
