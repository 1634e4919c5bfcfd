"""The rules of membership on which safety rests."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from geojax.membership.member_state import UNKNOWN, MemberState, holder_of, members_of
from geojax.membership.record import MembershipRecord, swapped


@dataclass(frozen=True)
class MembershipRules:
    """The rules on which safety rests, one a field, so that a test can replace each by a wrong one.

    `swap` and `admits_act` are for the store and for whoever receives saves and metrics.
    """

    swap: Callable[[MembershipRecord, MembershipRecord, MembershipRecord], MembershipRecord] = (
        swapped
    )
    admits_act: Callable[[int, int], bool] = lambda newest, membership_id: membership_id >= newest
    """An act with an older id than the newest one known is refused."""
    is_older: Callable[[MembershipRecord, MembershipRecord], bool] = lambda theirs, mine: (
        theirs.membership_id < mine.membership_id
    )
    is_acknowledged: Callable[[MemberState], bool] = lambda state: all(
        state.levels[site] >= state.applied for site in members_of(state)
    )
    """A step is acted on when every member has said, with the next step's sums, that it has it."""
    is_expired: Callable[[MemberState], bool] = lambda state: (
        state.watched >= state.lease or state.silence[holder_of(state)] == math.inf
    )
    """A holder that is silent may act for a time; one whose process has ended does not."""
    holder_may_act: Callable[[MemberState], bool] = lambda state: (
        max(state.silence) < state.lease * 2 / 3
    )
    may_evict: Callable[[MemberState], bool] = lambda state: not state.joining
    """An admitted site may lack a step that the others have committed."""
    evicts_by_store: bool = True
    """A member is evicted by compare-and-set alone."""
    leaves_first: bool = True
    """A member that the holder hears is evicted when it has stopped: until then it may act."""
    levels_of_new_record: Callable[[MemberState], tuple[tuple[int, ...], tuple[bool, ...]]] = (
        lambda state: ((UNKNOWN,) * len(state.levels), (False,) * len(state.levels))
    )
    """Sums that came under one record are not used under the next."""
    takes_sums: Callable[[int, int], bool] = lambda applied, step: step == applied + 1
    """Handed sums are applied to the state before their step, once."""
    is_covered: Callable[[MemberState, int], bool] = lambda state, applied: (
        applied + 1 >= (state.queued_from or state.applied + 1)
    )
    """A returned site follows from its step on if the sums of all later steps are held."""
    handed_again: Callable[[MemberState], int] = lambda state: state.handed
    """A state that is on its way is not replaced by a newer one, which nobody holds for it."""
    is_level: Callable[[MemberState, int], bool] = lambda state, step: (
        state.level_at >= 0 and state.queued_from == step + 1
    )
    """A returned site is admitted if it lacks no step, or the one alone that has just ended."""


RULES = MembershipRules()
