"""The covering array holds what it says; nothing is compiled."""

import pytest
from equality.case import FACTORS, Case, covering, draw, kind_of
from support.covering import marks, pairs_of, pairwise

from geojax.pipeline import SCHEDULES


def marks_of(case):
    return marks({name: getattr(case, name) for name in FACTORS}, kind_of)


def test_cases_exist_and_are_different():
    cases = covering()
    assert not [str(case) for case in cases if case.missing]
    assert len({str(case) for case in cases}) == len(cases) <= 44


def test_every_pair_of_kinds_that_is_drawn_is_in_a_case():
    covered = set().union(*map(marks_of, covering()))
    drawn = set().union(*(marks_of(draw(3, index)) for index in range(300)))
    assert not drawn - covered, "run `python -m equality.case` in tests/, to make the cases anew"


def test_every_value_of_every_factor_is_in_a_case():
    for name, values in FACTORS.items():
        assert {getattr(case, name) for case in covering()} == set(values), name
    assert set(FACTORS["schedule"]) == {"", *SCHEDULES}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"sites": "2 stages"}, "have a schedule"),
        ({"sites": "3 stages", "schedule": "1f1b", "rows": "data", "tensor": "tensor"}, "devices"),
        ({"sites": "2 stages", "schedule": "zbv"}, "take branches"),
        ({"sites": "2 replicas", "schedule": "1f1b", "zero": "3"}, "in every tick"),
        ({"join": "islands"}, "no island"),
        ({"family": "gemma", "context": "ring"}, "window"),
    ],
)
def test_what_cannot_be_is_said(changes, reason):
    assert reason in Case(**changes).missing


def test_pairs_that_cannot_be_are_left_out():
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}
    found = pairwise(factors, lambda each: each["a"] != each["b"] or each["c"] == 1)
    held = {pair for each in found for pair in pairs_of(each)}
    assert len(held) == 27
    assert len(found) <= 12
    never = pairwise(factors, lambda each: each["a"] != each["b"])
    assert all(each["a"] != each["b"] for each in never)
    assert len({pair for each in never for pair in pairs_of(each)}) == 24
