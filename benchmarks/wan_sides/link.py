"""The link between the sites: shaped or not, while the same processes run.

Both sites keep two paths to each other, the link that `geojax wan up` makes and a plain pair of
virtual devices. Which of them packets take is a route, and a connection does not notice when it
changes but by the time that things take. So a contestant's throughput over the long link and that
over the unshaped one come from the same processes and connections, seconds apart.

That asks for a congestion control without a memory of the path: CUBIC, Linux's default, whatever
the machine's is. BBR keeps the least round trip of the last 10 s, and limits what is in flight by
it: after a change from the plain path to the long one it sends next to nothing for 10 s.
"""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

from geojax.wan import EmulatedWan, WanSettings, bring_up, take_down, traffic
from geojax.wan.relay import processor_seconds
from geojax.wan.settings import MTU
from wan_sides.work import SITES

NAME = "benchmark"
_PLAIN = "plain"
_QUEUE_PACKETS = 10_000
_CONGESTION_CONTROL = "net.ipv4.tcp_congestion_control=cubic"
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")


class Link:
    """Two sites and the two paths between them."""

    def __init__(self, wan: EmulatedWan):
        self.wan = wan
        self._shaped_devices = [f"to-{other}" for other in reversed(SITES)]
        first, second = (site.namespace for site in wan.sites)
        pair = ["type", "veth", "peer", "name", _PLAIN, "netns", second]
        _ip("-n", first, "link", "add", _PLAIN, *pair)
        for namespace in (first, second):
            size = ["mtu", str(MTU), "txqueuelen", str(_QUEUE_PACKETS)]
            _ip("-n", namespace, "link", "set", _PLAIN, *size, "up")
            _ip("netns", "exec", namespace, "sysctl", "-qw", _CONGESTION_CONTROL)

    def shape(self, shaped: bool) -> None:
        """From now on packets take the long link, or the plain one."""
        here, there = self.wan.sites
        for site, other, device in (
            (here, there, self._shaped_devices[0]),
            (there, here, self._shaped_devices[1]),
        ):
            path = ["dev", device if shaped else _PLAIN, "src", site.address]
            _ip("-n", site.namespace, "route", "replace", other.address, *path)

    def relay_seconds(self) -> float:
        """What the link's relay has taken of the sites' cores so far, a half of it from each."""
        (joined,) = self.wan.links
        if joined.relay is None:  # the kernel shapes the link
            return 0.0
        return processor_seconds(joined.relay)

    def sent_bytes(self) -> list[int]:
        """What each site has sent so far, by the counters of its devices."""
        counted = traffic(self.wan)
        return [counted[site].sent_bytes for site in SITES]


@contextlib.contextmanager
def link(settings: WanSettings, name: str = NAME) -> Iterator[Link]:
    """Brings the emulated network up, and takes it down whatever happens."""
    allowed = _ALLOWED.read_text().strip()
    if "cubic" not in allowed.split():
        raise SystemExit(
            "the sites of this benchmark run TCP's cubic, which this machine keeps for itself: "
            f"sysctl -w net.ipv4.{_ALLOWED.name}='{allowed} cubic'"
        )
    wan = bring_up(settings, name)
    try:
        yield Link(wan)
    finally:
        take_down(name)


def _ip(*arguments: str) -> None:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
