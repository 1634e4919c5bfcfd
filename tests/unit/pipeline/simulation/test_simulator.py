"""The event-driven simulator against what can be worked out by hand."""

import dataclasses
import itertools
import math
import random
import time

import pytest
from support.drawn_pipelines import drawn_costs, lower_bound, period_of

from geojax.pipeline import (
    Action,
    Costs,
    Hop,
    Invariant,
    Kind,
    Placement,
    Schedule,
    ScheduleError,
    geopipe,
    gpipe,
    one_forward_one_backward,
    simulate,
    zero_bubble_h1,
)
from geojax.pipeline.simulation.simulator import iteration_seconds


def linear(forward, backward, hops, *, weight=0.0, half_duplex=False):
    stages = len(hops) + 1
    return Costs(
        (forward,) * stages, (backward,) * stages, (weight,) * stages, tuple(hops), half_duplex
    )


def test_a_small_pipeline_by_hand():
    """Two stages, F 1, B 2, a hop that sends for 0.5 and travels for 1."""
    timeline = simulate(one_forward_one_backward(2, 2), linear(1.0, 2.0, [Hop(1.0, 0.5, "cut")]))
    begins = {(span.stage, str(span.action)): span.start for span in timeline.spans}
    assert begins == {
        (0, "F0.0"): 0.0,
        (0, "F1.0"): 1.0,
        (1, "F0.1"): 2.5,
        (1, "B0.1"): 3.5,
        (1, "F1.1"): 5.5,
        (1, "B1.1"): 6.5,
        (0, "B0.0"): 7.0,
        (0, "B1.0"): 10.0,
    }
    assert timeline.seconds == 12.0
    assert timeline.bubble_ratio == pytest.approx(0.5)
    assert timeline.bubble_inside_sites == pytest.approx(3 / 12)
    assert timeline.bubble_across_sites == pytest.approx(3 / 12)
    assert timeline.in_flight == (2, 1)
    assert timeline.link_use == {("cut", 0, 1): 1 / 12, ("cut", 1, 0): 1 / 12}
    assert timeline.stage_seconds == (12.0, 6.0)
    first = timeline.messages[0]
    assert (first.source, first.target, first.start, first.sent, first.end) == (0, 1, 1, 1.5, 2.5)


def test_late_receives_by_hand():
    """The same pipeline: a message leaves when the stage that needs it has nothing else to do."""
    costs = linear(1.0, 2.0, [Hop(1.0, 0.5, "cut")])
    timeline = simulate(one_forward_one_backward(2, 2), costs, late_receives=True)
    begins = {(span.stage, str(span.action)): span.start for span in timeline.spans}
    assert begins == {
        (0, "F0.0"): 0.0,
        (0, "F1.0"): 1.0,
        (1, "F0.1"): 2.5,
        (1, "B0.1"): 3.5,
        (1, "F1.1"): 7.0,  # 5.5 if its input had left when it was made
        (1, "B1.1"): 8.0,
        (0, "B0.0"): 7.0,
        (0, "B1.0"): 11.5,
    }
    assert [(each.start, each.sent, each.end) for each in timeline.messages] == [
        (1.0, 1.5, 2.5),
        (5.5, 6.0, 7.0),
        (5.5, 6.0, 7.0),
        (10.0, 10.5, 11.5),
    ]


def test_stages_that_share_a_device_take_turns_by_hand():
    """Two stages of one device, F 1, B 2: it never idles, and no message takes time."""
    schedule = one_forward_one_backward(2, 2)
    timeline = simulate(schedule, linear(1.0, 2.0, [Hop()]), stages_per_device=2)
    begins = {(span.stage, str(span.action)): span.start for span in timeline.spans}
    assert begins == {
        (0, "F0.0"): 0.0,
        (0, "F1.0"): 1.0,
        (1, "F0.1"): 2.0,
        (1, "B0.1"): 3.0,
        (0, "B0.0"): 5.0,
        (1, "F1.1"): 7.0,
        (1, "B1.1"): 8.0,
        (0, "B1.0"): 10.0,
    }
    assert (timeline.seconds, timeline.bubble_ratio) == (12.0, 0.0)


