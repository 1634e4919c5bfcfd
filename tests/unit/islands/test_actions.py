"""Lists of actions: what they say, and that no schedule or window deadlocks."""

import functools
import random

import pytest
from support.drawn_schedules import drawn_schedule

from geojax.islands.actions import (
    Add,
    Reduce,
    SumPart,
    breadth_first,
    data_actions,
    own_shares,
    received,
    sent,
    shares_of_members,
    stage_actions,
    windows,
)
from geojax.islands.fetch_window import FetchWindow
from geojax.pipeline import one_forward_one_backward, validate
from geojax.pipeline.schedule import Action


def told(actions):
    return " ".join(map(word, actions))


def word(action):
    match action:
        case Action():
            return str(action)
        case (Action() as taken, site):
            return f"{type(action).__name__}({taken}, {site})"
        case Reduce() | Add():
            return f"{type(action).__name__}({action.bucket})"
    return type(action).__name__


def test_buckets_of_role_data_leave_chunk_by_chunk_and_are_added_last():
    schedule = breadth_first(chunks=2, microbatches=3, held=2)
    validate(schedule, limit=4)
    assert told(data_actions(schedule, 0, own_shares(2))) == (
        "F0.0 F0.1 B0.1 B0.0 F1.0 F1.1 F2.0 F2.1 B1.1 B2.1 Reduce(1) B1.0 B2.0 Reduce(0) "
        "Reduce(scalars) Add(1) Add(0) Add(scalars) Apply"
    )


def test_a_site_computes_the_shares_of_those_that_are_lost_one_after_the_other():
    schedule = breadth_first(chunks=2, microbatches=1, held=1)
    actions = data_actions(schedule, 1, [(0,), (1, 2), ()])
    assert told(actions) == (
        "F0.0 F0.1 B0.1 Reduce(1) B0.0 Reduce(0) Reduce(scalars) "
        "F1.0 F1.1 B1.1 Reduce(1) B1.0 Reduce(0) Reduce(scalars) "
        "Add(1) Add(0) Add(scalars) Apply"
    )
    assert [each.share for each in actions if isinstance(each, Reduce)] == [1, 1, 1, 2, 2, 2]
    assert {each.parts for each in actions if isinstance(each, Add)} == {(SumPart(0, 0),)}
    (of_other, *_) = (
        each for each in data_actions(schedule, 0, [(0,), (1, 2), ()]) if isinstance(each, Add)
    )
    assert of_other.parts == (SumPart(1, 1), SumPart(2, 1))
    assert data_actions(schedule, 2, [(0,), (1, 2), ()]) == ()


def test_whole_shares_of_lost_sites_go_round_among_the_others():
    kept = functools.partial(shares_of_members, keeps_batch=True)
    assert kept(3, (0, 1, 2), holder=1) == own_shares(3)
    assert kept(3, (0, 2), holder=2) == ((0, 1), (), (2,))
    assert kept(5, (1, 4), holder=4) == ((), (1, 0, 3), (), (), (4, 2))
    assert kept(3, (2,), holder=2) == ((), (), (2, 0, 1))


def test_the_site_that_gives_its_state_computes_another_share_last():
    kept = functools.partial(shares_of_members, keeps_batch=True)
    assert kept(3, (0, 2), holder=0) == ((0,), (), (2, 1))
    assert kept(5, (0, 2, 4), holder=2) == ((0, 1), (), (2,), (), (4, 3))
    assert kept(5, (1, 4), holder=1) == ((), (1, 2), (), (), (4, 0, 3))


def test_shares_of_lost_sites_are_left_out_where_the_batch_shrinks():
    assert shares_of_members(3, (0, 2), holder=0, keeps_batch=False) == ((0,), (), (2,))


def test_a_stage_sends_and_receives_at_its_cuts_only():
    schedule = one_forward_one_backward(2, 2)
    assert told(stage_actions(schedule, 0, tied=True)) == (
        "F0.0 Send(F0.1, 1) F1.0 Send(F1.1, 1) Receive(B0.0, 1) B0.0 Receive(B1.0, 1) B1.0 "
        "Reduce(0) Reduce(table) Add(table) Reduce(scalars) Add(scalars) Apply"
    )
    assert told(stage_actions(schedule, 1, tied=False)) == (
        "Receive(F0.1, 0) F0.1 B0.1 Send(B0.0, 0) Receive(F1.1, 0) F1.1 B1.1 Send(B1.0, 0) "
        "Reduce(1) Reduce(scalars) Add(scalars) Apply"
    )


