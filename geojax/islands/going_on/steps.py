"""Steps of a site in role data that are done again without a site that is lost."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from geojax.errors import UserError
from geojax.islands.actions import Shares, SiteAction, fetched_ahead
from geojax.islands.exchange import Exchange
from geojax.islands.going_on.site_membership import InterruptedStepError, SiteMembership
from geojax.islands.programs.values import StepInputs
from geojax.islands.recording import Recorded
from geojax.islands.walk import Walk
from geojax.membership.events import ApplySums
from geojax.membership.record import MembershipRecord, RecordStore
from geojax.runtime.agreement import value_of_first
from geojax.transport import Transport

_RECORD_SECONDS = 60.0
"""Time that the first process has to write the record."""


class SharedStep(NamedTuple):
    """A step, whatever shares of the batch this site computes."""

    number: int
    """Its number in the run, from 1."""
    lists: Callable[[Shares], Sequence[Sequence[SiteAction]]]
    """Actions of each site, by the shares of each."""
    inputs: Callable[[int], StepInputs]
    """Arguments for a share of the batch."""


def run_step(
    membership: SiteMembership,
    walk: Walk,
    step: SharedStep,
    state: Any,
    signals: jax.Array,
    record: list[Recorded] | None = None,
) -> tuple[Any, Any]:
    """Run a step of all sites that take part, again where these change meanwhile.

    Args:
        membership: who takes part.
        walk: the site's.
        step: the step.
        state: the site's `TrainState`; donated by the last program.
        signals: requests of the site's ranks.
        record: gets the times of every action.

    Returns:
        The next state and the metrics, the same at all sites.

    Raises:
        FencedError: the run goes on without this site.
    """
    membership.handing.hold(step.number - 1, state)
    while True:
        work = membership.work_on(step.number)
        if isinstance(work, ApplySums):
            return walk.apply(membership.handed(work))
        _take_shares(walk, step, work.record, membership.shares_of(work.record))
        inputs = [step.inputs(share) for share in walk.shares]
        walk.number_from(step.number)
        try:
            with membership.at_work(work) as summed:
                return walk.step(state, signals, inputs, record, summed)
        except InterruptedStepError:
            if record is not None:
                record.clear()


def _take_shares(walk: Walk, step: SharedStep, record: MembershipRecord, shares: Shares) -> None:
    """Let a walk compute the shares that a record gives to its site."""
    if walk.membership_id == record.membership_id:
        return
    site, lists = walk.transport.site, step.lists(shares)
    walk.take_shares(lists[site], fetched_ahead(lists, site), record.membership_id)


def record_of_start(
    store: RecordStore, place: str, transport: Transport, mesh: Mesh, saved_under: int = 0
) -> MembershipRecord:
    """Write the record of a start at which all sites have met, and check that all see it.

    All processes call it; the first of a site uses the store.

    Args:
        store: has the record.
        place: name of the store, for errors.
        transport: joins all sites.
        mesh: the site's devices.
        saved_under: the membership_id of the save that the sites go on from, which that of the
            record exceeds even in a new store; 0: there is none.

    Raises:
        UserError: the store is another at this site, or has something else.
        UnreachableStoreError: the store does not answer.
        RunError: another site is lost.
    """
    exchange = Exchange(transport, "membership")
    record = MembershipRecord(1 + saved_under, tuple(range(transport.sites)), 0)
    is_first = jax.process_index() == 0
    if transport.site == 0 and is_first:
        before = store.create(record)
        if before != record:
            newest = max(before.membership_id, saved_under)
            record = store.swap(before, record._replace(membership_id=newest + 1))
    number = value_of_first("membership", str(record.membership_id), _RECORD_SECONDS)
    told = exchange.of_hosts(np.array([int(number)], np.uint32), mesh)
    record = record._replace(membership_id=int(told[0][0]))
    if is_first and store.read() != record:
        names = transport.site_names
        raise UserError(
            f"islands.lease: {place} has another record at site {names[transport.site]} than "
            f"at site {names[0]}; give all sites the same one"
        )
    return record
