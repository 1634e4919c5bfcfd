"""Layers shared out over stages: as even as any way to cut them."""

import itertools
import random

import pytest

from geojax.errors import UserError
from geojax.pipeline.balance import balanced_layers


def stage_times(counts, layer_costs, before, after, speeds):
    ends = list(itertools.accumulate(counts))
    work = [sum(layer_costs[end - count : end]) for count, end in zip(counts, ends, strict=True)]
    work[0] += before
    work[-1] += after
    return [each / speed for each, speed in zip(work, speeds, strict=True)]


def every_cut(layers, stages):
    for cuts in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(b - a for a, b in itertools.pairwise((0, *cuts, layers)))


@pytest.mark.parametrize("seed", range(60))
def test_no_cut_has_a_faster_slowest_stage(seed):
    draw = random.Random(seed)
    layers = draw.randint(1, 10)
    stages = draw.randint(1, layers)
    layer_costs = [draw.choice((1.0, 1.0, draw.uniform(0.1, 3))) for _ in range(layers)]
    ends = {"before": draw.uniform(0, 2), "after": draw.uniform(0, 5)}
    speeds = [draw.choice((1.0, 0.5, draw.uniform(0.2, 2))) for _ in range(stages)]
    counts = balanced_layers(layer_costs, stages, **ends, speeds=speeds)
    assert sum(counts) == layers
    assert min(counts) >= 1

    def order(cut):
        times = stage_times(cut, layer_costs, *ends.values(), speeds)
        return max(times), sum(time**2 for time in times)

    best = min(map(order, every_cut(layers, stages)))
    assert order(counts) == pytest.approx(best, rel=1e-9)


def test_equal_layers_are_spread_evenly_and_the_early_stages_get_fewer():
    assert balanced_layers([1.0] * 10, 4) == (2, 2, 3, 3)
    assert balanced_layers([1.0] * 80, 8) == (10,) * 8


def test_a_heavy_head_takes_the_place_of_layers():
    assert balanced_layers([1.0] * 32, 4, after=4.0) == (9, 9, 9, 5)
    assert balanced_layers([1.0] * 4, 2, after=10.0) == (3, 1)


def test_a_slow_site_gets_fewer_layers():
    assert balanced_layers([1.0] * 12, 4, speeds=[2.0, 2.0, 1.0, 1.0]) == (4, 4, 2, 2)


def test_too_many_cuts_are_refused_before_they_are_listed():
    with pytest.raises(UserError, match="2048 layers in 32 chunks have too many cuts to compare"):
        balanced_layers([1.0] * 2048, 32)


@pytest.mark.parametrize("stages", [0, 5])
def test_every_stage_needs_a_layer(stages):
    with pytest.raises(UserError, match=f"4 layers cannot be cut into {stages} stages"):
        balanced_layers([1.0] * 4, stages)


def test_stages_hold_no_more_than_they_have_memory_for():
    fast = [3.0, 1.0, 1.0]
    assert balanced_layers([1] * 10, 3, speeds=fast) == (6, 2, 2)
    assert balanced_layers([1] * 10, 3, speeds=fast, most=[4, 10, 10]) == (4, 3, 3)
    assert balanced_layers([1] * 10, 3, speeds=fast, most=[4, 2, 4]) == (4, 2, 4)
    for room in ([3, 3, 3], [10, 10, 0]):
        with pytest.raises(UserError, match="with room for"):
            balanced_layers([1] * 10, 3, most=room)
