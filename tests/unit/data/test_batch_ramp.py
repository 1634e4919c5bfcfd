"""The sizes of batches: those of Megatron-LM's rule, and a walk from step to step."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from geojax.data.batch_ramp import BatchPhase, BatchRamp


@st.composite
def ramps(draw):
    increments, increment, start = (draw(st.integers(1, most)) for most in (7, 5, 9))
    full = start + increments * increment
    return BatchRamp(full, start, increment, draw(st.integers(1, 400)))


def walked(ramp, consumed):
    """Sequences before each step, and the size of its batch, by the rule in so many words."""
    while True:
        grown = 0
        while (
            grown < ramp.increments and consumed * ramp.increments >= (grown + 1) * ramp.sequences
        ):
            grown += 1
        size = ramp.start + grown * ramp.increment
        yield consumed, size
        consumed += size


@given(ramp=ramps(), consumed=st.integers(0, 500), steps=st.integers(0, 60))
def test_phases_are_the_steps_of_the_rule_one_after_the_other(ramp, consumed, steps):
    expected = list(itertools.islice(walked(ramp, consumed), steps + 1))
    in_phases = (
        (phase.first + step * phase.size, phase.size)
        for phase in ramp.phases(consumed)
        for step in (itertools.count() if phase.steps is None else range(phase.steps))
    )
    assert list(itertools.islice(in_phases, steps + 1)) == expected
    assert ramp.consumed_after(steps, consumed) == expected[-1][0]
    assert [ramp.size_at(first) for first, _ in expected] == [size for _, size in expected]
    assert {size for _, size in expected} <= {*ramp.smaller, ramp.full}


@given(ramp=ramps(), sequence=st.integers(0, 1000))
def test_a_sequence_is_in_the_batch_of_its_step(ramp, sequence):
    step = ramp.step_of(sequence)
    first = ramp.consumed_after(step)
    assert first <= sequence < first + ramp.size_at(first)


@given(ramp=ramps(), consumed=st.integers(0, 500))
def test_a_run_that_stops_anywhere_goes_on_with_the_same_sizes(ramp, consumed):
    whole = dict(itertools.islice(walked(ramp, 0), 200))
    for first in list(whole)[:20]:
        assert dict(itertools.islice(walked(ramp, first), 10)).items() <= whole.items()


def test_the_headline_ramp_is_megatrons():
    # --rampup-batch-size 256 256 100000 and --global-batch-size 2304.
    ramp = BatchRamp(2304, 256, 256, 100_000)
    assert ramp.smaller == tuple(range(256, 2304, 256))
    phases = list(ramp.phases())
    assert phases[0] == BatchPhase(256, 0, 49)  # 48 steps consume 12,288, below the 12,500
    assert phases[-1] == BatchPhase(2304, 100_864)
    assert ramp.consumed_after(1000) == 100_864 + 2304 * (1000 - sum(p.steps for p in phases[:-1]))


def test_without_a_ramp_steps_are_multiples():
    constant = BatchRamp.constant(24)
    assert constant.smaller == ()
    assert list(constant.phases(7)) == [BatchPhase(24, 7)]
    assert constant.consumed_after(10**12) == 24 * 10**12
    assert constant.step_of(24 * 10**12 + 23) == 10**12


def test_increments_in_less_than_a_batch_are_skipped():
    ramp = BatchRamp(10, 4, 1, 6)
    assert [(phase.size, phase.steps) for phase in ramp.phases()] == [(4, 1), (8, 1), (10, None)]


@pytest.mark.parametrize("size", [4, 8, 12])
def test_a_process_has_as_large_a_share_of_each_size(size):
    ramp = BatchRamp(12, 4, 4, 100)
    # Four devices, of which the process has the first and the last.
    share = size // 4
    expected = [*range(share), *range(3 * share, size)]
    assert ramp.share(size, [0, 1, 2, 9, 10, 11]) == expected
