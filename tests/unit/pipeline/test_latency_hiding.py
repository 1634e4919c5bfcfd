"""The schedules under a memory limit against Little's law."""

import dataclasses
import random
import statistics
import time

import pytest
from support.drawn_pipelines import (
    drawn_costs,
    drawn_under_a_limit,
    hard_pipelines,
    littles_law,
    lower_bound,
)

from geojax.errors import UserError
from geojax.pipeline import Costs, Hop, geopipe, latency_hiding, one_forward_one_backward, validate
from geojax.pipeline.generators.greedy import greedy
from geojax.pipeline.generators.latency_hiding import limit_spreads
from geojax.pipeline.schedule import LayerBytes, MemoryLimit
from geojax.pipeline.simulation.bounds import least_seconds
from geojax.pipeline.simulation.simulator import iteration_seconds


def test_close_to_littles_law():
    generator = random.Random(4)
    ratios = []
    for _ in range(300):
        microbatches, costs, limit = drawn_under_a_limit(generator)
        stages = len(costs.forward)
        schedule = latency_hiding(microbatches, costs, limit)
        validate(schedule, limit)
        seconds = iteration_seconds(schedule, costs)
        ratios.append(seconds / littles_law(microbatches, costs, limit))
        rivals = [geopipe(microbatches, costs, limit)]
        if limit >= min(stages, microbatches):
            rivals.append(one_forward_one_backward(stages, microbatches))
        for rival in rivals:
            assert seconds <= iteration_seconds(rival, costs)
    ratios.sort()
    assert ratios[285] <= 1.05
    assert ratios[-1] <= 1.10


def test_the_case_of_the_slow_cut_at_one_forward_one_backwards_memory():
    """M = p = 8, H = 4 (f + b): six turns a microbatch's place where strict order takes fifteen."""
    hops = [Hop()] * 7
    hops[3] = Hop(4.0, 0.0, "cut")
    costs = Costs((0.4,) * 8, (0.6,) * 8, (0.0,) * 8, tuple(hops))
    shorter, longer = (
        iteration_seconds(latency_hiding(microbatches, costs, 8), costs)
        for microbatches in (64, 128)
    )
    assert (longer - shorter) / 64 < 2.1  # (8 + 8) / 8 = 2 by Little's law
    shorter, longer = (
        iteration_seconds(one_forward_one_backward(8, microbatches), costs)
        for microbatches in (64, 128)
    )
    assert (longer - shorter) / 64 > 4.99  # f + b + H


def test_split_backwards_pay_the_latency_once():
    """With room enough, m (f + b) + (p - 1) f + sum H."""
    hops = [Hop()] * 3
    hops[1] = Hop(6.0, 0.0, "cut")
    costs = Costs((1.0,) * 4, (1.0,) * 4, (1.0,) * 4, tuple(hops))
    schedule = latency_hiding(32, costs, 32, split_backward=True)
    least = 32 * 3 + 3 * 1 + 6
    assert least <= iteration_seconds(schedule, costs) <= 1.05 * least


def test_never_below_the_lower_bound():
    """And at it where there is room enough."""
    generator = random.Random(7)
    for _ in range(25):
        microbatches, costs, limit = drawn_under_a_limit(generator)
        for split in (False, True):
            schedule = latency_hiding(microbatches, costs, limit, split_backward=split)
            least = least_seconds(microbatches, costs, limit, split_backward=split)
            assert iteration_seconds(schedule, costs) >= least * (1 - 1e-9)
        roomy = latency_hiding(microbatches, costs, microbatches)
        assert iteration_seconds(roomy, costs) == pytest.approx(least_seconds(microbatches, costs))
        assert least_seconds(microbatches, costs) == pytest.approx(lower_bound(microbatches, costs))


def test_128_stages_and_1024_microbatches_take_less_than_ten_seconds():
    hops = [Hop(0.05)] * 127
    hops[63] = Hop(3.0, 0.5, "cut")
    costs = Costs((1.0,) * 128, (1.0,) * 128, (1.0,) * 128, tuple(hops))
    begin = time.process_time()
    schedule = latency_hiding(1024, costs, 128)
    seconds = iteration_seconds(schedule, costs)
    assert time.process_time() - begin < 10
    assert seconds < 1.1 * least_seconds(1024, costs, 128)


