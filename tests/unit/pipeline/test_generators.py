"""Every generator keeps the rules, whatever it is asked for."""

import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from geojax.errors import UserError
from geojax.pipeline import (
    SCHEDULES,
    Costs,
    Hop,
    Kind,
    Placement,
    geopipe,
    gpipe,
    interleaved,
    latency_hiding,
    lock_step,
    one_forward_one_backward,
    simulate,
    tick_table,
    validate,
    validate_table,
    zbv,
    zero_bubble_h1,
    zero_bubble_h2,
)

SECONDS = st.floats(0.1, 10.0)
FEW = hypothesis.settings(max_examples=60, derandomize=True)


@st.composite
def pipelines(draw):
    """Costs of one chunk a stage: unequal stages, hops inside sites and over links."""
    count = draw(st.integers(1, 7))
    times = [tuple(draw(SECONDS) for _ in range(count)) for _ in range(3)]
    hops = tuple(
        Hop(draw(st.floats(0, 30)), draw(st.floats(0, 5)), draw(st.sampled_from([None, "a", "b"])))
        for _ in range(count - 1)
    )
    return Costs(*times, hops, draw(st.booleans()))


@FEW
@hypothesis.given(pipelines(), st.integers(1, 20), st.integers(1, 12))
def test_generators_keep_the_rules_and_their_memory(costs, microbatches, limit):
    stages = len(costs.forward)
    schedules = [
        (gpipe(stages, microbatches), microbatches),
        (one_forward_one_backward(stages, microbatches), stages),
        (geopipe(microbatches, costs, limit), limit),
        (geopipe(microbatches, costs), microbatches),
        (zero_bubble_h1(stages, microbatches), stages),
        (zero_bubble_h2(stages, microbatches), 2 * stages - 1),
        (latency_hiding(microbatches, costs, limit), limit),
        (latency_hiding(microbatches, costs, limit, split_backward=True), limit),
    ]
    for schedule, most in schedules:
        validate(schedule, min(most, microbatches))
        timeline = simulate(schedule, costs)
        check_physics(timeline, costs)


def check_physics(timeline, costs):
    """Nothing begins before what it needs is there, no stage and no link does two things."""
    ended = {}
    free = {}
    arrived = {(message.action, message.target): message.end for message in timeline.messages}
    for stage, action, start, end in timeline.spans:
        assert start >= free.get(stage, 0.0)
        free[stage] = end
        ended[action] = end
        step = 1 if action.kind is Kind.BACKWARD else -1
        needed = action._replace(chunk=action.chunk + step)
        if action.kind is not Kind.WEIGHT and (needed, stage) in arrived:
            assert start >= arrived[needed, stage] - 1e-9
    busy = {}
    for message in timeline.messages:
        assert message.start >= ended[message.action]
        assert message.end >= message.sent >= message.start
        if message.link is not None:
            way = costs.half_duplex or message.source < message.target
            assert message.start >= busy.get((message.link, way), 0.0)
            busy[message.link, way] = message.sent
    shares = timeline.bubble_inside_sites + timeline.bubble_across_sites
    assert shares == pytest.approx(timeline.bubble_ratio, abs=1e-9)


@FEW
@hypothesis.given(
    st.lists(st.integers(1, 4), min_size=1, max_size=3), st.integers(1, 3), st.integers(1, 4)
)
def test_interleaved_chunks_stay_inside_their_site(stages_per_site, chunks_per_stage, groups):
    schedule = interleaved(stages_per_site, chunks_per_stage, groups * max(stages_per_site))
    validate(schedule)
    site_of = [site for site, count in enumerate(stages_per_site) for _ in range(count)]
    sites = [site_of[stage] for stage in schedule.placement.stage_of]
    assert sites == sorted(sites)  # every cut is crossed once
    assert schedule.placement.chunks == sum(stages_per_site) * chunks_per_stage
    ticks = tick_table(
        "interleaved", schedule.placement, schedule.microbatches, (1,) * (len(sites) - 1)
    )
    validate_table(ticks)


