"""Sites that differ in number or kind of accelerators: layers and sequences by their speed."""

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from geojax.accelerators import accelerator_named
from geojax.models import ModelConfig
from geojax.pipeline.balance import balanced_layers
from geojax.pipeline.schedule import Placement
from geojax.pipeline.tick_tables import tick_table
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate, SiteShare
from geojax.planner.cost.predict import predict
from geojax.planner.search.advice import fits, why_none
from geojax.planner.search.bounds import Bounds
from geojax.planner.search.fewer_sites import without_each_site
from geojax.planner.search.fit import fitting, least_room, rooms
from geojax.planner.search.one_site import one_site_efficiency
from geojax.planner.search.proportions import dealt_out, in_proportion, of_sites, with_batch
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.search import search
from geojax.planner.search.sensitivity import gains
from geojax.planner.search.site_work import SiteWorks
from geojax.planner.search.space import meshes, shapes
from geojax.topology import Topology

CALIBRATION = Calibration()
MODEL = ModelConfig.load("llama3-8b").replace(num_hidden_layers=8)
ALIKE = Topology.load("two-h100-sites-2x8")


def sites_of(*sizes, kinds=("h100-sxm", "h100-sxm"), topology=ALIKE):
    """The topology with so many hosts in each site, of these accelerators."""
    sites = tuple(
        site.model_copy(update={"hosts": hosts, "accelerator": accelerator_named(kind)})
        for site, hosts, kind in zip(topology.sites, sizes, kinds, strict=True)
    )
    return topology.model_copy(update={"sites": sites})


def request_of(topology, **changes):
    given = {"model": MODEL, "global_batch_size": 48, "sequence_length": 2048}
    return PlanRequest(topology=topology, **{"joins": ("islands",)} | given | changes)


def timer_of(request):
    def timer(layout, topology=request.topology):
        return predict(
            request.model,
            layout,
            topology,
            calibration=CALIBRATION,
        )

    return timer


def found(request, keep=3):
    return search(request, timer_of(request), CALIBRATION, keep=keep).best


TIMES = st.lists(st.floats(0.1, 10), min_size=2, max_size=3)


