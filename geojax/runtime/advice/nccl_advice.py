"""Advice on NCCL's settings for the links between sites.

A connection of NCCL has NCCL_BUFFSIZE bytes in flight in each of its channels. A device therefore
sends at most channels * NCCL_BUFFSIZE / round trip to another site. The defaults of 4 MiB and two
channels allow 400 MB/s at 21 ms. That fills a link of 3.2 Tbit/s with 1,536 devices; 8 devices use
a hundredth of the same link.

Variables hold for all communicators of a process: XLA gives NCCL neither a network (`netName`) nor
a least number of channels for one of them (`ncclConfig_t`; XLA sets `blocking`, `splitShare` and
`maxCTAs`). Sources are in docs/networks.md.
"""

import math
from collections.abc import Mapping

from geojax.quantities import quantity
from geojax.topology import Link

_DEFAULT_BUFFER = 4 * 2**20
_LARGEST_BUFFER = 64 * 2**20
_DEFAULT_CHANNELS = 2
_MOST_CHANNELS = 32
# Below this latency hides behind what NCCL keeps in flight anyway.
_LONG_ROUND_TRIP_SECONDS = 2e-3
_CROSS_SITE_MODE = ("NCCL_ALLNET_ENABLE", "NCCL_IB_FABRICID_MAXRAIL")


def nccl_advice(
    link: Link, devices: int, card_bytes_per_second: float | None, environment: Mapping[str, str]
) -> list[str]:
    """List the settings of NCCL that keep devices of a site from filling `link`, a line each.

    Args:
        link: its round trip and bandwidth.
        devices: those of the site, which all send at the same time.
        card_bytes_per_second: of a device's own network card; None where it is not known.
        environment: the process's variables.
    """
    trip = link.round_trip_seconds
    if trip < _LONG_ROUND_TRIP_SECONDS:
        return []
    rate = min(link.bytes_per_second / devices, card_bytes_per_second or math.inf)
    buffer = _number(environment, "NCCL_BUFFSIZE") or _DEFAULT_BUFFER
    channels = (
        _number(environment, "NCCL_MIN_CTAS")
        or _number(environment, "NCCL_MIN_NCHANNELS")
        or _DEFAULT_CHANNELS
    )
    lines = []
    if channels * buffer < rate * trip:
        wanted = 2 * rate * trip  # a slot is free again when its data was read and that was said
        larger = min(_power_of_two(wanted / channels), _LARGEST_BUFFER)
        more = max(channels, min(_power_of_two(wanted / larger), _MOST_CHANNELS))
        reached = min(more * larger / trip, rate)
        lines.append(
            f"NCCL keeps {channels} x {quantity(buffer, 'B')} of a device in flight, so at most "
            f"{_rate(channels * buffer / trip)} of its {_rate(rate)}: NCCL_BUFFSIZE={larger} "
            f"NCCL_MIN_CTAS={more} NCCL_NCHANNELS_PER_NET_PEER={more} allow "
            f"{_rate(reached)} for {quantity(2 * more * larger, 'B')} of memory a connection"
        )
    if "NCCL_IB_QPS_PER_CONNECTION" not in environment:
        lines.append(
            "RDMA writes of one queue pair are slow over a long round trip: try "
            "NCCL_IB_QPS_PER_CONNECTION=4"
        )
    if not any(name in environment for name in _CROSS_SITE_MODE):
        lines.append(
            "NCCL uses one network for all communicators of a process. If InfiniBand does not "
            "reach the other site, NCCL_ALLNET_ENABLE=1 NCCL_ALLNET_FASTNET=IB (a release with "
            "nccl#1659) lets sums over sites go over Ethernet"
        )
    return lines


def _number(environment: Mapping[str, str], name: str) -> int | None:
    given = environment.get(name, "")
    return int(given) if given.isdecimal() and int(given) else None


def _power_of_two(number: float) -> int:
    return 2 ** max(0, math.ceil(math.log2(number)))


def _rate(bytes_per_second: float) -> str:
    return quantity(8 * bytes_per_second, "bit/s")
