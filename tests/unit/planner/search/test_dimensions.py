"""What the search covers, and what it says that it does not."""

import dataclasses
import itertools
import operator
from collections import Counter

import pytest

from geojax.config.layout import Layout
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings
from geojax.pipeline.registry import SCHEDULES
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.predict import predict
from geojax.planner.resolve.run_layout import run_settings
from geojax.planner.search.dimensions import DIMENSIONS, not_searched
from geojax.planner.search.fit import fitting, least_room
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.search import search
from geojax.planner.search.space import shapes
from geojax.planner.search.variations import most_in_flight, variations
from geojax.settings import leaves_by_key
from geojax.topology import Topology

MODEL = ModelConfig.load("mixtral-8x7b").replace(num_hidden_layers=8)
OPEN = PlanRequest(
    MODEL,
    Topology.load("two-h100-sites-2x8"),
    global_batch_size=32,
    sequence_length=16384,
    joins=("one_program", "islands"),
    precisions=("bf16", "fp8-current"),
    compressions=("none", "bf16", "int8"),
)
NEW_RUN = {
    "run_directory": "runs/none",
    "steps": 1,
    "topology": "two-h100-sites-2x8",
    "model": {"preset": "mixtral-8x7b", "num_hidden_layers": 8},
    "data": {"sources": [{"name": "python", "builtin": "python-stdlib"}]},
}
WAYS = {
    "replicas": LayoutCandidate.made(
        sequence_length=16384, microbatches=2, mesh={"dc": 2, "data": 8}, zero={"stage": 3}
    ),
    "long sequences": LayoutCandidate.made(
        sequence_length=16384, microbatches=8, mesh={"dc": 2, "data": 2, "context": 4}
    ),
    "islands": LayoutCandidate.made(
        sequence_length=16384, microbatches=2, mesh={"dc": 2, "data": 8}, dc={"join": "islands"}
    ),
    "stages": LayoutCandidate.made(
        sequence_length=16384,
        microbatches=8,
        mesh={"dc": 2, "stage": 2, "data": 4},
        dc={"role": "stage"},
    ),
    "stages of islands": LayoutCandidate.made(
        sequence_length=16384,
        microbatches=4,
        mesh={"dc": 2, "stage": 1, "data": 8},
        dc={"role": "stage", "join": "islands"},
    ),
}


NOT_CHOSEN = {
    "batch.global_batch_size",
    "batch.sequence_length",
    "batch.ramp",
    "dc.timeline_step",
}
"""Settings of a layout that are given, or choose nothing about it."""


def varied(layout, request=OPEN):
    return list(variations(request, layout, lambda _: True))


@pytest.fixture(scope="module")
def tried():
    """Layouts of a request that leaves everything open, a few of each kind."""
    found = list(itertools.islice(shapes(OPEN, Counter()), 0, None, 23))
    roomy = dataclasses.replace(OPEN, memory_bytes=1e12)
    fit = [each.layout for shape in found[::9] for each in fitting(roomy, shape, Counter())]
    tight = dataclasses.replace(OPEN, memory_bytes=9e10)
    fit += [each.layout for shape in found[::9] for each in fitting(tight, shape, Counter())]
    return [*found, *fit, *(other for layout in WAYS.values() for other in varied(layout))]


def test_every_field_of_a_layout_belongs_to_one_dimension():
    fields = Counter(field for dimension in DIMENSIONS for field in dimension.fields)
    whole = Layout(batch={"global_batch_size": 1, "sequence_length": 1}).model_dump()
    of_layout = {name for name, _ in leaves_by_key(whole)} | {"site_shares"}
    assert set(fields) == of_layout - NOT_CHOSEN
    assert set(fields.values()) == {1}


