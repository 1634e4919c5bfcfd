"""Every layout gives the loss and the gradients of one device, to 1e-10 in float64.

The cases of `covering.jsonl` hold every value of each factor and every pair of kinds of them.
`--layouts pairs` takes every pair of values, and `--draws 500 --draws-seed 7` draws more.
"""

from equality.case import Case, all_pairs, covering, draw
from equality.results import errors
from support.distances import assert_within


def pytest_generate_tests(metafunc):
    option = metafunc.config.getoption
    cases = all_pairs() if option("layouts") == "pairs" else covering()
    drawn = [draw(option("draws_seed"), index) for index in range(option("draws"))]
    metafunc.parametrize("case", [*cases, *drawn], ids=str)


def test_loss_and_gradients_equal_those_of_one_device(case: Case):
    assert_within(1e-10, errors(case))
