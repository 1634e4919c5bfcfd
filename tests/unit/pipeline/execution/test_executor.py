"""Any pipeline gives the loss and the gradients of one device, to 1e-10.

Few cases that hold every pair of a schedule, a role of the sites, a hop, a parallelism, ...;
`pytest tests/unit/pipeline/execution/test_executor.py --pipelines full` runs the whole grid (hours;
`benchmarks/pipeline_grid.py` also writes down what it finds).
"""

import pytest
from support.covering import pairs_of, pairwise
from support.distances import assert_no_further_than, assert_within
from support.pipelines import FACTORS, Case, covering_cases, grid

NAMED = {
    "branch-free through two sites": Case("branch_free", hop_ticks=2, rows="data"),
    "1F1B with branches through three sites": Case(
        "1f1b", "3 sites", hop_ticks=2, branches="branches", layers="uneven"
    ),
    "interleaved": Case("interleaved", tensor="tensor", family="nemotron"),
    "a pipeline in each site": Case("1f1b", "in each", tensor="sequence", remat="full"),
    "mixture": Case("branch_free", hop_ticks=3, rows="expert", remat="selective"),
}


def pytest_generate_tests(metafunc):
    if "case" in metafunc.fixturenames:
        full = metafunc.config.getoption("pipelines") == "full"
        cases = grid() if full else covering_cases()
        metafunc.parametrize("case", [case for case in cases if case.missing is None], ids=str)


def test_loss_and_gradients_equal_those_of_one_device(case):
    assert_within(1e-10, case.errors())


@pytest.mark.parametrize("name", NAMED)
def test_the_same_in_fp32(name):
    case = NAMED[name]
    assert_no_further_than(case.errors_of_one_device(), case.errors("fp32"))


def test_every_pair_of_values_is_in_a_case():
    cases = covering_cases()
    assert len(cases) <= 40
    covered = {pair for case in cases for pair in pairs_of(vars(case))}
    existing = [case for case in grid() if case.missing is None]
    occurring = {pair for case in existing for pair in pairs_of(vars(case))}
    assert not occurring - covered
    assert {case.schedule for case in cases} == set(FACTORS["schedule"])


def test_pairs_that_cannot_be_are_left_out():
    factors = {"a": (1, 2, 3), "b": (1, 2, 3), "c": (1, 2, 3)}
    found = pairwise(factors, lambda each: each["a"] != each["b"] or each["c"] == 1)
    held = {pair for each in found for pair in pairs_of(each)}
    assert len(held) == 27
    assert len(found) <= 12
    never = pairwise(factors, lambda each: each["a"] != each["b"])
    assert all(each["a"] != each["b"] for each in never)
    assert len({pair for each in never for pair in pairs_of(each)}) == 24
