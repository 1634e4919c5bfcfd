"""Traffic of a site with another one in a step, and the idle time that it costs."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Sequence

from geojax.islands.actions import SiteAction, received, sent

OFFER = "offer"
"""The cause of a wait for the byte limit; the others are the kinds of `Message`."""


@dataclasses.dataclass
class LinkTraffic:
    """Traffic of all processes of a site with another site in one step."""

    sent_bytes: int = 0
    received_bytes: int = 0
    messages_in_flight: int = 0
    """Most offers of a process at a time that the other site had not fetched."""
    wait_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Exposed wait by cause: time in which this process waited and its devices had nothing to do.

    Of the messages that an action waits for, the first takes the time that all need. A wait for the
    byte limit counts whole if the devices were idle at its end.
    """

    @classmethod
    def of_site(cls, of_stages: Sequence["LinkTraffic"], stages: int) -> "LinkTraffic":
        """Return the traffic of a site; a wait is the mean of those of its stages.

        Args:
            of_stages: of each stage of the site with each stage of the other one.
            stages: stages of the site.
        """
        waits: Counter[str] = Counter()
        for traffic in of_stages:
            waits.update(traffic.wait_seconds)  # adds
        return cls(
            sum(traffic.sent_bytes for traffic in of_stages),
            sum(traffic.received_bytes for traffic in of_stages),
            max(traffic.messages_in_flight for traffic in of_stages),
            {cause: seconds / stages for cause, seconds in sorted(waits.items())},
        )


def no_traffic(actions: Iterable[SiteAction], sites: Iterable[int]) -> dict[int, LinkTraffic]:
    """Return the traffic with each other site before a step, with all causes that it can have."""
    causes: dict[int, list[str]] = {site: [] for site in sites}
    for action in actions:
        for sender, message in received(action):
            causes[sender].append(message.kind)
        for receiver, _ in sent(action):
            causes[receiver].append(OFFER)
    return {
        site: LinkTraffic(wait_seconds=dict.fromkeys(sorted(set(own)), 0.0))
        for site, own in causes.items()
    }
