"""The byte limit of the offers to one peer: offers wait while too much is unacknowledged."""

import time
from collections.abc import Callable

from geojax.errors import UserError
from geojax.transport.protocol import MessageKey, PeerCounters

_POLL_SECONDS = 0.05


class InFlight:
    """Bytes offered to one peer and not yet acknowledged, within a limit.

    Args:
        peer: how errors name the peer.
        limit_bytes: most bytes in flight.
        counters: counters of the peer's site, kept up to date here.
        check: raises if the peer is lost; called while an offer waits.
    """

    def __init__(
        self, peer: str, limit_bytes: int, counters: PeerCounters, check: Callable[[], None]
    ):
        self._peer, self._limit_bytes = peer, limit_bytes
        self._counters, self._check = counters, check
        self._changed = counters.changed
        self._messages = self._bytes = 0

    def add(self, key: MessageKey, size: int) -> None:
        """Count a message of `size` bytes; wait until it fits.

        Raises:
            UserError: it can never fit.
            RunError: the peer was lost meanwhile.
        """
        if size > self._limit_bytes:
            raise UserError(
                f"transport: {key} has {size} bytes, more than the limit of {self._limit_bytes} "
                f"bytes in flight to {self._peer}; raise the limit to at least {size}"
            )
        start = time.monotonic()
        with self._changed:
            while self._bytes + size > self._limit_bytes:
                self._check()
                self._changed.wait(_POLL_SECONDS)
            self._counters.offer_wait_seconds += time.monotonic() - start
            self._messages += 1
            self._bytes += size
            self._counters.offered_messages += 1
            self._counters.offered_bytes += size

    def wait_until_empty(self) -> None:
        """Wait until the peer has fetched all messages.

        Raises:
            RunError: the peer was lost meanwhile.
        """
        with self._changed:
            while self._messages:
                self._check()
                self._changed.wait(_POLL_SECONDS)

    def acknowledge(self, size: int) -> None:
        """Count a message of `size` bytes as fetched by the peer."""
        with self._changed:
            self._messages -= 1
            self._bytes -= size
            self._counters.acknowledged_messages += 1
            self._counters.acknowledged_bytes += size
            self._changed.notify_all()
