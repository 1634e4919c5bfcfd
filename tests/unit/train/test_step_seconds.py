"""The parts of a step are all of its seconds, and what was hidden counts for nothing."""

import pytest

from geojax.train.step_seconds import HostTimes, split_seconds


@pytest.mark.parametrize(
    ("host", "waiting", "data", "dispatch", "waited", "device"),
    [
        (HostTimes(9.0, 9.5), None, 0, 0, 0, 2),  # the host was ahead of the devices
        (HostTimes(10.5, 10.75), None, 0.5, 0.25, 0, 1.25),
        (HostTimes(9.0, 10.25), None, 0, 0.25, 0, 1.75),
        (HostTimes(10.5, 11.9), 0.75, 0.5, 0, 0.75, 0.75),
        (HostTimes(13.0, 14.0), None, 2, 0, 0, 0),
        (HostTimes(9.0, 9.0), 5.0, 0, 0, 2, 0),
    ],
)
def test_parts(host, waiting, data, dispatch, waited, device):
    parts = split_seconds(10.0, host, 12.0, waiting)
    assert parts == (2, data, dispatch, waited, device)
    assert sum(parts[1:]) == parts.total


def test_the_writing_of_a_profile_is_no_part_of_the_next_step():
    parts = split_seconds(10.0, HostTimes(15.5, 15.75, held_until=15.0), 17.0, None)
    assert parts == (2, 0.5, 0.25, 0, 1.25)
