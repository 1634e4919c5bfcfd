"""Settings of the emulated links between sites."""

from typing import Annotated, Self

import pydantic

from geojax.quantities import Bytes, BytesPerSecond, Seconds, Share
from geojax.settings import Settings

SITE_NAMES = ("east", "west", "north", "south")
"""Names of the sites in order, as in the presets of configs/topology."""

MTU = 1500
"""Size of the largest IP packet on a link, in bytes."""

LARGEST_SEGMENT = MTU - 20 - 32
"""TCP payload of such a packet, in bytes, without IPv4's header and TCP's with timestamps."""

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
    """Time that a small packet and its answer spend on a link, without queueing."""
    bytes_per_second: Annotated[BytesPerSecond, pydantic.Field(ge=1e4)] | None = None
    """Bandwidth of a link in each direction, counted in IP packets with their headers, of 80 kbit/s
    or more; None: as fast as the kernel is."""
    loss: Annotated[Share, pydantic.Field(le=0.5)] = 0.0
    """Share of the packets that gets lost, independently of each other; of more than half, no
    connection is left."""
    jitter_seconds: Seconds = 0.0
    """Largest difference of a packet's delay from half the round trip, evenly distributed. Packets
    keep their order."""
    queue_bytes: Bytes | None = None
    """Most bytes that wait for a link; more is dropped at its tail. None: the bandwidth-delay
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
        """True if the links have a delay, a rate or loss of their own."""
        return bool(self.round_trip_seconds or self.bytes_per_second or self.loss)

    @property
    def delay_seconds(self) -> float:
        """Delay of each direction, in seconds."""
        return self.round_trip_seconds / 2

    @property
    def bandwidth_delay_product(self) -> int:
        """Bytes that fill a link for a round trip; at 10 Gbit/s if no rate is set."""
        return int((self.bytes_per_second or _UNSHAPED_BYTES_PER_SECOND) * self.round_trip_seconds)

    @property
    def queue_limit(self) -> int:
        """Size of the queue in bytes: `queue_bytes`, or its default."""
        return self.queue_bytes or self.bandwidth_delay_product + _QUEUE_BEYOND_PRODUCT