@pytest.mark.parametrize(
    ("microbatches", "costs", "limit", "backwards_first"), list(hard_pipelines())
)
def test_forwards_first_where_stages_are_uneven_and_memory_is_tight(
    microbatches, costs, limit, backwards_first
):
    stages = len(costs.forward)
    orders = [
        greedy(microbatches, costs, [LayerBytes(1, 1, 0)] * stages, spread, patience=patience)
        for spread in limit_spreads(costs, (limit,) * stages)
        for patience in (0.0, 0.5)
    ]
    assert min(order.seconds for order in orders) >= backwards_first - 1e-9
    schedule = latency_hiding(microbatches, costs, limit)
    validate(schedule, limit)
    assert iteration_seconds(schedule, costs) < backwards_first / 1.2


def test_a_split_that_is_allowed_is_never_slower_than_none():
    generator = random.Random(8)
    for _ in range(20):
        microbatches, costs, limit = drawn_under_a_limit(generator)
        surcharge = generator.choice([0.0, 0.1, 0.4])
        costs = dataclasses.replace(costs, weight=costs.backward, split_surcharge=surcharge)
        whole, split = (
            iteration_seconds(
                latency_hiding(microbatches, costs, limit, split_backward=allowed), costs
            )
            for allowed in (False, True)
        )
        assert split <= whole


def test_geopipe_with_too_little_memory_is_no_slower_than_one_forward_one_backward():
    generator = random.Random(3)
    gains = []
    for _ in range(100):
        stages = generator.randint(2, 10)
        microbatches = generator.randint(2 * stages, 80)
        limit = generator.randint(stages, 2 * stages + 4)
        costs = drawn_costs(generator, stages, cuts=3, periods=6)
        schedule = geopipe(microbatches, costs, limit)
        validate(schedule, limit)
        plain = iteration_seconds(one_forward_one_backward(stages, microbatches), costs)
        gains.append(plain / iteration_seconds(schedule, costs))
    assert min(gains) >= 1 - 1e-12
    assert statistics.median(gains) > 1.5


@pytest.mark.parametrize("limit", range(1, 9))
def test_geopipe_keeps_within_less_memory_than_one_forward_one_backwards(limit):
    hops = [Hop()] * 7
    hops[2] = Hop(4.0, 0.0, "cut")
    validate(geopipe(20, Costs((0.4,) * 8, (0.6,) * 8, (0.0,) * 8, tuple(hops)), limit), limit)


def drawn_memory(generator, costs, microbatches):
    """A limit of bytes with more or fewer layers a stage, that some microbatches fit in."""
    layers = tuple(generator.randint(1, 3) for _ in costs.forward)
    before = generator.randint(4, 10)
    within = before + generator.randint(0, 6)
    layer = LayerBytes(before, within, generator.randint(1, within))
    return MemoryLimit(max(layers) * (before * microbatches + 6), layers, layer)


def test_orders_keep_within_bytes():
    """What waits for the gradients of weights is counted; stages with fewer layers hold more."""
    generator = random.Random(9)
    for _ in range(40):
        drawn, costs, limit = drawn_under_a_limit(generator)
        microbatches = min(drawn, 30)
        costs = dataclasses.replace(costs, weight=costs.backward)
        memory = drawn_memory(generator, costs, limit)
        whole = latency_hiding(microbatches, costs, memory)
        split = latency_hiding(microbatches, costs, memory, split_backward=True)
        for schedule in (whole, split):
            validate(schedule)
            assert memory.allows(schedule)
        assert iteration_seconds(split, costs) <= iteration_seconds(whole, costs)
        fewest = min(memory.most_in_flight(split_backward=False))
        by_count = latency_hiding(microbatches, costs, fewest)
        assert iteration_seconds(whole, costs) <= 1.02 * iteration_seconds(by_count, costs)


def test_a_limit_in_bytes_of_alike_stages_is_one_of_microbatches():
    hops = [Hop()] * 5
    hops[2] = Hop(4.0, 0.5, "cut")
    costs = Costs((1.0,) * 6, (1.0,) * 6, (1.0,) * 6, tuple(hops))
    memory = MemoryLimit(7 * 30, (3,) * 6, LayerBytes(10, 10, 10))
    for split in (False, True):
        assert latency_hiding(24, costs, memory, split_backward=split) == latency_hiding(
            24, costs, 7, split_backward=split
        )


def test_less_than_a_microbatch_in_bytes_is_refused():
    memory = MemoryLimit(2000, (1, 3), LayerBytes(1000, 1000, 0))
    with pytest.raises(UserError, match=r"cannot hold 2 kB at most: the least limit is 3 kB"):
        latency_hiding(4, Costs.uniform(2, 1.0, 2.0), memory)
