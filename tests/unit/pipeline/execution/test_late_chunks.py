"""The ticks that may pass before the next chunk of a stage is there."""

import pytest

from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.late_chunks import ticks_between_chunks


def table(schedule, placement, microbatches, hop_ticks=1):
    return tick_table(schedule, placement, microbatches, [hop_ticks] * (placement.chunks - 1))


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 3), (12, 8)])
def test_a_chunk_comes_in_the_ticks_in_which_a_microbatch_passes_all_stages(stages, chunks):
    ticks = table("interleaved", Placement.interleaved([stages], chunks), 3 * stages)
    assert ticks_between_chunks(ticks) == stages


def test_of_two_sites_the_first_stage_sets_the_pace():
    assert ticks_between_chunks(table("interleaved", Placement.interleaved([2, 2], 2), 8)) == 2


@pytest.mark.parametrize(
    ("schedule", "placement", "hop_ticks"),
    [
        ("interleaved", Placement.interleaved([3], 4), 1),
        ("interleaved", Placement.interleaved([2], 3), 2),
        ("zbv", Placement.vee(4), 1),
    ],
)
def test_no_stage_needs_a_chunk_before_it_is_there(schedule, placement, hop_ticks):
    ticks = table(schedule, placement, 8, hop_ticks)
    window = ticks_between_chunks(ticks)
    assert window > 0
    for tick, _, action in ticks.actions():
        assert tick >= window * placement.number_on_stage[action.chunk]


def test_with_one_chunk_a_stage_nothing_comes_late():
    assert ticks_between_chunks(table("1f1b", Placement.linear(4), 8)) == 0
