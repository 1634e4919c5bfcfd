"""Tables of ticks: how many they take, and what they cost in lock-step."""

import random

import pytest
from support.drawn_pipelines import drawn_costs, lower_bound

from geojax.pipeline import (
    Costs,
    Hop,
    Placement,
    best_tick_table,
    lock_step,
    one_f_one_b,
    simulate,
    tick_table,
)
from geojax.pipeline.lock_step import lock_step_seconds
from geojax.pipeline.simulator import iteration_seconds
from geojax.pipeline.ticks import in_ticks


def test_branch_free_ticks_by_hand():
    """Three stages, a cut of two ticks after the first, four microbatches."""
    table = tick_table("branch_free", Placement.linear(3), 4, (2, 1))
    ticks = {(stage, str(action)): tick for tick, stage, action in table.actions()}
    assert table.ticks == 4 + 2 * 3
    for i in range(4):
        assert [ticks[stage, f"F{i}.{stage}"] for stage in range(3)] == [i, i + 2, i + 3]
        assert [ticks[stage, f"B{i}.{stage}"] for stage in range(3)] == [i + 6, i + 4, i + 3]


@pytest.mark.parametrize(("stages", "microbatches"), [(2, 8), (4, 16), (8, 32)])
@pytest.mark.parametrize("cut_ticks", [1, 2, 3])
def test_branch_free_takes_the_formula(stages, microbatches, cut_ticks):
    """(m + p - 1 + sum d)(f + b), where d are the ticks of a hop beyond the first."""
    hop_ticks = [1] * (stages - 1)
    hop_ticks[stages // 2 - 1] = cut_ticks
    table = tick_table("branch_free", Placement.linear(stages), microbatches, hop_ticks)
    seconds = lock_step_seconds(table, Costs.uniform(stages, 1.0, 1.25, 0.75))
    assert seconds == 3.0 * (microbatches + stages - 1 + cut_ticks - 1)


def test_an_order_for_events_is_slow_in_lock_step():
    """While some stages run a forward others run a backward: 2 b a microbatch, not f + b."""
    costs = Costs.uniform(4, 1.0, 2.0)
    schedule = one_f_one_b(4, 64)
    table = in_ticks(schedule, (1,) * 3, paired=False)
    ratio = lock_step_seconds(table, costs) / iteration_seconds(schedule, costs)
    assert 1.23 < ratio < 1.45


def test_a_message_has_its_ticks_to_travel():
    """Ticks wait for a hop that takes longer than they do."""
    table = tick_table("branch_free", Placement.linear(2), 3, (2,))
    fits = lock_step(table, Costs((1.0,) * 2, (1.0,) * 2, (0.0,) * 2, (Hop(1.0, 0.0, "cut"),)))
    assert fits.seconds == (3 + 2) * 2
    late = lock_step(table, Costs((1.0,) * 2, (1.0,) * 2, (0.0,) * 2, (Hop(5.0, 0.0, "cut"),)))
    # Every tick but the first and the last has a message to wait for before the next but one.
    assert late.seconds > fits.seconds + 2 * 4
    assert late.bubble_across_sites > fits.bubble_across_sites
    assert all(message.end - message.start == 5.0 for message in late.messages)


def test_interleaved_tables_run_at_full_speed():
    """One forward and one backward of a chunk in every tick between the first and the last."""
    for cut in (1, 2, 3):
        placement = Placement.interleaved([2, 2], 2)
        hop_ticks = [1] * 7
        hop_ticks[3] = cut
        long, short = (
            tick_table("interleaved", placement, microbatches, hop_ticks).ticks
            for microbatches in (32, 16)
        )
        assert long - short == 2 * 16


def test_close_to_the_event_driven_time_where_memory_allows():
    """At most 1.05 times, for pipelines with eight microbatches a stage or more."""
    generator = random.Random(5)
    for _ in range(100):
        stages = generator.randint(2, 10)
        microbatches = generator.randint(8, 16) * stages
        costs = drawn_costs(generator, stages, cuts=2, periods=4)
        placement = Placement.linear(stages)
        table = best_tick_table("branch_free", placement, microbatches, costs)
        seconds = lock_step(table, costs).seconds
        assert seconds <= 1.05 * simulate(table.schedule, costs).seconds
        assert seconds <= 1.05 * lower_bound(microbatches, costs)
