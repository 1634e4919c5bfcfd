"""Tables of ticks: how many they take, and what they cost in lock-step."""

import dataclasses
import random

import pytest
from support.drawn_pipelines import drawn_costs, lower_bound

from geojax.pipeline import (
    Costs,
    Hop,
    Placement,
    best_tick_table,
    lock_step,
    one_forward_one_backward,
    simulate,
    tick_table,
)
from geojax.pipeline.generators.paired import paired_interleaved
from geojax.pipeline.generators.warmup import with_warmups
from geojax.pipeline.rules import validate_table
from geojax.pipeline.simulation.lock_step import lock_step_seconds
from geojax.pipeline.simulation.simulator import iteration_seconds
from geojax.pipeline.ticks import Packing, in_ticks


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
    schedule = one_forward_one_backward(4, 64)
    table = in_ticks(schedule, (1,) * 3, (1,) * 3, Packing.SINGLE)
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


@pytest.mark.parametrize(("hop", "waits"), [(1, 6), (2, 2)])
def test_kinds_in_turn_hide_a_hop_by_hand(hop, waits):
    """Two stages, three microbatches: forwards in even ticks, backwards in odd ones."""
    schedule = with_warmups("ahead", (2, 0), 3)
    table = in_ticks(schedule, (hop,), (hop,), Packing.IN_TURN)
    ticks = {str(action): tick for tick, _, action in table.actions()}
    for i in range(3):
        assert (ticks[f"F{i}.0"], ticks[f"F{i}.1"]) == (2 * i, 2 * i + 2)
        assert (ticks[f"B{i}.1"], ticks[f"B{i}.0"]) == (2 * i + 3, 2 * i + 5)
    # In two ticks a message there has a backward of 2 to travel in, one back a forward of 1.
    free = lock_step_seconds(table, Costs((1.0,) * 2, (2.0,) * 2, (0.0,) * 2, (Hop(),)))
    hidden = lock_step_seconds(table, Costs((1.0,) * 2, (2.0,) * 2, (0.0,) * 2, (Hop(1.0),)))
    assert free == 3 * (3 + 1)
    assert hidden == free + waits  # with one tick all messages are waited for


def test_a_hop_may_take_other_ticks_back_than_there():
    """Before the first backward ticks are short, after the last forward they are long."""
    hops = (Hop(9.0, 0.0, "cut"), *[Hop()] * 8)
    costs = Costs((1.0,) * 10, (3.0,) * 10, (0.0,) * 10, hops)
    table = best_tick_table("branch_free", Placement.linear(10), 40, costs)
    validate_table(table)
    assert table.hop_ticks == (1 + 9, *[1] * 8)
    assert table.return_ticks == (1 + 3, *[1] * 8)
    assert lock_step_seconds(table, costs) == lower_bound(40, costs)


@pytest.mark.parametrize(("name", "least_per_stage"), [("geopipe", 4), ("branch_free", 8)])
def test_close_to_the_event_driven_time_where_memory_allows(name, least_per_stage):
    """At most 1.05 times; with branches from four microbatches a stage on."""
    generator = random.Random(5)
    for _ in range(60):
        stages = generator.randint(2, 10)
        microbatches = generator.randint(least_per_stage, 12) * stages
        costs = drawn_costs(generator, stages, cuts=2, periods=4)
        table = best_tick_table(name, Placement.linear(stages), microbatches, costs)
        seconds = lock_step(table, costs).seconds
        assert seconds <= 1.05 * simulate(table.schedule, costs).seconds
        assert seconds <= 1.05 * lower_bound(microbatches, costs)


@pytest.mark.parametrize(
    "name", ["zero_bubble_h1", "zero_bubble_h2", "zbv", "latency_hiding_split"]
)
def test_the_fastest_packing_is_taken(name):
    """Unequal times of B and W: single actions make every tick as long as the longest."""
    placement = Placement.vee(4) if name == "zbv" else Placement.linear(4)
    costs = Costs.of_stages(placement, 1.0, 2.0, 1.0, lambda source, target: Hop())
    hops = (1,) * (placement.chunks - 1)
    table = tick_table(name, placement, 16, hops, costs=costs)
    seconds = lock_step_seconds(table, costs)
    by_packing = [
        lock_step_seconds(in_ticks(table.schedule, hops, hops, packing), costs)
        for packing in Packing
    ]
    assert seconds == min(by_packing)
    if name != "zero_bubble_h1":
        single = by_packing[list(Packing).index(Packing.SINGLE)]
        assert seconds < 0.96 * single


