"""What the emulated links between sites shall be like."""

from typing import Self

import pydantic

from geojax.quantities import Bytes, BytesPerSecond, Seconds, Share
from geojax.settings import Settings

SITE_NAMES = ("east", "west", "north", "south")
"""What the sites are called, in this order: as in the presets of configs/topology."""

MTU = 1500
"""Bytes of the largest IP packet on a link."""

LARGEST_SEGMENT = MTU - 20 - 32
"""Bytes of TCP payload in such a packet: IPv4's header and TCP's with timestamps take the rest."""

_LONGEST_ROUND_TRIP = 3.0
_LEAST_QUEUE = 2**17
_QUEUE_BEYOND_PRODUCT = 2**20
_UNSHAPED_BYTES_PER_SECOND = 10e9 / 8


class WanSettings(Settings):
    """Sites joined by equal links, one between each two of them.

    Without round trip, rate, loss and jitter the links are unshaped: as fast as the kernel is.
    """

    sites: int = pydantic.Field(default=2, ge=2, le=len(SITE_NAMES))
    """Number of sites."""
    round_trip_seconds: Seconds = 0.0
    """Time that a small packet and its answer are on a link, without queueing."""
    bytes_per_second: BytesPerSecond | None = None
    """Bandwidth of a link in each direction, counted in IP packets with their headers; None: as
    fast as the kernel is."""
    loss: Share = 0.0
    """The share of the packets that gets lost, each by itself."""
    jitter_seconds: Seconds = 0.0
    """A packet's delay differs from half the round trip by up to so much, evenly spread. Packets
    keep their order."""
    queue_bytes: Bytes | None = None
    """What waits for a link at the most; more is dropped at its tail. None: the bandwidth-delay
    product and 1 MiB."""

    @pydantic.model_validator(mode="after")
    def _possible(self) -> Self:
        if self.round_trip_seconds > _LONGEST_ROUND_TRIP:
            raise ValueError(
                f"a round trip of {self.round_trip_seconds:g} s is beyond any link on Earth; "
                f"{self.round_trip_seconds:g}ms is so many milliseconds"
            )
        if self.jitter_seconds > self.delay_seconds:
            raise ValueError(
                f"a jitter of {self.jitter_seconds:g} s is more than the delay that it varies, "
                f"{self.delay_seconds:g} s (half the round trip)"
            )
        if self.queue_bytes is not None and self.bytes_per_second is None:
            raise ValueError("a queue is only in front of a link with a rate")
        if self.queue_bytes is not None and self.queue_bytes < _LEAST_QUEUE:
            raise ValueError(
                f"a queue of {self.queue_bytes} bytes holds no two segments of 64 KiB, which is "
                "what a host sends at once; 128KiB would"
            )
        return self

    @property
    def shaped(self) -> bool:
        """Whether the links differ from what the kernel does by itself."""
        return bool(self.round_trip_seconds or self.bytes_per_second or self.loss)

    @property
    def delay_seconds(self) -> float:
        """Of each direction."""
        return self.round_trip_seconds / 2

    @property
    def bandwidth_delay_product(self) -> int:
        """Bytes on the way to fill a link for a round trip; at 10 Gbit/s where no rate is set."""
        return int((self.bytes_per_second or _UNSHAPED_BYTES_PER_SECOND) * self.round_trip_seconds)

    @property
    def queue_limit(self) -> int:
        """`queue_bytes`, or what it is by default."""
        return self.queue_bytes or self.bandwidth_delay_product + _QUEUE_BEYOND_PRODUCT
