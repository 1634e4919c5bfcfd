"""The times after which sites of a run that goes on act, each with the key that sets it."""

from geojax.config.run_config import RunConfig
from geojax.islands.going_on.deciding_process import UNREACHED_LEASES
from geojax.job.cluster_env import VARIABLES, ProcessSettings
from geojax.membership.member_state import SILENT_SHARE
from geojax.quantities import duration


def time_out_lines(config: RunConfig, processes: ProcessSettings) -> list[str]:
    """Return a table in lines for the log of a run.

    Args:
        config: the run of all sites.
        processes: settings of this process, completed.
    """
    lease = processes.heartbeat_timeout_seconds
    heartbeat = VARIABLES["heartbeat_timeout_seconds"]
    start = VARIABLES["start_timeout_seconds"]
    rows = [
        ("a silent site is taken out of the record", lease, heartbeat),
        ("a site that does not hear another stops", SILENT_SHARE * lease, f"2/3 of {heartbeat}"),
        ("the record has to answer", lease / 3, f"1/3 of {heartbeat}"),
        ("all sites have to start", processes.start_timeout_seconds, start),
        (
            "all have to answer a site that returns",
            UNREACHED_LEASES * lease,
            f"{UNREACHED_LEASES:g} x {heartbeat}",
        ),
        ("longest pause for a site that returns", config.islands.join_pause, "islands.join_pause"),
        ("a step may always take", config.watchdog.minimum_seconds, "watchdog.minimum_seconds"),
    ]
    return [f"{what:<41} {duration(seconds):>8}  {key}" for what, seconds, key in rows]