@given(TIMES, st.lists(st.integers(1, 4), min_size=3, max_size=3), st.integers(1, 40))
def test_a_total_is_dealt_out_so_that_the_slowest_is_fastest(times, units, total):
    units = tuple(units[: len(times)])
    counts = dealt_out(total, units, tuple(times))
    ways = [
        way
        for way in itertools.product(*(range(1, total // unit + 1) for unit in units))
        if sum(map(int.__mul__, way, units)) == total
    ]
    if not ways:
        assert counts is None
        return
    assert counts in ways
    slowest = max(map(float.__mul__, times, map(float, counts)))
    assert slowest == min(max(map(float.__mul__, times, map(float, way))) for way in ways)


# A site that is faster by a rounding error ties with the other one.
FASTER = st.floats(0.1, 0.999) | st.just(1.0)


@given(st.tuples(st.floats(0.1, 10), st.floats(0.1, 10)), FASTER, st.integers(2, 200))
def test_a_faster_site_gets_no_less_and_the_order_of_sites_does_not_matter(times, faster, total):
    first, second = dealt_out(total, (1, 1), times)
    assert dealt_out(total, (1, 1), (faster * times[0], times[1]))[0] >= first
    assume(first * times[0] != second * times[1])
    swapped = dealt_out(total, (1, 1), times[::-1])
    assert max(swapped[0] * times[1], swapped[1] * times[0]) == max(
        first * times[0], second * times[1]
    )


@given(
    st.tuples(st.integers(1, 4), st.integers(1, 4)),
    st.integers(8, 40),
    st.floats(0.2, 5),
    st.floats(1, 3),
    st.tuples(st.floats(0, 1), st.floats(0, 3)),
)
def test_a_faster_site_gets_no_fewer_layers_from_either_end(stages, layers, speed, faster, ends):
    def dealt(speeds, first, last):
        return balanced_layers([1.0] * layers, len(speeds), before=first, after=last, speeds=speeds)

    def slowest(counts, speeds, first, last):
        work = [counts[0] + first, *counts[1:-1], counts[-1] + last]
        return max(each / pace for each, pace in zip(work, speeds, strict=True))

    def speeds_with(pace):
        return [pace] * stages[0] + [1.0] * stages[1]

    speeds = speeds_with(speed)
    counts = dealt(speeds, *ends)
    more = dealt(speeds_with(speed * faster), *ends)
    assert sum(more[: stages[0]]) >= sum(counts[: stages[0]])
    back = dealt(speeds[::-1], *ends[::-1])
    assert slowest(back, speeds[::-1], *ends[::-1]) == pytest.approx(slowest(counts, speeds, *ends))


@given(st.integers(1, 4), st.integers(1, 9), st.floats(0.1, 10), st.integers(2, 4))
def test_sites_that_are_alike_get_as_much(unit, count, time, sites):
    dealt = dealt_out(unit * count * sites, (unit,) * sites, (time,) * sites)
    assert dealt == (count,) * sites


def test_sites_that_are_alike_are_planned_as_before():
    request = request_of(ALIKE)
    timer, works = timer_of(request), SiteWorks(request, CALIBRATION)
    for mesh in meshes(request, Counter()):
        assert mesh.site_shares is None
        assert list(of_sites(mesh, [1, 1], unlike=False)) == [mesh]
    for candidate in found(request):
        layout = candidate.layout
        assert in_proportion(request, layout, works) == layout
        sequences = 48 // (1 if layout.dc.role == "stage" else 2)
        stages = layout.stages_per_site[0]
        given = (SiteShare(stages, layout.mesh.data, sequences),) * 2
        shared = layout.with_shares(given)
        assert least_room(request, shared).memory == candidate.memory
        assert timer(shared).terms == candidate.prediction.terms
        exposed = sum(
            term.exposed_seconds
            for term in candidate.prediction.terms
            if term.network == "between_sites"
        )
        efficiency = one_site_efficiency(layout, request.topology, timer)
        assert efficiency == pytest.approx(1 - exposed / candidate.seconds)


def test_sites_of_other_numbers_have_more_stages_or_replicas():
    request = request_of(sites_of(2, 1))
    for layout in itertools.islice(shapes(request, Counter()), 0, None, 5):
        assert layout.devices_per_site == (16, 8)
        assert layout.batch.global_batch_size == 48
        assert not layout.is_trainable
        sizes = [share.stages * share.data for share in layout.site_shares]
        assert sizes[0] == 2 * sizes[1]


@pytest.mark.parametrize("role", ["data", "stage"])
def test_bounds_are_below_and_what_is_dealt_out_is_whole(role):
    request = request_of(sites_of(2, 1, kinds=("h100-sxm", "a100-sxm-80gb")), roles=(role,))
    bounds, timer = Bounds(request, CALIBRATION), timer_of(request)
    for shape in itertools.islice(shapes(request, Counter()), 0, None, 9):
        for each in fitting(request, shape, Counter()):
            layout = in_proportion(request, each.layout, bounds.works)
            made = timer(layout)
            assert bounds.seconds(each.layout) <= 1.001 * made.step_seconds, layout
            assert layout.batch.global_batch_size == 48
            if role == "stage":
                assert sum(layout.pipeline.layers) == 8
            assert 0 < one_site_efficiency(layout, request.topology, timer) <= 1.001


def test_a_faster_site_trains_on_more():
    mixed = sites_of(1, 1, kinds=("h100-sxm", "a100-sxm-80gb"))
    request = request_of(mixed, roles=("data",), global_batch_size=192)
    proportionate, *others = found(request, keep=8)
    first, second = proportionate.layout.site_shares
    assert first.sequences > 1.5 * second.sequences
    assert first.sequences + second.sequences == 192
    trainable = next(each for each in others if each.layout.is_trainable)
    assert trainable.seconds > 1.1 * proportionate.seconds, "half of the batch each takes longer"
    helps = gains(proportionate.layout, mixed, timer_of(request))
    assert sum(gain.seconds > 0 for gain in helps) > 3


def test_the_order_of_replicas_does_not_matter():
    kinds = ("h100-sxm", "a100-sxm-80gb")
    there = found(request_of(sites_of(2, 1, kinds=kinds), roles=("data",)))
    back = found(request_of(sites_of(1, 2, kinds=kinds[::-1]), roles=("data",)))
    for one, other in zip(there, back, strict=True):
        assert one.layout.site_shares == other.layout.site_shares[::-1]
        assert one.seconds == pytest.approx(other.seconds)


def test_a_site_of_little_memory_holds_as_much_as_it_has():
    small = sites_of(1, 1, kinds=("h100-sxm", "a100-sxm-40gb"))
    topology = small.model_copy(
        update={
            "sites": (
                small.sites[0],
                small.sites[1].model_copy(update={"accelerator": _with_memory(12e9)}),
            )
        }
    )
    request = request_of(topology, roles=("stage",))
    for candidate in found(request):
        assert all(room.fits for room in rooms(request, candidate.layout))
        even = candidate.layout.changed(pipeline={"layers": None})
        half = len(candidate.layout.pipeline.layers) // 2
        assert sum(candidate.layout.pipeline.layers[half:]) < 4, "fewer than an even half"
        if not least_room(request, even).fits:
            break
    else:
        pytest.fail("an even half must be too much for one of the layouts")


def _with_memory(size):
    return accelerator_named("a100-sxm-40gb").model_copy(update={"memory_bytes": int(size)})


def test_what_does_not_fit_names_the_site_and_what_would():
    kinds = ("h100-sxm", "a100-sxm-40gb")
    request = request_of(
        sites_of(1, 1, kinds=kinds), model=ModelConfig.load("llama3-70b"), roles=("data",)
    )
    line = why_none(request)
    assert " on a device of site 'west' is " in line
    assert "of each a100-sxm-40gb are usable; " in line
    assert line.endswith("; a smaller model would be needed")
    small = sites_of(1, 1).sites[1].model_copy(update={"accelerator": _with_memory(6e9)})
    topology = ALIKE.model_copy(update={"sites": (ALIKE.sites[0], small)})
    line = why_none(request_of(topology, roles=("stage",)))
    assert "the least that one needs on a device of site 'west' is " in line
    assert " in 'west' would work" in line
    odd = request_of(sites_of(2, 1), global_batch_size=2, roles=("data",))
    line = why_none(odd)
    nearest = int(line.rsplit("; ", 1)[1].removesuffix(" would"))
    assert fits(dataclasses.replace(odd, global_batch_size=nearest))


def test_a_batch_of_replicas_is_dealt_out_in_whole_microbatches():
    request = request_of(sites_of(2, 1), roles=("data",))
    mesh = next(meshes(request, Counter()))
    assert with_batch(mesh, 48, 1).batch.global_batch_size == 48
    assert with_batch(mesh, 2, 1) is None
    assert with_batch(mesh, 48, 8) is None or with_batch(mesh, 48, 8).microbatch_size == 8


def test_the_plan_without_a_site_is_that_of_the_others():
    request = request_of(sites_of(1, 1, kinds=("h100-sxm", "a100-sxm-80gb")))
    without = dict(without_each_site(request, timer_of(request), CALIBRATION))
    assert set(without) == {"east", "west"}
    alone = request.topology.model_copy(update={"sites": request.topology.sites[:1], "links": ()})
    (best,) = found(request_of(alone, joins=("one_program",)), keep=1)
    assert without["west"].seconds == best.seconds < without["east"].seconds


@pytest.mark.parametrize("limit", [4, None])
def test_stages_of_a_later_site_hold_fewer_microbatches(limit):
    held = tick_table("1f1b", Placement.linear(4), 8, (1, 1, 1), limit).schedule.in_flight
    request = request_of(sites_of(1, 1, kinds=("h100-sxm", "a100-sxm-80gb")), roles=("stage",))
    layout = LayoutCandidate.made(
        sequence_length=2048,
        microbatches=8,
        mesh={"dc": 2, "stage": 2, "data": 4},
        dc={"join": "islands", "role": "stage"},
        pipeline={"layers": (2, 2, 2, 2), "memory_limit": limit, "schedule": "1f1b"},
    )
    first, second = (room.memory.by_use["activations"] for room in rooms(request, layout))
    assert second == pytest.approx(first * held[2] / held[0])
