"""Sites, links and a store around the transition function: invariants in every reachable state."""

import random

import pytest
from support.membership_model import Box, Model, explore, shown, walk
from support.membership_mutants import MUTANTS, NONE

from geojax.membership.membership_rules import RULES

WALKS = 2_500
"""Random walks of one test; the four tests take a minute and a half of one core."""


@pytest.mark.parametrize(
    ("box", "states"), [(Box(faults=1), 5_000), (Box(faults=1, members=2), 2_000)]
)
def test_every_state_with_one_fault_keeps_the_invariants(box, states):
    result = explore(Model(box))
    assert result.violation is None, shown(result)
    assert result.faults == 1
    assert result.states > states


def test_a_returned_site_is_admitted_after_the_sums_that_it_has_followed():
    model = Model(NONE._replace(members=2, steps=5, most_queued=2))
    assert explore(model).violation is None
    assert model.reached == {"a returned site follows", "a returned site is admitted"}


def test_the_states_with_one_fault_have_all_that_may_happen_to_a_returned_site():
    model = Model(Box(faults=1, members=1))
    result = explore(model)
    assert result.violation is None, shown(result)
    assert model.reached == {
        "a follower begins again",
        "a pause ends in an admission",
        "a pause runs out",
        "a returned site follows",
        "a returned site is admitted",
        "a returned site waits for another",
        "the members pause",
    }


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_found_where_the_production_rule_is_sound(name):
    rules, box = MUTANTS[name]
    wrong = explore(Model(box, rules), most_states=60_000)
    assert wrong.violation is not None
    assert str(wrong.violation) in shown(wrong)
    right = explore(Model(box, RULES), most_states=8_000)
    assert right.violation is None, shown(right)


def test_a_mutant_replaces_one_rule():
    assert len(MUTANTS) == 15
    for rules, _ in MUTANTS.values():
        assert sum(getattr(rules, rule) != getattr(RULES, rule) for rule in vars(RULES)) == 1


@pytest.mark.parametrize("seed", range(4))
def test_ten_thousand_random_walks_through_all_faults_keep_the_invariants(seed):
    """All faults may come at any moment, and messages in any order."""
    seeds = random.Random(seed)
    model = Model(Box(order="any", members=3 - seed % 3))
    for _ in range(WALKS):
        result = walk(model, seeds.getrandbits(32), events=200)
        assert result.violation is None, shown(result)


@pytest.mark.timeout(3600)
def test_a_million_states_of_the_whole_box_keep_the_invariants():
    result = explore(Model(Box()), most_states=1_000_000)
    assert result.violation is None, shown(result)
    assert result.states == 1_000_000
    assert result.faults >= 1
