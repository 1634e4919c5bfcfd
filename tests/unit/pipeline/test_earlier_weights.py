"""Split backwards within a limit of bytes: valid tables, in the memory that they promise."""

import pytest

from geojax.errors import UserError
from geojax.pipeline import SCHEDULES, Hop, Placement, tick_table, validate
from geojax.pipeline.earlier_weights import order_within_bytes, within_bytes
from geojax.pipeline.generators.warmup import one_forward_one_backward
from geojax.pipeline.rules import validate_table
from geojax.pipeline.schedule import LayerBytes
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.lock_step import lock_step_seconds

STAGES, MICROBATCHES = 6, 24
SPLIT = [name for name, entry in SCHEDULES.items() if entry.split_backward]
SELECTIVE, FULL = LayerBytes(135, 290, 267), LayerBytes(19, 255, 254)
"""What a layer of Nemotron-4 340B holds by remat policy, in megabytes."""


def table_of(name):
    placement = Placement.vee(STAGES) if name == "zbv" else Placement.linear(STAGES)
    hops = [2 if chunk == 2 else 1 for chunk in range(placement.chunks - 1)]
    return tick_table(name, placement, MICROBATCHES, hops)


def most(table, layers, layer):
    return max(table.schedule.most_held(layers, layer))


def layers_of(table):
    return [1 + chunk % 2 for chunk in range(table.schedule.placement.chunks)]


@pytest.mark.parametrize("layer", [SELECTIVE, FULL], ids=["selective", "full"])
@pytest.mark.parametrize("name", SPLIT)
def test_without_a_limit_weights_wait_in_the_memory_of_the_forwards(name, layer):
    table = table_of(name)
    layers = layers_of(table)
    found = within_bytes(table, layers, layer)
    validate_table(found)
    assert found.schedule.name == name
    forwards = most(table, layers, layer.without_split)
    # A stage with as many microbatches as it can hold splits one more backward.
    assert most(found, layers, layer) <= forwards + max(layers) * layer.in_backward


def test_zbv_holds_what_1f1b_holds_and_is_as_fast_as_with_twice_that():
    table = table_of("zbv")
    found = within_bytes(table, [1] * 2 * STAGES, SELECTIVE)
    alone = one_forward_one_backward(STAGES, MICROBATCHES)
    one_f_one_b = max(alone.most_held([2] * STAGES, SELECTIVE.without_split))
    assert most(found, [1] * 2 * STAGES, SELECTIVE) <= one_f_one_b + SELECTIVE.in_backward
    assert most(table, [1] * 2 * STAGES, SELECTIVE) > 1.7 * one_f_one_b
    costs = Costs.uniform(2 * STAGES, 1.0, 1.0, 1.0)
    assert lock_step_seconds(found, costs) <= 1.02 * lock_step_seconds(table, costs)


@pytest.mark.parametrize("name", SPLIT)
def test_a_limit_is_kept_or_refused_with_what_would_work(name):
    table = table_of(name)
    layers = layers_of(table)
    limit = int(0.8 * most(table, layers, FULL))
    found = within_bytes(table, layers, FULL, limit=limit)
    validate_table(found)
    assert most(found, layers, FULL) <= limit
    with pytest.raises(UserError, match=r"memory_limit_bytes is 10 B; .* would work"):
        within_bytes(table, layers, FULL, limit=10)


@pytest.mark.parametrize("name", SPLIT)
def test_an_order_without_ticks_keeps_the_limit_too(name):
    table = table_of(name)
    schedule, layers = table.schedule, layers_of(table)
    limit = int(0.8 * most(table, layers, FULL))
    costs = Costs.uniform(schedule.placement.chunks, 1.0, 1.0, 1.0, hop=Hop(2.0))
    found = order_within_bytes(schedule, layers, FULL, limit, costs)
    validate(found)
    assert max(found.most_held(layers, FULL)) <= limit
    assert order_within_bytes(found, layers, FULL, limit, costs) == found
    with pytest.raises(UserError, match=r"memory_limit_bytes is 10 B; .* would work"):
        order_within_bytes(schedule, layers, FULL, 10, costs)


def test_an_order_that_fits_stays_as_it_is_or_gets_faster():
    table = table_of("1f1b")
    layers = layers_of(table)
    limit = most(table, layers, SELECTIVE.without_split)
    assert within_bytes(table, layers, SELECTIVE.without_split, limit=limit) is table
    with pytest.raises(UserError, match="would work"):
        within_bytes(table, layers, SELECTIVE.without_split, limit=limit - 1)


def test_bytes_of_an_order_count_what_waits_before_within_and_behind_backwards():
    alone = one_forward_one_backward(2, 3)
    assert alone.most_held([1, 1], LayerBytes(5, 5, 0)) == (10, 5)
    assert alone.most_held([1, 2], LayerBytes(5, 5, 0)) == (10, 10)
    assert alone.in_flight == (2, 1)