def test_stages_that_share_devices_are_held_up_by_messages_alone():
    draw = random.Random(0)
    for _ in range(20):
        costs, schedule = linear(1.0, 2.0, [Hop()] * 5), one_forward_one_backward(6, 12)
        if draw.random() < 0.5:
            costs = linear(draw.random(), draw.random(), [Hop(draw.random())] * 5)
        shared = draw.choice([2, 3, 6])
        timeline = simulate(schedule, costs, stages_per_device=shared)
        busy = sorted((span.stage // shared, span.start, span.end) for span in timeline.spans)
        for (device, _, end), (other, start, _) in itertools.pairwise(busy):
            assert device != other or start >= end - 1e-12
        assert timeline.seconds >= simulate(schedule, costs).seconds - 1e-12
    alone = simulate(schedule, linear(1.0, 2.0, [Hop()] * 5), stages_per_device=6)
    assert alone.seconds == pytest.approx(6 * 12 * 3.0)


def test_only_a_split_backward_pays_the_surcharge():
    costs = dataclasses.replace(linear(1.0, 2.0, [Hop()], weight=1.0), split_surcharge=0.1)
    free = dataclasses.replace(costs, split_surcharge=0.0)
    whole, split = one_forward_one_backward(2, 4), zero_bubble_h1(2, 4)
    assert simulate(whole, costs).seconds == simulate(whole, free).seconds

    def work(costs):
        return sum(span.end - span.start for span in simulate(split, costs).spans)

    assert work(costs) - work(free) == pytest.approx(2 * 4 * 0.1 * (2 + 1))


def test_the_period_of_strict_one_forward_one_backward():
    """P = (f + b) + max over windows of n adjacent stages of 2 sum(n - 1 hops) / n."""
    generator = random.Random(0)
    for _ in range(300):
        stages = generator.randint(2, 6)
        forward, backward = generator.uniform(0.5, 2), generator.uniform(0.5, 3)
        hops = [Hop(generator.choice([0.0, generator.uniform(0, 9)])) for _ in range(stages - 1)]
        costs = linear(forward, backward, hops)
        windows = [
            2 * sum(hop.seconds for hop in hops[first : first + size - 1]) / size
            for size in range(2, stages + 1)
            for first in range(stages - size + 1)
        ]
        # A window's turn comes back every `size` microbatches; what the start leaves has died out.
        turn, microbatches = math.lcm(*range(2, stages + 1)), 480
        timeline = simulate(one_forward_one_backward(stages, microbatches), costs)
        begins = [
            span.start
            for span in timeline.spans
            if span.stage == 0 and span.action.kind is Kind.BACKWARD
        ]
        last = microbatches - stages - 1
        period = (begins[last] - begins[last - turn]) / turn
        assert period == pytest.approx(forward + backward + max(windows), rel=1e-9)


def test_one_cut_costs_strict_one_forward_one_backward_two_hops_for_every_two_microbatches():
    """(m + p - 1)(f + b) + 2 (floor((m - (p - q)) / 2) + 1) H for a cut after q stages."""
    generator = random.Random(1)
    for _ in range(100):
        stages = generator.randint(2, 10)
        before = generator.randint(1, stages - 1)
        microbatches = generator.randint(2 * stages, 60)
        forward, backward = generator.uniform(0.5, 2), generator.uniform(0.5, 3)
        hops = [Hop()] * (stages - 1)
        hops[before - 1] = Hop(generator.uniform(0, 5))
        seconds = iteration_seconds(
            one_forward_one_backward(stages, microbatches), linear(forward, backward, hops)
        )
        expected = (microbatches + stages - 1) * (forward + backward)
        turns = (microbatches - (stages - before)) // 2 + 1
        expected += 2 * turns * hops[before - 1].seconds
        assert seconds == pytest.approx(expected, rel=1e-12)


def test_geopipe_meets_the_lower_bound():
    generator = random.Random(2)
    for _ in range(300):
        stages = generator.randint(2, 12)
        microbatches = generator.randint(1, 96)
        costs = drawn_costs(generator, stages, cuts=3, periods=6)
        if generator.random() < 0.5:
            # A whole number of periods there and back: rounding up must not add one.
            halves = [round(2 * hop.seconds / period_of(costs)) / 2 for hop in costs.hops]
            hops = tuple(Hop(half * period_of(costs), 0.0, "cut") for half in halves)
            costs = dataclasses.replace(costs, hops=hops)
        schedule = geopipe(microbatches, costs)
        seconds = iteration_seconds(schedule, costs)
        assert seconds == pytest.approx(lower_bound(microbatches, costs), rel=1e-9)


def test_messages_over_a_link_wait_for_each_other():
    """Six forwards of 1 s each leave over a link that sends for 3 s; inside a site none waits."""
    slow = linear(1.0, 1.0, [Hop(0.0, 3.0, "cut")])
    timeline = simulate(gpipe(2, 6), slow)
    forwards = [message for message in timeline.messages if message.action.kind is Kind.FORWARD]
    assert [message.start for message in forwards] == [1, 4, 7, 10, 13, 16]
    inside = simulate(gpipe(2, 6), linear(1.0, 1.0, [Hop(0.0, 3.0)]))
    assert [message.start for message in inside.messages[:6]] == [1, 2, 3, 4, 5, 6]
    assert inside.bubble_across_sites == 0


def test_half_duplex_links_share_both_directions():
    """Forwards and backwards of 2 s in all, 1.5 s of sending each: 3 s a microbatch on one link."""
    hops = [Hop(0.0, 1.5, "cut")]
    full, half = (
        simulate(geopipe(16, costs), costs)
        for costs in (linear(1.0, 1.0, hops), linear(1.0, 1.0, hops, half_duplex=True))
    )
    assert full.seconds == 17 * 2 + 2 * 1.5
    assert half.seconds >= 16 * 3
    sending = sorted((message.start, message.sent) for message in half.messages)
    assert all(later[0] >= earlier[1] for earlier, later in itertools.pairwise(sending))
    both = sorted((message.start, message.sent) for message in full.messages)
    assert any(later[0] < earlier[1] for earlier, later in itertools.pairwise(both))


def test_a_schedule_that_cannot_finish_is_named():
    forward, backward = Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)
    stuck = Schedule("stuck", Placement.linear(1), 1, False, ((backward, forward),))
    with pytest.raises(ScheduleError, match=r"stage 0 waits at B0\.0 for F0\.0") as raised:
        simulate(stuck, linear(1.0, 1.0, []))
    assert raised.value.invariant is Invariant.CAN_FINISH


def test_large_pipelines_take_time_in_proportion_to_their_actions():
    hops = [Hop(0.1, 0.1)] * 63
    hops[31] = Hop(3.0, 0.5, "cut")
    costs = dataclasses.replace(linear(1.0, 2.0, [Hop()] * 63), hops=tuple(hops))

    def least_seconds(microbatches):
        schedule, took = one_forward_one_backward(64, microbatches), []
        for _ in range(3):
            begin = time.process_time()
            timeline = simulate(schedule, costs)
            took.append(time.process_time() - begin)
        assert len(timeline.spans) == 2 * 64 * microbatches
        return min(took)

    assert least_seconds(512) < 8 * least_seconds(128), "of four times the actions"
