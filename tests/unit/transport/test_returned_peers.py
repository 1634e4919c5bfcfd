"""A peer is killed in mid-transfer and returns, in one process, beside a third site."""

import os
import threading

import pytest
from support.processes import wait_until
from support.returning_peers import kill_and_return

MESSAGE_BYTES = 1 << 22


def test_a_few_kills_disturb_no_third_site_and_leave_nothing_behind():
    files, threads = len(os.listdir("/proc/self/fd")), set(threading.enumerate())
    kills = kill_and_return(3, MESSAGE_BYTES)
    assert kills.undisturbed_messages > 0
    wait_until(lambda: set(threading.enumerate()) <= threads)
    assert len(os.listdir("/proc/self/fd")) <= files


@pytest.mark.slow
def test_two_hundred_kills_keep_memory_and_handles_flat():
    kills = kill_and_return(200, MESSAGE_BYTES)
    assert kills.within_a_message > 180
    early, late = kills.resources[20:60], kills.resources[-40:]
    for kind in ("open_files", "threads"):
        assert middle(late, kind) == middle(early, kind)
    assert middle(late, "resident_bytes") < 1.1 * middle(early, "resident_bytes")


def middle(resources, kind):
    return sorted(getattr(now, kind) for now in resources)[len(resources) // 2]
