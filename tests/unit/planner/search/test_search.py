"""The search over layouts: what it times, prunes, refuses and advises."""

import dataclasses
import itertools
from collections import Counter

import pytest

from geojax.accelerators import accelerator_named
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.planner.resolve.run_layout import layout_of_run, run_settings
from geojax.planner.search.advice import fits, why_none
from geojax.planner.search.bounds import Bounds
from geojax.planner.search.fit import fitting, least_room
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.search import search
from geojax.planner.search.sensitivity import Sweep, gains, memory_gain, sweeps, with_links
from geojax.planner.search.space import meshes, shapes
from geojax.planner.search.timeline import step_timeline
from geojax.topology import Topology

CALIBRATION = Calibration()
NEW_RUN = {
    "run_directory": "runs/none",
    "steps": 1,
    "topology": "two-h100-sites-2x8",
    "model": {"preset": "llama3-8b", "num_hidden_layers": 8},
    "data": {"sources": [{"name": "python", "builtin": "python-stdlib"}]},
}
MODEL = ModelConfig.load("llama3-8b").replace(num_hidden_layers=8)


def request_of(**changes):
    given = {
        "model": MODEL,
        "topology": Topology.load("two-h100-sites-2x8"),
        "global_batch_size": 32,
        "sequence_length": 2048,
    }
    return PlanRequest(**given | changes)


def timer_of(request):
    def timer(layout, topology=request.topology):
        return predict(
            request.model,
            layout,
            topology,
            calibration=CALIBRATION,
        )

    return timer


def test_it_finds_what_trying_everything_finds():
    request = request_of()
    timer = timer_of(request)
    bounds = Bounds(request, CALIBRATION)
    seconds = {}
    for shape in shapes(request, Counter()):
        for layout, memory in fitting(request, shape, Counter()):
            seconds[layout] = timer(layout).step_seconds
            assert bounds.seconds(layout) <= 1.001 * seconds[layout], layout
            assert memory.bytes <= request.usable_bytes
    found = search(request, timer, CALIBRATION, keep=3)
    assert found.fitting == len(seconds)
    assert found.best[0].seconds == pytest.approx(min(seconds.values()))
    assert found.timed < 0.8 * len(seconds), "bounds must prune"
    assert found.next_bound > found.best[-1].seconds
    ordered = [each.seconds for each in found.best]
    assert ordered == sorted(ordered)


def test_every_layout_uses_all_accelerators_and_the_whole_batch():
    request = request_of(model=ModelConfig.load("mixtral-8x7b"), sequence_length=16384)
    refused = Counter()
    found = list(itertools.islice(shapes(request, refused), 0, None, 7))
    assert {layout.devices for layout in found} == {16}
    assert {layout.batch.global_batch_size for layout in found} == {32}
    assert {layout.dc.role for layout in found} == {"data", "stage"}
    assert max(layout.mesh.tensor for layout in found) == 8, "no more than a host has"
    assert {layout.mesh.expert for layout in found} == {1, 2, 4, 8}
    assert {layout.mesh.context for layout in found} >= {1, 8}
    assert refused["batch"] == 0


def test_compression_and_sharding_over_sites_are_varied_if_they_may_be():
    slow = with_links(request_of().topology, bandwidth=0.1)
    request = request_of(topology=slow, roles=("data",), compressions=("none", "bf16", "int8"))
    found = search(request, timer_of(request), CALIBRATION, keep=2)
    assert found.best[0].layout.communication.gradient_compression == "int8"
    plain = request_of(topology=slow, roles=("data",))
    kept = search(plain, timer_of(plain), CALIBRATION, keep=2)
    assert kept.best[0].layout.communication.gradient_compression == "none"
    assert kept.best[0].seconds > found.best[0].seconds


