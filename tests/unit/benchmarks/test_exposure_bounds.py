"""Bounds of the exposed time in `benchmarks/exposure.py`."""

import importlib
import itertools
from pathlib import Path

import numpy as np
import pytest

from geojax.planner.buckets import LinkShare
from geojax.planner.traffic.gradients import EarlyMessage, GradientMessages

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


@pytest.fixture
def exposure(monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)
    return importlib.import_module("exposure")


def link_of(round_trip):
    return LinkShare("a-b", round_trip, 1.0, 1)


def end_of(leave, carried, sizes, whole, round_trip):
    """When messages have crossed that leave at these times or later; None: something is left.

    Each takes a share of all that is whole, of the oldest parts first; the last one takes all.
    """
    now, sent, total = -np.inf, 0.0, sum(sizes)
    for at, share in zip(leave, carried, strict=True):
        now = max(now, at)
        ready = sum(size for size, tick in zip(sizes, whole, strict=True) if tick <= now)
        sent, taken = sent + share * (ready - sent), share * (ready - sent)
        now += round_trip + taken
    return now if sent == pytest.approx(total) else None


def test_no_serial_messages_end_before_the_causal_bound(exposure):
    random, complete = np.random.default_rng(0), 0
    for _ in range(50):
        ticks = [*random.integers(1, 6, size=3), 0]
        sizes, round_trip = random.uniform(0, 6, size=4), random.uniform(0, 4)
        parts = [EarlyMessage(*part) for part in zip(sizes, ticks, strict=True)]
        bound = exposure.causal_bound(parts, link_of(round_trip), 1.0)
        whole = [-sum(ticks[i:]) for i in range(4)]

        # Any number of messages, at any times, of any shares of what is whole.
        for _ in range(300):
            count = random.integers(1, 8)
            leave = np.sort(random.uniform(whole[0], 2, size=count))
            carried = [*random.uniform(0, 1, size=count - 1), 1.0]
            end = end_of(leave, carried, sizes, whole, round_trip)
            complete += end is not None
            assert end is None or end >= bound - 1e-9, "no plan beats the bound"

        # Some plan that sends neighbors together, as soon as they are whole, reaches it.
        ends = []
        for cuts in itertools.product([False, True], repeat=3):
            last = [i for i, cut in enumerate([*cuts, True]) if cut]
            at, now = 0, -np.inf
            for i in last:
                now = max(now, whole[i]) + round_trip + sum(sizes[at : i + 1])
                at = i + 1
            ends.append(now)
        assert min(ends) == pytest.approx(bound)
    assert complete > 1000, "many of the random plans must send everything"


def test_bounds_rise_with_their_assumptions(exposure):
    early = (EarlyMessage(1.0, 4), EarlyMessage(4.0, 4), EarlyMessage(4.0, 4))
    messages = GradientMessages((), 0, (3.0, 1.0), early)
    found = exposure.bounds(messages, link_of(0.5), 1.0)
    # 13 seconds of bytes, 12 of backwards.
    assert found.of_bytes == pytest.approx(1.0)
    # 12 seconds of bytes from the second part on, 8 of backwards, and a round trip.
    assert found.overlapped == pytest.approx(4.5)
    # From the second part on three messages, each with a round trip of its own.
    assert found.causal == pytest.approx(5.5)


def test_without_a_round_trip_both_causal_bounds_agree(exposure):
    early = (EarlyMessage(2.0, 3), EarlyMessage(5.0, 4))
    found = exposure.bounds(GradientMessages((), 0, (3.0,), early), link_of(0.0), 1.0)
    assert found.causal == found.overlapped