@pytest.mark.parametrize(("sites", "stages"), [(2, 1), (2, 2), (2, 6), (3, 4), (2, 64)])
def test_messages_of_scalars_are_as_many_as_stages(sites, stages):
    schedule = one_forward_one_backward(sites * stages, 1)
    crossing = inside = 0
    for stage in range(sites * stages):
        for action in stage_actions(schedule, stage, tied=False, stages_per_site=stages):
            for receiver, message in sent(action):
                if message.kind.endswith("scalars"):
                    crosses = receiver // stages != stage // stages
                    crossing, inside = crossing + crosses, inside + (not crosses)
    # Each site tells each other one; in a site all tell the first stage, which tells all.
    assert (crossing, inside) == (sites * (sites - 1), 2 * sites * (stages - 1))


class Offered:
    """A fetch that arrives as soon as the message is offered, and takes it out of flight."""

    def __init__(self, in_flight, message):
        self.in_flight, self.message, self.is_here = in_flight, message, False

    def arrived(self):
        if self.message in self.in_flight:
            self.in_flight.remove(self.message)
            self.is_here = True
        return self.is_here

    def result(self):
        assert self.arrived()
        return [self.message]


class Site:
    """One site of a run without devices: it stops where it would wait."""

    def __init__(self, number, actions, ahead, in_flight, limit):
        self.number, self.actions, self.position = number, actions, 0
        self.in_flight, self.limit = in_flight, limit
        of_sender = {sender: count for (sender, to), count in ahead.items() if to == number}
        self.fetches = []
        self.window = FetchWindow(actions, of_sender, self.begin)

    def begin(self, sender, message):
        self.fetches.append(Offered(self.in_flight[sender, self.number], message))
        return self.fetches[-1]

    def advance(self):
        """Run one action, if it would not wait."""
        for fetch in self.fetches:
            fetch.arrived()
        if self.position == len(self.actions):
            return False
        action = self.actions[self.position]
        if not all(self.window.fetch(*each).arrived() for each in received(action)):
            return False
        offers = list(sent(action))
        if any(len(self.in_flight[self.number, to]) >= self.limit for to, _ in offers):
            return False
        for each in received(action):
            assert self.window.take(*each) == [each[1]]
        for to, message in offers:
            self.in_flight[self.number, to].append(message)
        self.position += 1
        return True


def finishes(draw, lists, ahead, limit):
    """Walk all lists, whichever site comes first, with few offers in flight."""
    count = len(lists)
    in_flight = {(a, b): [] for a in range(count) for b in range(count)}
    sites = [Site(n, own, ahead, in_flight, limit) for n, own in enumerate(lists)]
    stuck = 0
    while stuck < 3:
        draw.shuffle(sites)
        patience = [draw.randint(1, 20) for _ in sites]
        moved = [
            sum(site.advance() for _ in range(tries)) > 0
            for site, tries in zip(sites, patience, strict=True)
        ]
        stuck = 0 if any(moved) else stuck + 1
    return all(site.position == len(site.actions) for site in sites)


def test_no_schedule_deadlocks_with_few_offers_in_flight():
    draw = random.Random(0)
    for _ in range(500):
        schedule = drawn_schedule(draw)
        validate(schedule)
        tied, stages = draw.random() < 0.5, schedule.placement.stages
        of_site = draw.choice([count for count in range(1, stages) if stages % count == 0])
        lists = [
            stage_actions(schedule, stage, tied=tied, stages_per_site=of_site)
            for stage in range(stages)
        ]
        assert finishes(draw, lists, windows(lists), limit=draw.randint(1, 3)), schedule


def drawn_shares(draw, sites):
    """Shares of which some sites that are left have those of others that are lost."""
    of_sites = [list(own) for own in own_shares(sites)]
    left = draw.sample(range(sites), draw.randint(1, sites))
    for lost in set(range(sites)) - set(left):
        of_sites[draw.choice(left)] += of_sites[lost]
        of_sites[lost] = []
    return of_sites


@pytest.mark.parametrize("sites", [2, 3, 4])
def test_no_order_of_role_data_deadlocks(sites):
    draw = random.Random(sites)
    for _ in range(20):
        microbatches = draw.randint(1, 5)
        schedule = breadth_first(draw.randint(1, 6), microbatches, draw.randint(1, microbatches))
        of_sites = drawn_shares(draw, sites)
        lists = [data_actions(schedule, site, of_sites) for site in range(sites)]
        assert finishes(draw, lists, windows(lists), limit=1), schedule
