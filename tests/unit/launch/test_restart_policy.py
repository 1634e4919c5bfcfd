"""Restarts of a site: their delays, and their limit an hour."""

import pytest

from geojax.launch.restart_policy import HOUR, LONGEST_DELAY, RestartPolicy


def test_the_delay_doubles_until_a_step_is_made():
    policy = RestartPolicy(100)
    delays = [policy.failed(float(time), made_step=False) for time in range(8)]
    assert delays == [1, 2, 4, 8, 16, 32, LONGEST_DELAY, LONGEST_DELAY]
    assert policy.failed(8.0, made_step=True) == 1
    assert policy.failed(9.0, made_step=False) == 1


@pytest.mark.parametrize("limit", [0, 1, 3])
def test_failures_without_a_step_are_limited_by_the_hour(limit):
    policy = RestartPolicy(limit)
    for number in range(limit):
        assert policy.failed(60.0 * number, made_step=False) is not None
    assert policy.failed(HOUR - 1, made_step=True) == 1
    assert policy.failed(HOUR - 1, made_step=False) is None


def test_failures_of_an_hour_ago_count_no_more():
    policy = RestartPolicy(1)
    assert policy.failed(0.0, made_step=False) == 1
    assert policy.failed(HOUR, made_step=False) is not None
    assert policy.failed(HOUR + 1, made_step=False) is None
