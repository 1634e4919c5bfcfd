"""The membership of a site in a run that goes on without a site that is lost."""

from collections.abc import Callable
from typing import Any

import jax

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.going_on.site_membership import SiteMembership
from geojax.islands.going_on.steps import record_of_start
from geojax.job.cluster_env import ProcessSettings
from geojax.membership.file_store import FileRecordStore
from geojax.train.islands.island_run import IslandRun
from geojax.transport import CarrierTransport


def membership_of(
    config: RunConfig,
    transport: CarrierTransport,
    processes: ProcessSettings,
    tell: Callable[[int, str], None],
) -> SiteMembership | None:
    """Open the record of who takes part; None: the run ends when a site is lost.

    Args:
        config: the run of all sites.
        transport: joins this site to all others.
        processes: settings of this process, which a site may be silent as long as they say.
        tell: shows an event at a step to the user.

    Raises:
        UserError: the sites have several processes.
    """
    if config.islands.lease is None:
        return None
    if (count := jax.process_count()) > 1:
        raise UserError(
            f"islands.on_loss=go_on requires one process in each site; got {count}. Give a process "
            "all devices of its site, or remove islands.on_loss"
        )
    path = config.islands.lease.path
    return SiteMembership(
        transport,
        FileRecordStore(path, config.run_directory.name),
        str(path),
        processes.heartbeat_timeout_seconds,
        tell,
    )


def begin_membership(run: Any, membership: SiteMembership, config: RunConfig, step: int) -> None:
    """Agree on a record of all sites at a start, and take part after a step."""
    assert isinstance(run, IslandRun), "islands go on"
    record = record_of_start(membership.store, membership.place, run.transport, run.plan.mesh)
    run.begin(record, step)