@pytest.mark.parametrize("name", ["branch_free", "1f1b", "interleaved", "zbv", "zero_bubble_h1"])
@pytest.mark.parametrize("cut", [0, 1, 2])
def test_the_time_alone_is_that_of_the_timeline(name, cut):
    """With chunks that differ, and hops that are slow and share links."""
    random.seed(cut)
    virtual = {"interleaved": 2, "zbv": 2}.get(name, 1)
    placement = Placement.vee(4) if name == "zbv" else Placement.interleaved([2, 2], virtual)
    chunks = placement.chunks
    hop_ticks = [1] * (chunks - 1)
    hop_ticks[cut] = 2
    table = tick_table(name, placement, 8, hop_ticks)
    times = [tuple(random.uniform(0.5, 2) for _ in range(chunks)) for _ in range(3)]
    hops = [Hop(random.uniform(0, 0.5), random.uniform(0, 0.5)) for _ in range(chunks - 1)]
    for number in {cut, chunks - 2}:
        hops[number] = Hop(random.uniform(0, 3), random.uniform(0, 3), "cut")
    costs = Costs(*times, tuple(hops))
    assert lock_step_seconds(table, costs) == pytest.approx(lock_step(table, costs).seconds)


def test_one_chunk_has_no_hops():
    table = tick_table("branch_free", Placement.linear(1), 3, ())
    assert lock_step_seconds(table, Costs.uniform(1, 1.0, 2.0)) == 9


@pytest.mark.parametrize("turn", [0, 1])
def test_a_shared_head_comes_first_or_between_the_passes(turn):
    """Two stages, a forward of 1 and 2 s, a backward of 3 and 1 s, and a head of 10 s."""
    costs = Costs((1.0, 2.0), (3.0, 1.0), (0.0, 0.0), (Hop(),), head=10.0, apart=5.0)

    def table(microbatches):
        order = paired_interleaved(Placement.linear(2), microbatches, (1,), turn=turn)
        return in_ticks(order, (1,), (1,), Packing.TOGETHER)

    few, more = (lock_step_seconds(table(microbatches), costs) for microbatches in (4, 6))
    assert few == pytest.approx(lock_step(table(4), costs).seconds)
    # Between the passes: 2 + 10 + 3, and what parts them. Before both: 10 + max(1 + 3, 2 + 1).
    assert more - few == pytest.approx(2 * (14 if turn else 20))


def test_a_turn_in_one_tick_is_avoided_where_it_parts_what_runs_together():
    placement = Placement.interleaved([2], 2)
    hops = (1,) * (placement.chunks - 1)
    costs = Costs.uniform(placement.chunks, 1.0, 2.0)
    apart = dataclasses.replace(costs, apart=0.5)
    assert not tick_table("interleaved", placement, 16, hops, costs=costs).turns_later
    assert tick_table("interleaved", placement, 16, hops, costs=apart).turns_later


@pytest.mark.parametrize("late", [0.25, 2.0])
def test_hops_travel_beside_late_gradients_where_no_stage_is_idle(late):
    placement = Placement.interleaved([2], 2)
    costs = Costs.uniform(placement.chunks, 1.0, 2.0, hop=Hop(0.5))
    costs = dataclasses.replace(costs, apart=0.5)  # no microbatch turns in one tick
    table = tick_table("interleaved", placement, 16, (1,) * (placement.chunks - 1), costs=costs)
    beside = dataclasses.replace(costs, late=late)
    first, end = table.full_run(shares_head=False)
    assert end - first > 8
    saved = lock_step_seconds(table, costs) - lock_step_seconds(table, beside)
    assert saved == pytest.approx((end - first) * min(late, 0.5))
    assert lock_step(table, beside).seconds == pytest.approx(lock_step_seconds(table, beside))
