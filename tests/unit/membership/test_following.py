"""A returned site that follows the members, as the holder serves it."""

import pytest

from geojax.membership.events import (
    ApplySums,
    ComputeSums,
    Elapsed,
    Gone,
    HandedOver,
    Heard,
    JoinRequest,
    Received,
    RecordSeen,
    SendTo,
    Silent,
    StoreUnreachable,
    SumsReady,
    SwapRecord,
    TakeState,
    Turn,
    WaitFor,
)
from geojax.membership.record import MembershipRecord
from geojax.membership.transition import may_act, member, returned, transition

LEASE = 3.0
MEMBER, FOLLOWER, SECOND = 1, 2, 3
RECORD = MembershipRecord(5, (0, MEMBER), 0)


class Holder:
    """Site 0, the holder of two members, and what it does."""

    def __init__(self, saved=10, **options):
        self.state, _ = member(0, 4, RECORD, last_step=1000, lease=LEASE, saved=saved, **options)

    def take(self, *events):
        actions = []
        for event in events:
            self.state, more = transition(self.state, event)
            actions += more
        return actions

    def step(self):
        """Apply the step that the holder computes."""
        assert self.state.computing
        step = self.state.applied + 1
        turn = Turn(MEMBER, self.state.record, self.state.applied, has_sums=True)
        actions = self.take(SumsReady(self.state.record.membership_id, step), Received(turn))
        assert self.state.applied == step
        return actions

    def ask(self, applied, follows=True, site=FOLLOWER):
        """Return the steps that are handed over after a request, and whether each is whole."""
        request = JoinRequest(site, self.state.record.membership_id, applied, follows)
        return handed(self.take(Received(request)), site)

    def hand_state(self):
        """Let the follower have the state."""
        assert self.ask(0, follows=False) == [(self.state.applied, True)]


def handed(actions, site=FOLLOWER):
    return [
        (action.message.step, action.message.whole)
        for action in actions
        if isinstance(action, SendTo)
        and action.site == site
        and isinstance(action.message, HandedOver)
    ]


def of_kind(actions, kind):
    return [action for action in actions if isinstance(action, kind)]


def said(actions):
    return " ".join(action.reason for action in of_kind(actions, WaitFor))


def test_a_state_on_its_way_is_handed_over_again_as_it_was():
    holder = Holder()
    holder.hand_state()
    assert (holder.state.follower, holder.state.handed, holder.state.queued_from) == (2, 10, 11)
    for step in (11, 12, 13):
        assert handed(holder.step()) == [(step, False)]
        assert holder.ask(0, follows=False) == [(10, True)]
    assert holder.ask(9) == [(10, True)]
    assert (holder.state.handed, holder.state.queued_from) == (10, 11)


def test_a_follower_with_the_state_gets_all_sums_that_are_held():
    holder = Holder()
    holder.hand_state()
    for _ in range(3):
        holder.step()
    assert holder.ask(10) == [(11, False), (12, False), (13, False)]
    assert (holder.state.handed, holder.state.queued_from) == (0, 11)
    assert holder.ask(12) == [(13, False)]
    assert holder.state.queued_from == 13
    assert holder.ask(13) == []


def test_a_level_follower_is_admitted_at_the_end_of_the_next_step():
    holder = Holder()
    holder.hand_state()
    holder.step()
    holder.ask(10)
    assert of_kind(holder.step(), SwapRecord) == []
    holder.ask(12)
    actions = holder.step()
    new = MembershipRecord(6, (0, 1, 2), 0)
    assert of_kind(actions, SwapRecord) == [SwapRecord(RECORD, new)]
    assert of_kind(actions, ComputeSums) == []
    holder.take(RecordSeen(new))
    assert (holder.state.follower, holder.state.queued_from) == (None, 0)
    turn = Turn(FOLLOWER, new, 12, has_sums=False)
    assert handed(holder.take(Received(turn))) == [(13, False)]


def test_a_follower_is_served_on_while_the_store_does_not_answer():
    holder = Holder()
    holder.hand_state()
    holder.ask(10)
    assert len(of_kind(holder.step(), SwapRecord)) == 1
    assert of_kind(holder.take(StoreUnreachable()), ComputeSums)
    assert holder.ask(10) == [(11, False)]


def test_a_state_that_takes_too_many_steps_is_handed_over_anew():
    holder = Holder(most_queued=2)
    holder.hand_state()
    holder.step()
    holder.step()
    assert holder.state.queued_from == 11
    assert "more than 2 steps" in said(holder.step())
    assert (holder.state.follower, holder.state.handed, holder.state.queued_from) == (2, 0, 0)
    assert handed(holder.step()) == []
    assert holder.ask(10) == [(14, True)]
    assert holder.ask(14) == []


@pytest.fixture
def paused():
    """A holder that has paused with its follower two steps behind."""
    holder = Holder(most_queued=2, join_pause=2.5)
    holder.hand_state()
    holder.step()
    holder.ask(10)
    holder.step()
    holder.ask(10)
    actions = holder.step()
    assert "for site 2 to become level" in said(actions)
    assert of_kind(actions, ComputeSums) == []
    holder.ask(11)
    return holder


