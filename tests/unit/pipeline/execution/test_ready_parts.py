"""The ticks after which parts of a stage's gradients are whole."""

import pytest

from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.ready_parts import ready_parts
from geojax.pipeline.execution.tick_program import TickProgram


def table(schedule, placement, microbatches):
    return tick_table(schedule, placement, microbatches, [1] * (placement.chunks - 1))


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (4, 3), (12, 8)])
def test_a_chunk_is_ready_as_many_ticks_before_the_end_as_the_chunks_before_it_take(stages, chunks):
    ticks = table("interleaved", Placement.interleaved([stages], chunks), 2 * stages)
    before_end = {part: ticks.ticks - 1 - tick for part, tick in ready_parts(ticks).items()}
    wanted = {chunk: chunk * stages for chunk in range(1, chunks)}
    assert before_end == wanted | {"head": chunks * stages - 1}
    assert list(before_end.values()) == sorted(before_end.values(), reverse=True)


def test_with_one_chunk_a_stage_only_the_head_is_ready_before_the_end():
    ticks = table("1f1b", Placement.linear(4), 8)
    assert set(ready_parts(ticks)) == {"head"}


def test_the_gradients_of_weights_count_where_they_are_actions_of_their_own():
    ticks = table("zbv", Placement.vee(4), 8)
    last = max(
        tick
        for tick, _, action in ticks.actions()
        if action.kind.value == "W" and action.chunk >= 4
    )
    assert ready_parts(ticks)[1] == last


@pytest.mark.parametrize("branch_free", [True, False])
def test_parts_of_loops_that_end_with_these_ticks_run_all_of_them(branch_free):
    ticks = table("interleaved", Placement.interleaved([2], 2), 4)
    segments = TickProgram.of(ticks, branch_free=branch_free).segments
    ends = [1 + tick for tick in ready_parts(ticks).values()]
    run = []
    for first, end in zip([0, *ends], [*ends, ticks.ticks], strict=True):
        for whole in segments:
            for part in whole.part(max(first, whole.first), min(end, whole.end)):
                run += part.ticks()
    assert run == [tick for each in segments for tick in each.ticks()]
    assert [tick for tick, _ in run] == list(range(ticks.ticks))
