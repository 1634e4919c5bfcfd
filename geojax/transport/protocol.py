"""The protocol of every transport: offers, fetches, health and counters."""

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol

import jax

from geojax.errors import RunError
from geojax.transport.link_clock import MeasuredLink


class LostPeerError(RunError):
    """A peer is lost, so that waiting for it would never end."""


class MessageKey(NamedTuple):
    """Name of one message of a run; sender and receiver derive the same one from their schedules.

    A sender uses a key at most once for each receiver.
    """

    step: int
    """Step of the run."""
    kind: str
    """Subject of the message: "activation", "gradient", "bucket", "statistics", ..."""
    microbatch: int = 0
    chunk: int = 0
    share: int = 0
    """Share of the batch that the message is of."""
    part: int = 0
    """Number of the piece, where one subject travels in several messages."""
    membership_id: int = 0
    """Record of who takes part under which it is sent; 0: under any."""

    def __str__(self) -> str:
        """Return the key as errors show it."""
        return (
            f"{self.kind} of step {self.step}, microbatch {self.microbatch}, chunk {self.chunk}, "
            f"share {self.share}, part {self.part}, membership {self.membership_id}"
        )


@dataclasses.dataclass
class PeerCounters:
    """Traffic between this process and its counterparts in one other site since the start."""

    offered_messages: int = 0
    offered_bytes: int = 0
    acknowledged_messages: int = 0
    acknowledged_bytes: int = 0
    """Bytes of offers that the peer has fetched, as far as this process knows."""
    offer_wait_seconds: float = 0.0
    """Time that `Transport.offer` waited for the peer to fetch earlier offers."""
    changed: threading.Condition = dataclasses.field(
        default_factory=threading.Condition, repr=False, compare=False
    )
    """Held by whoever changes them, and told of it."""

    @property
    def messages_in_flight(self) -> int:
        """Offers that the peer has not acknowledged."""
        return self.offered_messages - self.acknowledged_messages

    @property
    def bytes_in_flight(self) -> int:
        """Bytes of offers that the peer has not acknowledged; the byte limit counts these."""
        return self.offered_bytes - self.acknowledged_bytes


class ToldFigures(NamedTuple):
    """The newest figures that the process of another site told."""

    content: bytes
    time: float
    """When they came, on the monotonic clock."""


class SocketFigures(NamedTuple):
    """The connections to the process of another site, as the kernel counts them."""

    round_trip_seconds: float
    """Smoothed time from a packet to its acknowledgment, on the connection where it is least."""
    retransmits: int
    """Packets that were sent again since the last call, on connections that are open."""


class Fetch(Protocol):
    """Arrays that are on their way."""

    arrival: float | None
    """Time on the monotonic clock at which all arrays were first seen here; None: not yet."""

    def arrived(self) -> bool:
        """Return True if `result` would not wait."""
        ...

    def wait(self, seconds: float) -> bool:
        """Wait at most so long for the arrays; return `arrived`."""
        ...

    def result(self, timeout_seconds: float | None = None) -> list[jax.Array]:
        """Wait until all arrays are here; return them.

        XLA:CPU runs computations in the order of their dispatch, so one that is dispatched before
        its input has arrived blocks all behind it: dispatch only what this returned.

        Args:
            timeout_seconds: time to wait; None: until the peer counts as lost.

        Raises:
            RunError: the time is up, or the peer is lost; the message names peer and key.
        """
        ...


class Transport(Protocol):
    """The way of one process to its counterparts in the other sites.

    Where the stages of a site have processes of their own, each stage is an end as a site is.
    """

    site: int
    """Site of this process."""
    sites: int
    """Number of sites."""
    site_names: Sequence[str]
    """Name of each site, in order; of a stage's, where each end is a stage."""

    @property
    def counters(self) -> Mapping[int, PeerCounters]:
        """Traffic with each other site, by its number."""
        ...

    def offer(
        self,
        receiver: int,
        key: MessageKey,
        arrays: Sequence[jax.Array],
        *,
        yields: bool = False,
    ) -> None:
        """Offer arrays, which may not be computed yet, to one other site.

        The transport keeps the arrays until the receiver acknowledges them, and they must not be
        donated before (`PeerCounters.messages_in_flight`; acknowledgments come in the order of
        offers). Waits while the unacknowledged bytes of this receiver would exceed the limit, so
        receivers must fetch ahead by at least the messages that their schedule has in flight.

        Args:
            receiver: another site; arrays for several sites are offered to each.
            key: name of the message, new for this receiver.
            arrays: arrays on this site's mesh; in a site of several processes each process offers
                its own shards.
            yields: it goes while nothing else is to be sent, and no limit counts it: the caller
                bounds such messages.

        Raises:
            UserError: the message alone exceeds the byte limit.
            RunError: the receiver is lost.
        """
        ...

    def fetch(self, sender: int, key: MessageKey, like: Sequence[jax.ShapeDtypeStruct]) -> Fetch:
        """Begin to fetch what another site offers under `key`, now or later; return at once.

        Args:
            sender: another site.
            key: name of the message; each is fetched once.
            like: shape, dtype and sharding of each array on this site's mesh; shards are equal to
                those of the offered arrays.

        Raises:
            RunError: the sender is lost.
        """
        ...

    def check(self) -> None:
        """Raise a `RunError` that names the first peer that is lost or has been silent too long."""
        ...

    def measured(self) -> Mapping[int, MeasuredLink]:
        """Return what was measured of the link to each other site since the last call, by number.

        Nothing where sites share a process.
        """
        ...

    def tell(self, receiver: int, figures: bytes) -> None:
        """Tell another site figures of at most 1 kB, soon or never; newer ones replace older."""
        ...

    def told(self, sender: int) -> ToldFigures | None:
        """Return the newest figures that another site has told; None: there are none."""
        ...

    def socket_figures(self) -> Mapping[int, SocketFigures]:
        """Return how the kernel sees the link to each other site, by number; some may lack."""
        ...

    def drain(self) -> None:
        """Wait until the peers have fetched all offers; before `close` at the end of a run.

        Raises:
            RunError: a peer is lost, or has finished without them.
        """
        ...

    def close(self, *, failed: bool = False) -> None:
        """End all transfers and free what they hold.

        Peers see this site as finished, which is no error, if they have fetched all its offers and
        it has not `failed`; and else as lost.
        """
        ...
