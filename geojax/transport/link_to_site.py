"""The link to another site: to its one process that holds what this one holds, or to several.

Sites may have different numbers of processes, one a multiple of the other. A process with more
devices than those of the other site exchanges with several of them, each over a lane of its own:

    site of one process     device 0 ──── lane 0 ────  process 0     site of two processes
                            device 1 ──── lane 1 ────  process 1
"""

import time
from collections.abc import Sequence
from typing import NamedTuple

from geojax.transport.link_clock import MeasuredLink
from geojax.transport.peer_link import PeerLink
from geojax.transport.protocol import SocketFigures, ToldFigures
from geojax.transport.shards import OwnDevices


class ProcessLane(NamedTuple):
    """The traffic with one process of the other site."""

    link: PeerLink
    devices: OwnDevices
    """Devices of this process whose shards the other process holds too."""


class LinkToSite:
    """The traffic with one other site, over one lane or several.

    Args:
        lanes: in the order of the site's processes.
    """

    def __init__(self, lanes: Sequence[ProcessLane]):
        self.lanes = lanes

    @property
    def _links(self) -> list[PeerLink]:
        return [lane.link for lane in self.lanes]

    @property
    def finished(self) -> bool:
        """True if the site has said that it needs nothing more."""
        return all(link.control.finished for link in self._links)

    @property
    def lost_contact(self) -> str | None:
        """The reason why a process of the site is lost; None: none is."""
        return next((link.control.lost for link in self._links if link.control.lost), None)

    @property
    def is_lost(self) -> bool:
        """True if nothing is exchanged with some process of the site any more."""
        return any(link.lost is not None for link in self._links)

    @property
    def silent_seconds(self) -> float:
        """Time since the last sign of the process that has been silent longest."""
        controls = [link.control for link in self._links]
        return max((each.silent_seconds for each in controls if not each.finished), default=0.0)

    @property
    def told(self) -> ToldFigures | None:
        """The newest figures that the site told; None: there are none."""
        return self._links[0].told

    @property
    def socket_figures(self) -> SocketFigures | None:
        """The link as the kernel counts it; None: there is no connection now."""
        figures = [link.socket_figures for link in self._links]
        known = [each for each in figures if each is not None]
        if not known:
            return None
        trip = min(each.round_trip_seconds for each in known)
        return SocketFigures(trip, sum(each.retransmits for each in known))

    def measured(self) -> MeasuredLink:
        """Return what was measured of the link since the last call; lanes share its rate."""
        measured = [link.clock.take() for link in self._links]
        rates = [each.bytes_per_second for each in measured if each.bytes_per_second is not None]
        return MeasuredLink(measured[0].round_trip_seconds, sum(rates) if rates else None)

    def note(self, content: bytes) -> None:
        """Send the site a note, which comes to its first process."""
        self._links[0].control.note(content)

    def tell(self, figures: bytes) -> None:
        """Tell the site figures, soon or never."""
        for link in self._links:
            link.control.tell(figures)

    def withdraw(self, membership_id: int) -> None:
        """Withdraw the offers under earlier records that the site has not asked for."""
        for link in self._links:
            link.withdraw(membership_id)

    def check(self) -> None:
        """Let go of what the site was offered if it is lost.

        Raises:
            LostPeerError: it is lost.
        """
        for link in self._links:
            link.check()

    def drain(self) -> None:
        """Wait until the site has fetched all offers."""
        for link in self._links:
            link.drain()

    def say_goodbye(self, finished: bool) -> None:
        """Tell the site that all is well, or else that this one has failed."""
        for link in self._links:
            link.control.say_goodbye(finished)

    def close(self, seconds: float) -> None:
        """End all connections; wait at most so long for the site to hear a goodbye."""
        deadline = time.monotonic() + seconds
        for link in self._links:
            link.close(max(0.0, deadline - time.monotonic()))