def test_interleaved_wants_whole_groups():
    with pytest.raises(UserError, match=r"6 microbatches .* in groups of 4.* a multiple of 4"):
        interleaved([4], 2, 6)


@pytest.mark.parametrize("stages", range(1, 8))
def test_zbv_keeps_the_memory_of_one_forward_one_backward(stages):
    """At equal times nothing idles between a stage's first action and its last."""
    for microbatches in (1, 2, stages, 2 * stages - 1, 3 * stages):
        schedule = zbv(stages, microbatches)
        validate(schedule, 2 * stages)
        costs = Costs.of_stages(schedule.placement, 2.0, 2.0, 2.0, lambda source, target: Hop())
        timeline = simulate(schedule, costs)
        if microbatches >= 2 * stages - 1:
            assert max(timeline.stage_seconds) == 6 * microbatches


@FEW
@hypothesis.given(st.data(), st.sampled_from(tuple(SCHEDULES)), st.integers(1, 6))
def test_tables_keep_the_rules(data, name, stages):
    placement = Placement.vee(stages) if name == "zbv" else Placement.linear(stages)
    if name == "interleaved":
        placement = Placement.interleaved([stages, stages], 2)
    boundaries = itertools.pairwise(placement.stage_of)
    hop_ticks = [
        1 if source == target else data.draw(st.integers(1, 4)) for source, target in boundaries
    ]
    microbatches = data.draw(st.integers(1, 20))
    limit = data.draw(st.none() | st.integers(1, 12))
    # Those that cannot bend may refuse a limit, interleaved ones too few microbatches too.
    bends = name in ("1f1b", "geopipe", "latency_hiding", "latency_hiding_split")
    may_refuse = name == "interleaved" or not (limit is None or bends)
    try:
        table = tick_table(name, placement, microbatches, hop_ticks, limit)
    except UserError:
        if may_refuse:
            return
        raise
    assert table.schedule.name == name
    validate_table(table, limit)
    costs = Costs.of_stages(placement, 1.0, 1.0, 1.0, lambda source, target: Hop(0.5, 0.1, "cut"))
    timeline = lock_step(table, costs)
    assert timeline.seconds >= simulate(table.schedule, costs).seconds - 1e-9
    assert timeline.in_flight == table.schedule.in_flight


@pytest.mark.parametrize(
    ("name", "placement", "options", "message"),
    [
        (
            "fastest",
            Placement.linear(2),
            {},
            "no schedule is called 'fastest'; choose one of branch",
        ),
        ("gpipe", Placement.vee(2), {}, "'gpipe' puts its chunks on the stages 0, 1, not on 0, 1"),
        ("zbv", Placement.linear(2), {}, "'zbv' puts its chunks on the stages 0, 1, 1, 0, not on"),
        ("interleaved", Placement.vee(2), {}, "are not interleaved"),
        (
            "gpipe",
            Placement.linear(2),
            {"limit": 3},
            "'gpipe' holds 8 microbatches on a stage where the limit is 3 microbatches: the least "
            "that works is 8 microbatches; latency_hiding keeps within any limit",
        ),
        (
            "zbv",
            Placement.vee(2),
            {"limit": 3},
            r"'zbv' holds 2 microbatches \(4 of its 2 chunks each\) on a stage where the limit is "
            "1.5 microbatches .*: the least that works is 2 microbatches",
        ),
        (
            "interleaved",
            Placement.interleaved([2], 2),
            {"limit": 4},
            "'interleaved' holds 2.5 microbatches .* the least that works is 3 microbatches",
        ),
    ],
)
def test_refusals(name, placement, options, message):
    with pytest.raises(UserError, match=message):
        tick_table(name, placement, 8, (1,) * (placement.chunks - 1), **options)


def test_hop_ticks_must_fit():
    for hop_ticks in ((1,), (1, 0)):
        with pytest.raises(UserError, match="do not fit 3 chunks"):
            tick_table("gpipe", Placement.linear(3), 4, hop_ticks)


def test_latency_hiding_needs_room_for_one():
    with pytest.raises(UserError, match="the least limit is 1"):
        latency_hiding(4, Costs.uniform(2, 1.0, 2.0), 0)
