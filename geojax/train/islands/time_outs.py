"""The times after which sites of a run that goes on act, each with the key that sets it.

They rest on the links: what sites say to each other has to come in a third of the eviction time,
and a site that returns takes the state and the sums of steps over the slowest link.
"""

import math
from collections.abc import Mapping

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.going_on.deciding_process import UNREACHED_LEASES
from geojax.islands.going_on.handing_over import HandedBytes
from geojax.job.cluster_env import VARIABLES, ProcessSettings
from geojax.membership.member_state import SILENT_SHARE
from geojax.quantities import duration, quantity
from geojax.topology import Link
from geojax.transport import MeasuredLink
from geojax.transport.control import HEARTBEAT_SECONDS

_HEARTBEAT = VARIABLES["heartbeat_timeout_seconds"]
_START = VARIABLES["start_timeout_seconds"]
_ROUND_TRIPS = 10
"""Round trips in which a message and its answer come: TCP may send each packet three times, in
three and a half round trips, and a connection that is opened anew before takes three more."""


def time_outs(
    config: RunConfig,
    processes: ProcessSettings,
    links: Mapping[str, MeasuredLink],
    planned: Mapping[str, Link],
    handed: HandedBytes,
) -> tuple[list[str], float]:
    """Return a table of the times after which this site acts.

    Args:
        config: the run of all sites.
        processes: settings of this process, completed.
        links: what was measured of the link to each other site, by its name.
        planned: what the topology says of links to other sites.
        handed: bytes that this site hands to one that returns.

    Returns:
        The lines, and the time that a step may always take.

    Raises:
        UserError: the eviction time is too short for a round trip.
    """
    lease, pause = processes.heartbeat_timeout_seconds, config.islands.join_pause
    trips = [(link.round_trip_seconds or 0.0, site) for site, link in links.items()]
    trip, farthest = max(trips, default=(0.0, ""))
    least = 3 * (HEARTBEAT_SECONDS + _ROUND_TRIPS * trip)
    if lease < least:
        raise UserError(
            f"{_HEARTBEAT}={lease:g} is too short: a message and its answer have a third of it, "
            f"and may take {HEARTBEAT_SECONDS:g} s and {_ROUND_TRIPS} round trips of "
            f"{duration(trip)} to site {farthest}; give {math.ceil(least)} or more"
        )
    rates = {site: link.bytes_per_second for site, link in planned.items()}
    step, key = config.watchdog.minimum_seconds, "watchdog.minimum_seconds"
    paused = pause + max((handed.sums / rate for rate in rates.values()), default=0.0)
    if paused > step:  # or a pause would end the process
        step, key = paused, "islands.join_pause"
    rows = [
        ("a silent site is taken out of the record", lease, _HEARTBEAT),
        ("the measured round trips need at least", least, _HEARTBEAT),
        ("a site that does not hear another stops", SILENT_SHARE * lease, f"2/3 of {_HEARTBEAT}"),
        ("a message, its answer and the record have", lease / 3, f"1/3 of {_HEARTBEAT}"),
        ("all sites have to start", processes.start_timeout_seconds, _START),
        (
            "all have to answer a site that returns",
            UNREACHED_LEASES * lease,
            f"{UNREACHED_LEASES:g} x {_HEARTBEAT}",
        ),
        ("longest pause for a site that returns", pause, "islands.join_pause"),
        ("a step may always take", step, key),
    ]
    lines = [f"{what:<41} {duration(seconds):>8}  {key}" for what, seconds, key in rows]
    for site, link in links.items():
        rate, text = rates.get(site), "rate not known before the first steps"
        if rate is not None:
            text = rate_text(rate, "topology", handed, pause)
        measured = link.round_trip_seconds
        trip_text = "not measured" if measured is None else f"{duration(measured)} (measured)"
        lines.append(f"link to {site}: round trip {trip_text}, {text}")
    return lines, step


def rate_text(rate: float, source: str, handed: HandedBytes, pause: float) -> str:
    """Say how fast a link is, and how long a site that returns waits for what crosses it.

    Args:
        rate: bytes per second.
        source: how it is known.
        handed: bytes that cross.
        pause: longest pause for a site that returns, in seconds.
    """
    state, sums = (duration(size / rate) for size in handed)
    text = (
        f"{quantity(8 * rate, 'bit/s')} ({source}), by which a site that returns takes a state of "
        f"{quantity(handed.state, 'B')} in {state} and the sums of a step in {sums}"
    )
    if 0 < pause < handed.sums / rate:
        text += f"; islands.join_pause={pause:g} is shorter, and of no use: give more, or 0"
    return text
