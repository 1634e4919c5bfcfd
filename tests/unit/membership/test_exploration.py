"""Sites, links and a store around the transition function: invariants in every reachable state."""

import random

import pytest
from support.membership_model import Box, Model, explore, shown, walk
from support.membership_mutants import MUTANTS

from geojax.membership.transition import RULES


def test_every_state_with_any_one_fault_keeps_the_invariants():
    result = explore(Model(Box(faults=1)))
    assert result.complete
    assert result.violation is None, shown(result)
    assert result.states > 3_000


@pytest.mark.parametrize("name", MUTANTS)
def test_a_wrong_rule_is_found_where_the_production_rule_is_sound(name):
    rules, box = MUTANTS[name]
    wrong = explore(Model(box, rules), most_states=60_000)
    assert wrong.violation is not None
    assert str(wrong.violation) in shown(wrong)


def test_the_boxes_in_which_wrong_rules_are_found_are_sound_with_the_right_ones():
    boxes = {box for _, box in MUTANTS.values()}
    for box in sorted(boxes, key=str):
        result = explore(Model(box, RULES), most_states=20_000)
        assert result.violation is None, shown(result)


def test_a_mutant_replaces_one_rule():
    for rules, _ in MUTANTS.values():
        assert sum(getattr(rules, rule) != getattr(RULES, rule) for rule in vars(RULES)) == 1


def walks_are_sound(count):
    seeds = random.Random(7)
    model = Model(Box(any_order=True))
    for _ in range(count):
        result = walk(model, seeds.getrandbits(32), events=200)
        assert result.violation is None, shown(result)


def test_random_walks_through_all_faults_in_any_order_keep_the_invariants():
    walks_are_sound(100)


def test_ten_thousand_random_walks_keep_the_invariants():
    walks_are_sound(10_000)


def test_every_state_with_any_three_faults_keeps_the_invariants():
    result = explore(Model(Box(faults=3)), seconds=600)
    assert result.violation is None, shown(result)
    assert result.states >= 1_000_000
