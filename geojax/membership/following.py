"""A returned site that follows the members, and the holder that serves it.

    JoinRequest            the holder hands over its state, and holds the sums of all later steps
    a step is applied      its sums go to the follower at once
    the follower has the state
                           all sums that are held go to it, and those that it has leave the queue
    the follower is level  it is admitted at the end of the next step

A state that is on its way is handed over again as it was, so that it may take many steps to cross.
If too many sums are held before it has arrived, the follower begins again. If the follower has its
state and does not become level, the members pause for it once.
"""

from geojax.membership.events import HandedOver, JoinRequest
from geojax.membership.member_state import UNKNOWN, MemberState, replaced
from geojax.membership.membership_rules import MembershipRules


def served(
    state: MemberState, request: JoinRequest, rules: MembershipRules
) -> tuple[MemberState, tuple[HandedOver, ...]]:
    """Return a holder's state after a request of its follower, and what it hands over now."""
    state = state._replace(
        follower=request.sender,
        unasked=0.0,
        requests=replaced(state.requests, request.sender, UNKNOWN),
    )
    is_on_its_way = state.queued_from > 0 and state.level_at < 0
    if is_on_its_way and not (request.follows and request.applied >= state.handed):
        return state, (_handed_over(state, rules.handed_again(state), whole=True),)
    if not (request.follows and rules.is_covered(state, request.applied)):
        state = state._replace(queued_from=state.applied + 1, level_at=UNKNOWN)
        return state, (_handed_over(state, state.applied, whole=True),)
    state = state._replace(queued_from=request.applied + 1)
    if state.level_at < 0 or state.queued_from > state.applied:
        state = state._replace(level_at=state.applied)
    steps = range(state.queued_from, state.applied + 1)
    return state, tuple(_handed_over(state, step, whole=False) for step in steps)


def _handed_over(state: MemberState, step: int, *, whole: bool) -> HandedOver:
    assert state.record is not None, "a holder has a record"
    return HandedOver(state.site, state.record, step, whole)


def begun_again(state: MemberState) -> MemberState:
    """Return the state of a holder that hands its state to the follower anew when it asks."""
    return state._replace(queued_from=0, level_at=UNKNOWN)


def without_follower(state: MemberState) -> MemberState:
    """Return a state without the follower and all that is held for it."""
    return begun_again(state)._replace(follower=None, unasked=0.0, paused=UNKNOWN)


def overflows(state: MemberState) -> bool:
    """Return True if more sums than may be are held for the follower."""
    return 0 < state.queued_from <= state.applied - state.most_queued


def lags(state: MemberState) -> bool:
    """Return True if the follower has its state, and was not level for too many steps."""
    return state.level_at >= 0 and (
        overflows(state) or state.applied - state.level_at >= state.most_queued
    )