def test_islands_have_stages_inside_in_role_stage_alone_and_a_low_zero():
    request = request_of(joins=("islands",))
    found = list(meshes(request, Counter()))
    assert {mesh.dc.join for mesh in found} == {"islands"}
    assert {mesh.pipeline_stages for mesh in found if mesh.dc.role == "stage"} == {2, 4, 8}
    assert {mesh.pipeline_stages for mesh in found if mesh.dc.role == "data"} == {1}
    sharded = {
        each.layout.zero.stage
        for shape in shapes(request, Counter())
        for each in fitting(request, shape, Counter())
    }
    assert sharded <= {1, 2}


def test_it_names_what_leaves_no_layout_and_what_would():
    assert fits(request_of(model=ModelConfig.load("llama3-8b")))
    large = request_of(model=ModelConfig.load("llama3-70b"), sequence_length=8192)
    line = why_none(large)
    assert "the least that one needs on a device is" in line
    assert "most of it optimizer moments" in line
    assert line.endswith("tpu-v5p or 2 hosts in each site would work")
    site = large.topology.sites[0].model_copy(update={"hosts": 2})
    doubled = tuple(site.model_copy(update={"name": name}) for name in ("east", "west"))
    more = large.topology.model_copy(update={"sites": doubled})
    assert fits(dataclasses.replace(large, topology=more))
    odd = request_of(topology=Topology.load("two-h100-sites"), global_batch_size=1000)
    line = why_none(odd)
    assert "1000 does not divide over the data-parallel ranks of any mesh of 3072" in line
    nearest = int(line.rsplit("; ", 1)[1].removesuffix(" would"))
    assert fits(dataclasses.replace(odd, global_batch_size=nearest))


def test_one_program_needs_sites_that_are_alike():
    topology = Topology.load("two-h100-sites-2x8")
    east, west = topology.sites
    fewer = topology.model_copy(update={"sites": (east.model_copy(update={"hosts": 3}), west)})
    with pytest.raises(UserError, match=r"'east' 24 h100-sxm and 'west' 8 .* --joins islands"):
        request_of(topology=fewer)


