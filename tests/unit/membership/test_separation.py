"""Two members that do not hear each other, of whom the holder hears both."""

import pytest

from geojax.membership.events import (
    Elapsed,
    Gone,
    Leave,
    Received,
    SendTo,
    Silent,
    StopActing,
    SwapRecord,
    Unheard,
)
from geojax.membership.record import MembershipRecord
from geojax.membership.transition import member, transition

LEASE = 3.0
HOLDER, EAST, WEST, NORTH = range(4)
RECORD = MembershipRecord(5, (HOLDER, EAST, WEST, NORTH), HOLDER)


def after(site, *events):
    """Return what a member does after events."""
    state, _ = member(site, 4, RECORD, last_step=1000, lease=LEASE, saved=10)
    actions = []
    for event in events:
        state, more = transition(state, event)
        actions += more
    return actions


def test_a_member_tells_the_holder_after_the_eviction_time():
    silent = [Silent(WEST), Elapsed(0.9)]
    told = SendTo(HOLDER, Unheard(EAST, RECORD, (WEST,)))
    assert told not in after(EAST, *silent)
    assert told in after(EAST, *silent, Elapsed(0.2))


def test_a_member_that_does_not_hear_the_holder_tells_it_nothing():
    actions = after(EAST, Silent(WEST), Silent(HOLDER), Elapsed(1.1))
    assert not any(isinstance(getattr(each, "message", None), Unheard) for each in actions)


@pytest.mark.parametrize(
    ("sender", "silent", "leaves"), [(EAST, (WEST,), WEST), (EAST, (WEST, NORTH), EAST)]
)
def test_the_holder_lets_the_one_leave_that_is_cut_off(sender, silent, leaves):
    word = Received(Unheard(sender, RECORD, silent))
    assert after(HOLDER, word) == [SendTo(leaves, Leave(HOLDER, RECORD))]
    without = MembershipRecord(6, tuple(set(RECORD.members) - {leaves}), HOLDER)
    assert after(HOLDER, word, Gone(leaves))[1:] == [SwapRecord(RECORD, without)]


def test_one_of_two_leaves_whatever_both_say():
    words = [Unheard(EAST, RECORD, (WEST,)), Unheard(WEST, RECORD, (EAST,))]
    assert after(HOLDER, *map(Received, words)) == [SendTo(WEST, Leave(HOLDER, RECORD))] * 2


def test_a_member_that_is_to_leave_stops():
    assert after(WEST, Received(Leave(HOLDER, RECORD)))[0] == StopActing(RECORD)
    assert after(WEST, Received(Leave(EAST, RECORD))) == []
    assert after(WEST, Received(Leave(HOLDER, RECORD._replace(holder=EAST)))) == []


@pytest.mark.parametrize(
    "message",
    [
        Unheard(EAST, RECORD, ()),
        Unheard(EAST, RECORD, (HOLDER,)),
        Unheard(EAST, RECORD, (77,)),
        Unheard(EAST, RECORD._replace(holder=EAST), (WEST,)),
    ],
)
def test_a_word_about_nobody_evicts_nobody(message):
    assert after(HOLDER, Received(message)) == []


def test_a_member_that_is_not_the_holder_evicts_nobody_by_it():
    assert after(NORTH, Received(Unheard(EAST, RECORD, (WEST,)))) == []