def test_a_pause_ends_when_the_follower_is_level(paused):
    assert paused.take(Elapsed(1))
    assert of_kind(paused.take(Elapsed(1)), ComputeSums) == []
    request = JoinRequest(FOLLOWER, 5, 13, follows=True)
    swap = of_kind(paused.take(Received(request)), SwapRecord)
    assert swap == [SwapRecord(RECORD, MembershipRecord(6, (0, 1, 2), 0))]
    turn = Turn(FOLLOWER, swap[0].new, 13, has_sums=False)
    actions = paused.take(
        RecordSeen(swap[0].new), Received(turn), Received(turn._replace(sender=MEMBER))
    )
    assert of_kind(actions, ComputeSums) == [ComputeSums(swap[0].new, 14)]


def test_a_pause_ends_when_the_store_cannot_admit_the_follower(paused):
    request = JoinRequest(FOLLOWER, 5, 13, follows=True)
    assert of_kind(paused.take(Received(request)), SwapRecord)
    assert of_kind(paused.take(StoreUnreachable()), ComputeSums) == [ComputeSums(RECORD, 14)]
    assert paused.state.follower == FOLLOWER


def test_a_pausing_holder_answers_members(paused):
    turn = Turn(MEMBER, RECORD, 13, has_sums=True, asks=True)
    assert of_kind(paused.take(Received(turn)), SendTo) == [
        SendTo(MEMBER, Turn(0, RECORD, 13, has_sums=False))
    ]
    assert paused.state.committed == 13


def test_a_pause_that_runs_out_is_the_last_one_for_that_start(paused):
    paused.take(Elapsed(1), Elapsed(1))
    paused.ask(11)
    actions = paused.take(Elapsed(1))
    assert "not level after a pause of 2.5 s" in said(actions)
    assert of_kind(actions, ComputeSums) == [ComputeSums(RECORD, 14)]
    assert paused.state.follower is None
    assert paused.ask(11) == [(13, True)]
    paused.step()
    assert paused.ask(13) == [(14, False)]
    paused.step()
    assert "takes the state anew" in said(paused.step())
    assert paused.state.computing
    paused.take(Gone(FOLLOWER))
    assert paused.state.paused_for == ()


def test_a_follower_that_is_never_level_gets_a_pause():
    holder = Holder(most_queued=3)
    holder.hand_state()
    holder.step()
    holder.ask(10)
    for step in (12, 13):
        holder.step()
        holder.ask(step - 1)
    assert "for site 2 to become level" in said(holder.step())


@pytest.mark.parametrize("event", [Gone(FOLLOWER), Silent(FOLLOWER), Elapsed(LEASE)])
def test_a_follower_that_is_lost_is_served_no_more(paused, event):
    actions = paused.take(event)
    assert of_kind(actions, ComputeSums)
    assert (paused.state.follower, paused.state.queued_from) == (None, 0)


def test_a_follower_is_forgotten_when_a_member_is_evicted():
    holder = Holder()
    holder.hand_state()
    swap = of_kind(holder.take(Gone(MEMBER)), SwapRecord)[0]
    holder.take(RecordSeen(swap.new))
    assert (holder.state.follower, holder.state.queued_from) == (None, 0)


def test_a_second_returned_site_waits():
    holder = Holder()
    holder.hand_state()
    request = JoinRequest(SECOND, 5, 0, follows=False)
    assert "site 3 returns after site 2" in said(holder.take(Received(request)))
    assert holder.take(Received(request)) == []
    holder.take(Gone(FOLLOWER))
    assert holder.ask(0, follows=False, site=SECOND) == [(10, True)]


def test_an_admitted_site_acts_when_it_has_heard_the_members():
    state, _ = returned(FOLLOWER, 4, last_step=1000, lease=LEASE, saved=3)
    new = MembershipRecord(6, (0, FOLLOWER), 0)
    for event in [
        RecordSeen(MembershipRecord(5, (0,), 0)),
        Received(HandedOver(0, MembershipRecord(5, (0,), 0), 10, whole=True)),
        Received(Turn(0, new, 10, has_sums=False)),
    ]:
        state, _ = transition(state, event)
    assert state.computing
    assert not may_act(state)
    state, _ = transition(state, Heard(0))
    assert may_act(state)


def test_a_returned_site_applies_sums_in_order():
    state, _ = returned(FOLLOWER, 4, last_step=1000, lease=LEASE, saved=3)
    state, _ = transition(state, RecordSeen(RECORD))
    sums = [HandedOver(0, RECORD, step, whole=False) for step in (11, 12)]
    for message, action in [
        (sums[0], None),
        (HandedOver(0, RECORD, 10, whole=True), TakeState(10)),
        (sums[1], None),
        (sums[0], ApplySums(11, 5, 0)),
        (sums[0], None),
        (sums[1], ApplySums(12, 5, 0)),
    ]:
        state, actions = transition(state, Received(message))
        assert [a for a in actions if not isinstance(a, SendTo)] == [action] * (action is not None)
        asked = JoinRequest(FOLLOWER, 5, state.applied, follows=True)
        assert (SendTo(0, asked) in actions) == (action is not None)
