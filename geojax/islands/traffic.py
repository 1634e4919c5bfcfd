"""Traffic of a site with another one in a step, and the idle time that it costs."""

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Sequence

from geojax.islands.actions import SiteAction, received, sent
from geojax.transport import SocketFigures

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
    sockets: SocketFigures | None = None
    """The newest figures of the kernel; None: it has none."""

    def __add__(self, other: "LinkTraffic") -> "LinkTraffic":
        """Add bytes and waits; of messages in flight the most counts, of sockets the newer."""
        waits = dict(self.wait_seconds)
        for cause, seconds in other.wait_seconds.items():
            waits[cause] = waits.get(cause, 0.0) + seconds
        return LinkTraffic(
            self.sent_bytes + other.sent_bytes,
            self.received_bytes + other.received_bytes,
            max(self.messages_in_flight, other.messages_in_flight),
            waits,
            other.sockets,
        )

    @classmethod
    def of_process(cls, of_stages: Sequence["LinkTraffic"], stages: int) -> "LinkTraffic":
        """Return the traffic of a process; a wait is the mean of those of its stages.

        Args:
            of_stages: of each stage of the process with each stage of the other site.
            stages: stages of the process.
        """
        total = sum(of_stages, cls())
        waits = {cause: waited / stages for cause, waited in sorted(total.wait_seconds.items())}
        return dataclasses.replace(total, wait_seconds=waits)


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
