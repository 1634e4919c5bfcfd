"""The membership of a site in a run that goes on without a site that is lost."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from geojax.config.run_config import RunConfig
from geojax.errors import FencedError, MissingProcessesError, RunError, UserError
from geojax.islands.going_on.deciding_process import DecidingProcess
from geojax.islands.going_on.following_process import FollowingProcess
from geojax.islands.going_on.site_membership import SiteMembership, Surroundings
from geojax.islands.going_on.steps import record_of_start
from geojax.job.cluster_env import ProcessSettings
from geojax.job.island_env import IslandSettings
from geojax.membership.record import UnreachableStoreError
from geojax.runtime.process_channel import ProcessChannel
from geojax.train.islands.island_run import IslandRun
from geojax.train.islands.record_store import record_store
from geojax.train.islands.running import RunningFacts
from geojax.transport.connect import Joined
from geojax.transport.door import Door, connect_more


def missing_for_a_reason(
    error: MissingProcessesError, config: RunConfig, island: IslandSettings
) -> RunError:
    """Add to an error that other sites may be in a run that goes on without one.

    Args:
        error: says which processes are missing at a start.
        config: the run of all sites.
        island: this site, and the names of all.

    Returns:
        The error; a `FencedError` if the run goes on without this site.
    """
    if config.islands.lease is None:
        return error
    record, lease = None, config.islands.lease
    with contextlib.suppress(UserError, UnreachableStoreError):
        record = record_store(lease, config.run_directory.name).read()
    if record is None or len(record.members) == len(island.sites):
        return error
    lost = [name for site, name in enumerate(island.sites) if site not in record.members]
    text = (
        f"{error}. By {lease.place} the run goes on without site {' and '.join(lost)} (membership "
        f"{record.membership_id}), but no other site answers here"
    )
    return FencedError(text) if island.site in lost else MissingProcessesError(text, error.missing)


def membership_of(
    config: RunConfig,
    joined: Joined,
    processes: ProcessSettings,
    tell: Callable[[Literal["lost", "back"], int, str], None],
) -> SiteMembership | None:
    """Open the record of who takes part; None: the run ends when a site is lost.

    Args:
        config: the run of all sites.
        joined: this site and all others.
        processes: settings of this process, which a site may be silent as long as they say.
        tell: shows an event at a step to the user.
    """
    if config.islands.lease is None:
        return None
    lease, eviction = config.islands.lease, processes.heartbeat_timeout_seconds
    channel = ProcessChannel("membership")
    names = joined.members.island.sites

    def connect(sites: Sequence[int]) -> None:
        connect_more(joined, [names[site] for site in sites], eviction)

    around = Surroundings(
        joined.transport, channel, joined.peers, connect, eviction, config.islands.keeps_batch
    )
    if channel.own > 0:
        return FollowingProcess(around)
    store = record_store(lease, config.run_directory.name)
    return DecidingProcess(around, store, lease.place, config.islands.join_pause, tell)


def begin_membership(
    run: IslandRun,
    membership: SiteMembership,
    joined: Joined,
    metadata: Mapping[str, Any],
    step: int,
    consumed_sequences: int,
    saved_under: int,
) -> None:
    """Agree on a record of all sites at a start, take part after a step, and open the door.

    Args:
        run: this site's.
        membership: this site's.
        joined: this site and all others.
        metadata: what a checkpoint says of the run.
        step: steps done.
        consumed_sequences: sequences of the data that these consumed.
        saved_under: the membership_id of the save that the sites go on from; 0: there is none.
    """
    lease = run.config.islands.lease
    assert lease is not None, "islands go on"
    store = record_store(lease, run.config.run_directory.name)
    record = record_of_start(store, lease.place, run.transport, run.plan.mesh, saved_under)
    save_name = run.begin(record, step)
    facts = RunningFacts.of(run.resolved, metadata, save_name, step, consumed_sequences)
    open_door(membership, joined, facts)


def open_door(membership: SiteMembership, joined: Joined, facts: RunningFacts) -> None:
    """Let sites that return come in, now that this one takes part."""
    island, text = joined.members.island, facts.model_dump_json()
    membership.open_door(lambda: Door(island, joined.processes, text))
