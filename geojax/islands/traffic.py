"""Traffic of a site with another one in a step, and the idle time that it costs."""

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from geojax.islands.actions import SiteAction, received, sent

OFFER = "offer"
"""The cause of a wait for the byte limit; the others are the kinds of `Message`."""


@dataclasses.dataclass
class LinkTraffic:
    """Traffic of a site with another site in one step."""

    sent_bytes: int = 0
    """Bytes that all processes of the site send; 0 until they are counted together."""
    received_bytes: int = 0
    messages_in_flight: int = 0
    """Most offers of a process at a time that the other site had not fetched."""
    wait_seconds: dict[str, float] = dataclasses.field(default_factory=dict)
    """Exposed wait by cause: time in which this process waited and its devices had nothing to do.

    Of the messages that an action waits for, the first takes the time that all need. A wait for the
    byte limit counts whole if the devices were idle at its end.
    """

    @classmethod
    def of_process(cls, of_stages: Sequence["LinkTraffic"], stages: int) -> "LinkTraffic":
        """Return the traffic of a process; a wait is the mean of those of its stages.

        Args:
            of_stages: of each stage of the process with each stage of the other site.
            stages: stages of the process.
        """
        waits: Counter[str] = Counter()
        for traffic in of_stages:
            waits.update(traffic.wait_seconds)  # adds
        return cls(
            messages_in_flight=max(traffic.messages_in_flight for traffic in of_stages),
            wait_seconds={cause: seconds / stages for cause, seconds in sorted(waits.items())},
        )


def no_traffic(actions: Iterable[SiteAction]) -> dict[int, LinkTraffic]:
    """Return the traffic with each other site before a step, with all causes that it can have."""
    causes = defaultdict[int, set[str]](set)
    for action in actions:
        for sender, message in received(action):
            causes[sender].add(message.kind)
        for receiver, _ in sent(action):
            causes[receiver].add(OFFER)
    return {
        site: LinkTraffic(wait_seconds=dict.fromkeys(sorted(own), 0.0))
        for site, own in causes.items()
    }