def test_every_dimension_is_searched_or_left_out_with_a_reason(tried):
    # When they are timed:
    buckets = ("bucket_bytes", "overlap_grad_reduce", "overlap_scatter")
    settled = {"pipeline.layers", *(f"communication.{name}" for name in buckets)}
    for dimension in DIMENSIONS:
        for field in dimension.fields:
            of = operator.attrgetter(field)
            values = {of(layout) for layout in tried}
            searched = len(values) > 1 or field in settled
            if field == "parallelism.sequence":
                searched = len({of(each) for each in tried if each.mesh.tensor > 1}) > 1
            left_out = dimension.left_out(OPEN) is not None
            assert searched != left_out, (dimension.name, field, values)


def test_every_schedule_is_tried_in_one_program_and_as_islands(tried):
    for join in ("one_program", "islands"):
        of_join = [each.pipeline.schedule for each in tried if each.dc.join == join]
        assert set(of_join) == set(SCHEDULES)


@pytest.mark.parametrize("way", WAYS)
def test_a_varied_layout_is_a_run(way):
    others = varied(WAYS[way])
    assert others
    for layout in others:
        RunConfig.model_validate(NEW_RUN | run_settings(layout))


def test_a_schedule_that_bends_holds_as_many_microbatches_as_fit():
    layout = WAYS["stages"].changed(pipeline={"schedule": "latency_hiding"}, remat="full")
    one, two = (
        least_room(OPEN, layout.changed(pipeline={"memory_limit": limit})).memory.bytes
        for limit in (1, 2)
    )
    request = dataclasses.replace(OPEN, memory_bytes=one + 4.5 * (two - one))

    def fits(other):
        return least_room(request, other).fits

    assert most_in_flight(layout, fits) == 5
    assert most_in_flight(layout, lambda _: True) == 8
    assert most_in_flight(layout, lambda _: False) == 0
    limits = {
        each.pipeline.memory_limit
        for each in variations(request, layout, fits)
        if each.pipeline.schedule == "latency_hiding"
    }
    assert limits <= {4, 5}


def test_the_reasons_depend_on_the_request():
    def left_out(**changes):
        return "; ".join(not_searched(dataclasses.replace(OPEN, **changes)))

    assert "join" not in left_out()
    assert "join (islands alone, of --joins)" in left_out(joins=("islands",))
    assert "compression (none alone, since others change numerics)" in left_out(
        compressions=("none",)
    )
    assert "context (for sequences of more than 8,192 tokens)" in left_out(sequence_length=4096)
    assert "sharding across sites" in left_out(optimizer=OptimizerSettings(name="muon"))
    assert not any(
        each.zero.across_sites
        for each in varied(
            WAYS["replicas"], dataclasses.replace(OPEN, optimizer=OptimizerSettings(name="muon"))
        )
    )


def test_a_bias_of_the_router_refuses_int8():
    biased = MODEL.replace(use_router_bias=True, router_aux_loss_coef=0.0)
    with pytest.raises(UserError, match="none and bf16 would do"):
        dataclasses.replace(OPEN, model=biased)
    dataclasses.replace(OPEN, model=biased, compressions=("none", "bf16"))


def test_a_schedule_of_the_registry_may_win():
    """In a site's memory for few microbatches, over a far link, an order by the times wins."""
    model = ModelConfig.load("llama3-8b").replace(num_hidden_layers=8)
    near = Topology.load("two-h100-sites-2x8")
    far = near.model_copy(
        update={
            "links": tuple(
                link.model_copy(update={"round_trip_seconds": 0.5}) for link in near.links
            )
        }
    )
    request = PlanRequest(
        model,
        far,
        global_batch_size=64,
        sequence_length=8192,
        roles=("stage",),
        joins=("islands",),
        remats=("none",),
    )

    def timer(layout):
        return predict(model, layout, far, calibration=Calibration())

    best = search(request, timer, Calibration(), keep=4).best
    assert best[0].layout.pipeline.schedule in ("latency_hiding", "latency_hiding_split", "geopipe")
    assert any(each.layout.pipeline.schedule.startswith("latency_hiding") for each in best)
