"""Wrong rules of membership, each in the place of one rule of the production function."""

import dataclasses

from support.membership_model import LEASE, Box

from geojax.membership.membership_rules import RULES, MembershipRules

NONE = Box(steps=3, crashes=0, returns=0, partitions=0, messages=0, pauses=0, outages=0)


def replaced(**rule: object) -> MembershipRules:
    """Return the production rules with one other rule."""
    return dataclasses.replace(RULES, **rule)


MUTANTS: dict[str, tuple[MembershipRules, Box]] = {
    "no fencing": (
        replaced(admits_act=lambda newest, membership_id: True),
        NONE._replace(pauses=1, crashes=1),
    ),
    "no acknowledgement on the next step": (
        replaced(is_acknowledged=lambda state: True),
        NONE._replace(crashes=2, steps=2),
    ),
    "expiry by a wall clock that is ahead": (
        replaced(is_expired=lambda state: state.watched + LEASE >= LEASE),
        NONE._replace(partitions=1, outages=1, steps=1),
    ),
    "a holder that does not stop early": (
        replaced(holder_may_act=lambda state: True),
        NONE._replace(partitions=1, outages=1, steps=2, holder=2),
    ),
    "compare-and-set without compare": (
        replaced(swap=lambda current, expected, new: new),
        NONE._replace(partitions=1, outages=1, steps=2, holder=2),
    ),
    "eviction without the store": (
        replaced(evicts_by_store=False),
        NONE._replace(partitions=1, steps=2),
    ),
    "eviction of a member that has not stopped": (
        replaced(leaves_first=False),
        NONE._replace(partitions=1, messages=1),
    ),
    "sums of the record before": (
        replaced(levels_of_new_record=lambda state: (state.levels, state.has_sums)),
        NONE._replace(crashes=1, steps=1, order="any"),
    ),
    "a joining site that goes on alone": (
        replaced(may_evict=lambda state: True),
        NONE._replace(crashes=2, messages=1, members=2),
    ),
    "a returned site that adds a sum twice": (
        replaced(takes_sums=lambda applied, step: step >= applied),
        NONE._replace(crashes=1, returns=1, messages=1, steps=2),
    ),
    "handed sums in any order": (
        replaced(takes_sums=lambda applied, step: step > applied),
        NONE._replace(members=2, steps=4),
    ),
    "a follower of sums that were not held": (
        replaced(is_covered=lambda state, applied: True),
        NONE._replace(messages=1, members=2, steps=4),
    ),
    "a newer state with the sums after an older one": (
        replaced(handed_again=lambda state: state.applied),
        NONE._replace(messages=1, members=2, steps=4),
    ),
    "a follower admitted before it is level": (
        replaced(is_level=lambda state, step: state.level_at >= 0),
        NONE._replace(messages=1, members=2, steps=4),
    ),
    "an older membership_id accepted": (
        replaced(is_older=lambda theirs, mine: False),
        NONE._replace(crashes=1, messages=1, steps=2),
    ),
}
"""By name: the rules, and the faults among which the simulation finds them wrong."""
