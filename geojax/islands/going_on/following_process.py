"""A process of a site that does what the site's first process decides."""

from collections.abc import Callable

from geojax.islands.going_on.decisions import (
    Answered,
    HandedCame,
    Report,
    SeenLink,
    as_text,
    decision_of,
)
from geojax.islands.going_on.site_membership import SiteMembership, Surroundings
from geojax.membership.events import ComputeSums, SumsReady
from geojax.membership.member_state import SILENT_SHARE
from geojax.transport import LostPeerError
from geojax.transport.door import Door
from geojax.transport.link_to_site import LinkToSite


class FollowingProcess(SiteMembership):
    """The membership of a site, in any but its first process."""

    def __init__(self, around: Surroundings):
        super().__init__(around)
        self._silence = SILENT_SHARE * around.lease_seconds
        self._seen: dict[int, SeenLink] = {}
        """As reported last, of each site."""
        self._reported = 0
        """Number of the newest reported of what other sites hand over."""

    def be_admitted(self) -> None:
        """Leave it to the first process to ask."""

    def open_door(self, door: Callable[[], Door]) -> None:
        """Leave it to the first process to open the door."""

    def is_open(self) -> bool:
        """Return True while a counterpart is silent or lost."""
        return any(seen.lost is not None or seen.is_silent for seen in self._seen.values())

    def _poll(self) -> None:
        for _, text in self._channel.received():
            self._do(decision_of(text))
        links = list(self.transport.links.items())
        for site in set(self._seen) - {site for site, _ in links}:
            del self._seen[site]
        for site, link in links:
            seen = self._look(site, link)
            if seen != self._seen.get(site, SeenLink(site, seen.start, None, is_silent=False)):
                self._report(seen)
            self._seen[site] = seen
        for number in self._has_come():
            if number > self._reported:
                self._reported = number
                self._report(HandedCame(number))

    def _look(self, site: int, link: LinkToSite) -> SeenLink:
        """Return how the link to a site is.

        Raises:
            LostPeerError: the link is lost by this end.
        """
        start = self._starts.get(site, 0)
        if link.finished:
            return SeenLink(site, start, None, is_silent=False)
        try:
            link.check()
        except LostPeerError:
            if link.lost_contact is None:  # it could not be sent a message, or take one
                raise
        return SeenLink(site, start, link.lost_contact, link.silent_seconds >= self._silence)

    def _tell_ready(self, work: ComputeSums) -> None:
        self._report(SumsReady(work.record.membership_id, work.step))

    def _answer(self, number: int, sites: tuple[int, ...]) -> None:
        self._report(Answered(number, sites))

    def _report(self, report: Report) -> None:
        self._channel.send(as_text(report))
