"""A predicted training step: its time, term by term, and what each network carries.

`geojax.planner.cost.predict` makes one of a `geojax.planner.cost.layout.LayoutCandidate`.
"""

import dataclasses
from typing import Literal

from geojax.planner.cost.layout import LayoutCandidate

Network = Literal["inside_host", "between_hosts", "between_sites"]
"""The network that carries a message: NVLink or ICI, the site's network cards, or a link."""


@dataclasses.dataclass(frozen=True)
class CostItem:
    """One kind of work of a device, or one kind of message."""

    name: str
    """Name in tables, such as "attention" or "tensor all-gather"."""
    source: str
    """Formula or measurement that its times come from, a sentence."""
    bytes: float = dataclasses.field(default=0.0, kw_only=True)
    """Bytes that the device sends over `network`, or moves through its memory where there is none.
    """
    messages: float = dataclasses.field(default=0.0, kw_only=True)
    """Messages that the device sends one after the other, each of which costs a latency."""
    network: Network | None = dataclasses.field(default=None, kw_only=True)
    """Network of a collective; None: the device works alone."""


@dataclasses.dataclass(frozen=True)
class Term(CostItem):
    """One part of a step, of the device that determines the step's time."""

    seconds: float
    """Time that it takes, hidden or not."""
    exposed_seconds: float
    """Time that it adds to the step; the exposed times of all terms make the step's time."""


@dataclasses.dataclass(frozen=True)
class LinkUse:
    """One direction of a link between two sites in a step."""

    source: str
    """Site that sends."""
    target: str
    """Site that receives."""
    bytes: float
    """Bytes of all devices in a step."""
    messages: float
    """Messages that one device sends in a step."""
    peak_bytes_per_second: float
    """Highest rate that is asked of it while something crosses: at most its bandwidth."""


@dataclasses.dataclass(frozen=True)
class Prediction:
    """One training step of a layout."""

    layout: LayoutCandidate
    """The layout with the layers of its chunks, and the buckets that were chosen for it."""
    step_seconds: float
    """Time of a step."""
    terms: tuple[Term, ...]
    """Parts of the step; their exposed times sum to `step_seconds`."""
    model_flops_utilization: float | None
    """Model FLOPs over the peaks of all accelerators, counted by `geojax.models.flops`; None where
    a peak is not known."""
    bubble_fraction: float
    """Part of the step in which the busiest pipeline stage has nothing to compute, for want of
    microbatches or of messages."""
    links: tuple[LinkUse, ...]
    """Use of every link between sites that something crosses."""
    memory_bytes: float
    """Memory of the fullest device (`geojax.planner.cost.memory`)."""
    relative_error: float | None
    """Error of the step time that 90% of published steps of the same accelerator and precision keep
    within; None where none was compared."""
    not_modelled: tuple[str, ...]
    """Parts of a step that no term stands for, a phrase each."""

    @property
    def exposed_communication_seconds(self) -> float:
        """Time of a step in which devices wait for a network."""
        return sum(term.exposed_seconds for term in self.terms if term.network is not None)

    def term(self, name: str) -> Term:
        """Return the term called `name`."""
        return next(term for term in self.terms if term.name == name)
