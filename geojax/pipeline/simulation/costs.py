"""The costs of a pipeline's pieces: the time of each chunk's work, and of each hop."""

import dataclasses
import itertools
from collections.abc import Callable

from geojax.pipeline.schedule import Placement


@dataclasses.dataclass(frozen=True)
class Hop:
    """A message from one chunk to the next one, or back."""

    latency: float = 0.0
    """Seconds from the last byte's departure to its arrival: half a round trip."""
    transfer: float = 0.0
    """Seconds that the message occupies the link: bytes / bandwidth."""
    link: str | None = None
    """The link of the message; None: a network inside a site, where messages do not wait for each
    other. Messages over the same link in the same direction do, first come, first served."""

    @property
    def seconds(self) -> float:
        """The seconds between departure and arrival on an idle link."""
        return self.latency + self.transfer


@dataclasses.dataclass(frozen=True)
class Costs:
    """The times of one microbatch, in seconds."""

    forward: tuple[float, ...]
    """Seconds of each chunk's forward, in the model's order."""
    backward: tuple[float, ...]
    """Seconds of the gradient of each chunk's input."""
    weight: tuple[float, ...]
    """Seconds of the gradient of each chunk's weights. A backward that is not split takes both,
    one that is both and the surcharge."""
    hops: tuple[Hop, ...]
    """Between chunk c and chunk c+1, one for each pair; the same forwards and backwards."""
    half_duplex: bool = False
    """The two directions of a link share its bandwidth."""
    split_surcharge: float = 0.0
    """The share by which the two halves of a split backward take longer than the whole."""
    head: float = 0.0
    """Seconds of a head that stages in lock-step share, in the tick of the last backward."""
    apart: float = 0.0
    """Seconds by which a tick takes longer that turns a microbatch: the last chunk's backward needs
    the forward. The two passes of a stage otherwise run beside each other's messages."""
    late: float = 0.0
    """Seconds of the gradients of weights that a tick ends with in which no stage is idle: what it
    sends inside sites has left by then."""

    def __post_init__(self) -> None:
        chunks = len(self.forward)
        assert len(self.backward) == len(self.weight) == chunks, "every chunk has its three times"
        assert len(self.hops) == chunks - 1, "one hop for each pair of neighboring chunks"

    @classmethod
    def uniform(
        cls, chunks: int, forward: float, backward: float, weight: float = 0.0, hop: Hop = Hop()
    ) -> "Costs":
        """Return costs that are the same for every chunk and every hop."""
        return cls(
            (forward,) * chunks, (backward,) * chunks, (weight,) * chunks, (hop,) * (chunks - 1)
        )

    @classmethod
    def of_stages(
        cls,
        placement: Placement,
        forward: float,
        backward: float,
        weight: float,
        hop: Callable[[int, int], Hop],
    ) -> "Costs":
        """Return the costs of stages that are all alike, each divided evenly into its chunks.

        `forward`, `backward` and `weight` are a whole stage's; `hop(source, target)` is what joins
        two different stages. A chunk and its successor on the same stage need no message.
        """
        stage_of = placement.stage_of
        parts = [len(placement.chunks_of(stage)) for stage in stage_of]
        pairs = itertools.pairwise(stage_of)
        return cls(
            tuple(forward / part for part in parts),
            tuple(backward / part for part in parts),
            tuple(weight / part for part in parts),
            tuple(Hop() if source == target else hop(source, target) for source, target in pairs),
        )

    @property
    def work(self) -> tuple[float, ...]:
        """Seconds of each chunk's forward and whole backward."""
        return tuple(map(sum, zip(self.forward, self.backward, self.weight, strict=True)))

    def scaled(self, factor: float) -> "Costs":
        """Return the same pipeline whose work, but no message, takes `factor` times as long."""
        return dataclasses.replace(
            self,
            forward=tuple(factor * seconds for seconds in self.forward),
            backward=tuple(factor * seconds for seconds in self.backward),
            weight=tuple(factor * seconds for seconds in self.weight),
            head=factor * self.head,
            apart=factor * self.apart,
            late=factor * self.late,
        )

    def durations(self, *, split_backward: bool) -> tuple[tuple[float, ...], ...]:
        """Return the seconds of each chunk's forward, backward and gradient of weights.

        Where the backward is not split it takes both, and nothing is left for the weights.
        """
        halves = zip(self.backward, self.weight, strict=True)
        if not split_backward:
            return self.forward, tuple(map(sum, halves)), (0.0,) * len(self.weight)
        longer = 1 + self.split_surcharge
        inputs, weights = zip(*((longer * b, longer * w) for b, w in halves), strict=True)
        return self.forward, inputs, weights

    @property
    def inside_sites(self) -> "Costs":
        """The same pipeline if messages over links took no time."""
        return dataclasses.replace(
            self, hops=tuple(hop if hop.link is None else Hop() for hop in self.hops)
        )
