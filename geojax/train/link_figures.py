"""Figures of a site's links: metrics and progress of a step, and the summary of a run."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from geojax.islands.traffic import LinkTraffic
from geojax.quantities import duration, quantity


class PlannedWait(NamedTuple):
    """A wait for other sites that the plan expects of each step."""

    seconds: float
    sites: Sequence[str]
    """The other sites."""


def link_metrics(site: str, traffic: LinkTraffic, seconds: float) -> dict[str, float]:
    """Return the metrics of a step of `seconds` on the link to a site; rates are over all of it."""
    waits = traffic.wait_seconds
    sockets = {}
    if traffic.sockets is not None:
        sockets = {
            f"link/{site}/tcp_round_trip_seconds": traffic.sockets.round_trip_seconds,
            f"link/{site}/retransmits": traffic.sockets.retransmits,
        }
    return {
        f"link/{site}/sent_bytes": traffic.sent_bytes,
        f"link/{site}/received_bytes": traffic.received_bytes,
        f"link/{site}/sent_bytes_per_second": traffic.sent_bytes / seconds,
        f"link/{site}/received_bytes_per_second": traffic.received_bytes / seconds,
        f"link/{site}/messages_in_flight": traffic.messages_in_flight,
        f"link/{site}/wait_seconds": sum(waits.values()),
        **{f"link/{site}/wait_seconds_{cause}": waited for cause, waited in waits.items()},
        **sockets,
    }


def planned_metrics(planned: PlannedWait) -> dict[str, float]:
    """Return the metrics of a wait that nobody measured; a single link has all of it."""
    metrics = {"seconds/planned_waiting": planned.seconds}
    if len(planned.sites) == 1:
        metrics[f"link/{planned.sites[0]}/planned_wait_seconds"] = planned.seconds
    return metrics


def planned_words(planned: PlannedWait) -> str:
    """Return the part of a progress line for a wait that nobody measured."""
    return f"waits {duration(planned.seconds)} for other sites (planned)"


def link_words(site: str, traffic: LinkTraffic) -> str:
    """Return a link's part of a progress line: the wait for a site, by its causes."""
    return f"waits {_waits(traffic.wait_seconds)} for {site}"


@dataclasses.dataclass
class LinkTotals:
    """Sums over the steps of a run on the link to a site."""

    steps: int = 0
    seconds: float = 0.0
    traffic: LinkTraffic = dataclasses.field(default_factory=LinkTraffic)

    def add(self, traffic: LinkTraffic, seconds: float) -> None:
        """Count a step."""
        self.steps += 1
        self.seconds += seconds
        self.traffic += traffic

    def __str__(self) -> str:
        """Return the means of a step."""
        sent, received = (
            f"{quantity(count / self.steps, 'B')} at {quantity(count / self.seconds, 'B/s')}"
            for count in (self.traffic.sent_bytes, self.traffic.received_bytes)
        )
        waits = {cause: waited / self.steps for cause, waited in self.traffic.wait_seconds.items()}
        in_flight = self.traffic.messages_in_flight
        return (
            f"a step sends {sent} and receives {received}, has at most {in_flight} messages in "
            f"flight, and waits {_waits(waits)}"
        )


def _waits(by_cause: Mapping[str, float]) -> str:
    """Say how long devices waited idle: the sum, and the causes of a tenth of it or more."""
    total = sum(by_cause.values())
    causes = {
        cause: waited for cause, waited in by_cause.items() if waited >= max(0.1 * total, 1e-6)
    }
    factor, unit = (1e3, "ms") if total < 1 else (1, "s")
    named = ", ".join(f"{cause} {factor * waited:.3g}" for cause, waited in causes.items())
    return f"{factor * total:.3g} {unit}" + (f" ({named})" if named else "")
