"""In a pipeline inside each site, a chunk's gradients cross while other chunks go backwards."""

import pytest
from support.distances import assert_within
from support.pipelines import Case

IN_EACH = {"sites": "in each", "overlap": True}
CASES = {
    "interleaved": Case("interleaved", rows="data", branches="branches", family="gpt3", **IN_EACH),
    "branch-free": Case("interleaved", rows="expert", family="nemotron", **IN_EACH),
    "split backward": Case(
        "zbv", tensor="sequence", branches="branches", layers="uneven", **IN_EACH
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_those_of_one_device(name):
    assert_within(1e-10, CASES[name].errors())
