"""No two messages of a run, nor of its next start, have the same identifier."""

import math
import random
from collections import Counter

import jax
import numpy as np
from support.drawn_schedules import drawn_schedule

from geojax.islands.actions import (
    breadth_first,
    data_actions,
    own_shares,
    sent,
    stage_actions,
)
from geojax.islands.exchange import Exchange
from geojax.islands.stage_transport import stage_transports
from geojax.transport import MessageKey
from geojax.transport.message_id import Direction, message_id
from geojax.transport.protocol import PeerCounters

KEY = bytes(32)


class Here:
    """A fetch that has arrived."""

    def __init__(self, like):
        self.like = like

    def result(self):
        return [np.zeros(each.shape, each.dtype) for each in self.like]


class Recorder:
    """A transport that counts the identifiers of what is offered."""

    def __init__(self, site, sites, nonces, identifiers):
        self.site, self.sites = site, sites
        self.site_names = [str(each) for each in range(sites)]
        self.counters = {each: PeerCounters() for each in range(sites) if each != site}
        self.nonces, self.identifiers = nonces, identifiers

    def offer(self, receiver, key, arrays, *, yields=False):
        there = Direction(
            (self.site, 0), (receiver, 0), self.nonces[self.site], self.nonces[receiver]
        )
        self.identifiers[message_id(KEY, there, key, arrays)] += 1

    def fetch(self, sender, key, like):
        return Here(like)


def offer_all(lists, recorder, stages, steps):
    """Offer what a site sends in its steps, of which every list is one stage's; the number."""
    count = 0
    for transport in stage_transports(recorder, stages):
        for step in range(1, steps + 1):
            for action in lists[transport.site]:
                for receiver, message in sent(action):
                    if receiver // stages != recorder.site:
                        transport.offer(receiver, MessageKey(step, *message), [])
                        count += 1
    return count


def drawn_lists(draw):
    """The lists of actions of all stages, and the stages of a site."""
    if draw.random() < 0.3:
        sites, microbatches = draw.randint(2, 4), draw.randint(1, 5)
        schedule = breadth_first(draw.randint(1, 6), microbatches, draw.randint(1, microbatches))
        return [data_actions(schedule, site, own_shares(sites)) for site in range(sites)], 1
    schedule, tied = drawn_schedule(draw), draw.random() < 0.5
    count = schedule.placement.stages
    stages = math.gcd(count, draw.choice([1, 2]))
    lists = [
        stage_actions(schedule, stage, tied=tied, stages_per_site=stages) for stage in range(count)
    ]
    return lists, stages


def test_no_identifier_is_offered_twice():
    draw = random.Random(0)
    number = jax.device_put(np.zeros(()))  # which compiles nothing
    for _ in range(60):
        lists, stages = drawn_lists(draw)
        sites, steps = len(lists) // stages, draw.randint(1, 3)
        identifiers, offers = Counter(), 0
        for start in range(2):
            nonces = [f"{start} {site}" for site in range(sites)]
            for site in range(sites):
                recorder = Recorder(site, sites, nonces, identifiers)
                offers += offer_all(lists, recorder, stages, steps)
                for exchange in (Exchange(recorder), Exchange(recorder, "saves")):
                    for _ in range(2):
                        exchange.of_all_sites(number)
                        offers += sites - 1
        assert sites == 1 or offers > 8
        assert len(identifiers) == offers