def test_islands_of_other_accelerators_get_layers_in_proportion():
    topology = Topology.load("two-h100-sites-2x8")
    east, west = topology.sites
    older = west.model_copy(update={"accelerator": accelerator_named("a100-sxm-80gb")})
    mixed = topology.model_copy(update={"sites": (east, older)})
    with pytest.raises(UserError, match=r"8 h100-sxm and 'west' 8 a100-sxm-80gb.* --joins islands"):
        request_of(topology=mixed)
    request = request_of(topology=mixed, joins=("islands",), roles=("stage",))
    best = search(request, timer_of(request), CALIBRATION, keep=1).best[0]
    layers = best.layout.pipeline.layers
    half = len(layers) // 2
    assert sum(layers) == 8
    assert sum(layers[:half]) > sum(layers[half:]), "an H100 computes more than an A100"
    alike = request_of(joins=("islands",), roles=("stage",))
    layers = search(alike, timer_of(alike), CALIBRATION, keep=1).best[0].layout.pipeline.layers
    assert sum(layers[: len(layers) // 2]) in (4, 5), "the last stage has the head, too"


def test_layers_and_buckets_are_settled_as_they_were_timed():
    request = request_of(roles=("data",))
    timer = timer_of(request)
    piped, whole = (
        next(each for each in found if (each.layout.pipeline_stages > 1) == has_stages)
        for found in [search(request, timer, CALIBRATION, keep=12).best]
        for has_stages in (True, False)
    )
    assert sum(piped.layout.pipeline.layers) == 8
    assert whole.layout.pipeline.layers is None
    for each in (piped, whole):
        layout = each.layout
        assert "auto" not in (
            layout.communication.bucket_bytes,
            layout.communication.bucket_layers,
            layout.communication.overlap_grad_reduce,
        )
        assert timer(layout).step_seconds == pytest.approx(each.seconds)
        settings = run_settings(layout)
        config = RunConfig.model_validate(NEW_RUN | settings)
        assert layout_of_run(config) == layout, "the run that is written is the layout"


def test_a_request_needs_links_and_a_sequence_that_the_model_can_read():
    with pytest.raises(UserError, match="says nothing of the link"):
        request_of(topology=request_of().topology.model_copy(update={"links": ()}))
    with pytest.raises(UserError, match="131072 would do"):
        request_of(model=ModelConfig.load("llama3-70b"), sequence_length=2**18)


LAYOUT = LayoutCandidate.made(
    sequence_length=2048,
    microbatches=2,
    mesh={"dc": 2, "data": 8},
    zero={"stage": 2},
    remat="full",
    communication={"overlap_grad_reduce": False, "bucket_bytes": 2**22},
)


def test_a_derivative_says_what_limits():
    request = request_of()
    helps = gains(LAYOUT, request.topology, timer_of(request))
    assert helps[0].seconds == max(gain.seconds for gain in helps)
    assert {gain.resource for gain in helps} >= {"compute", "link bandwidth", "link latency"}
    assert 0.9 < sum(gain.share for gain in helps) < 1.01
    narrow = with_links(request.topology, bandwidth=0.01)
    assert gains(LAYOUT, narrow, timer_of(request))[0].resource == "link bandwidth"
    far = with_links(request.topology, round_trip=1000)
    assert gains(LAYOUT, far, timer_of(request))[0].resource == "link latency"


def test_more_memory_may_save_time():
    request = request_of(memory_bytes=7e9, roles=("data",))
    timer = timer_of(request)
    best = search(request, timer, CALIBRATION, keep=1).best[0]
    gain = memory_gain(request, best.seconds, timer, CALIBRATION)
    assert gain.resource == "memory"
    assert gain.seconds > 0
    plenty = request_of(memory_bytes=1e12, roles=("data",))
    best = search(plenty, timer, CALIBRATION, keep=1).best[0]
    assert memory_gain(plenty, best.seconds, timer, CALIBRATION).seconds == 0


def test_a_timeline_is_that_of_the_pipeline_in_its_mode():
    request = request_of()
    stage = LayoutCandidate.made(
        sequence_length=2048,
        microbatches=8,
        mesh={"dc": 2, "stage": 2, "data": 4},
        dc={"role": "stage"},
        pipeline={"schedule": "branch_free"},
    )
    timeline, sites = step_timeline(request, stage, CALIBRATION)
    assert sites == ("east", "east", "west", "west")
    assert len(timeline.schedule.orders) == 4
    assert timeline.schedule.name == "branch_free, 8 of 8 microbatches"
    inside = stage.changed(dc={"role": "data"}, mesh={"stage": 4, "data": 2})
    inside = inside.with_microbatches(8, 1)
    assert step_timeline(request, inside, CALIBRATION).sites == ("east",) * 4
    island = stage.changed(
        dc={"join": "islands"}, mesh={"stage": 1}, pipeline={"schedule": "geopipe"}
    )
    assert step_timeline(request, island, CALIBRATION).timeline.seconds > 0
    assert step_timeline(request, LAYOUT, CALIBRATION) is None


def test_a_sweep_finds_where_roles_cross():
    request = request_of()
    stage = LayoutCandidate.made(
        sequence_length=2048,
        microbatches=4,
        mesh={"dc": 2, "stage": 1, "data": 8},
        dc={"role": "stage"},
        remat="full",
        pipeline={"schedule": "branch_free"},
    )
    roles = {"data": [LAYOUT], "stage": [stage]}
    bandwidth, round_trip = sweeps(roles, request.topology, timer_of(request))
    assert bandwidth.now == 12.5e9
    assert round_trip.now == 0.021
    for own in (*bandwidth.seconds.values(),):
        assert all(a >= b - 1e-9 for a, b in itertools.pairwise(own)), "more bandwidth is no worse"
    crossing = Sweep("bandwidth", 1.0, (1.0, 4.0), {"data": (2.0, 1.0), "stage": (1.0, 2.0)})
    assert crossing.crossings == (pytest.approx(2.0),)


def test_memory_is_that_of_the_closed_form():
    request = request_of()
    assert least_room(request, LAYOUT).fits
    assert not list(fitting(request_of(memory_bytes=1e9), LAYOUT, Counter()))
