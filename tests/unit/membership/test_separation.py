"""Two members that do not hear each other, of whom the holder hears both."""

import pytest

from geojax.membership.events import Elapsed, Received, SendTo, Silent, SwapRecord, Unheard
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
    ("sender", "silent", "members"),
    [
        (EAST, (WEST,), (HOLDER, EAST, NORTH)),
        (EAST, (WEST, NORTH), (HOLDER, WEST, NORTH)),
    ],
)
def test_the_holder_takes_out_the_one_that_is_cut_off(sender, silent, members):
    actions = after(HOLDER, Received(Unheard(sender, RECORD, silent)))
    assert actions == [SwapRecord(RECORD, MembershipRecord(6, members, HOLDER))]


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
