"""The trace of a step with pipeline stages has the bytes of its program over each mesh axis.

Those of the lowered program, and for some of the compiled one.
"""

import itertools
import math
from fractions import Fraction

import jax
import pytest
from support.drawn_layouts import Draw
from support.plans import step_plan_on
from support.step_traffic import sends_as_counted, traced_step

from geojax import make_mesh
from geojax.collectives import INT8
from geojax.hlo import collective_traffic
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.planner.step_traffic import by_ticks, stage_bytes
from geojax.precision import policy
from geojax.step.stage_layers import StagedLayers

ROWS, SEQUENCE, MICROBATCHES = 16, 32, 4
THROUGH_SITES = {"dc": 2, "stage": 2}
IN_EACH = {"dc": 2, "stage": 2}
OVERLAP = {"overlap_grad_reduce": True}
HOP = "collective-permute"
COMPILED = ("through sites, tensor", "in each site, data")
CASES = {
    "through sites": ("branch_free", THROUGH_SITES, {"dc_role": "stage"}),
    "a stage a site": ("branch_free", {"dc": 4, "stage": 1}, {"dc_role": "stage"}),
    "through sites, data": ("1f1b", THROUGH_SITES | {"data": 2}, {"dc_role": "stage"}),
    "through sites, tensor": ("branch_free", THROUGH_SITES | {"tensor": 2}, {"dc_role": "stage"}),
    "branches, tensor": (
        "1f1b",
        THROUGH_SITES | {"tensor": 2},
        {"dc_role": "stage", "sequence_parallel": True, "remat": "full"},
    ),
    "interleaved, context": (
        "interleaved",
        THROUGH_SITES | {"context": 2},
        {"dc_role": "stage", "context_method": "all_gather"},
    ),
    "in each site, data": ("1f1b", {"dc": 2, "stage": 2, "data": 2}, {"zero_stage": 1}),
    "in each site, tensor": ("branch_free", {"dc": 2, "stage": 2, "tensor": 2}, {}),
    "early": ("interleaved", IN_EACH | {"data": 2}, OVERLAP),
    "early, int8": ("interleaved", IN_EACH | {"data": 2}, OVERLAP | {"wire_format": INT8}),
    "early, tensor": ("zbv", IN_EACH | {"tensor": 2}, OVERLAP | {"sequence_parallel": True}),
    "split backward": ("zbv", {"stage": 2, "tensor": 2}, {"sequence_parallel": True}),
    "split backward, remat": (
        "zero_bubble_h1",
        {"stage": 2, "tensor": 2},
        {"sequence_parallel": True, "remat": "full"},
    ),
    "shared head": ("interleaved", IN_EACH | {"tensor": 2}, OVERLAP | {"head": "positions"}),
    "shared head, through sites": (
        "branch_free",
        THROUGH_SITES | {"tensor": 2},
        {"dc_role": "stage", "sequence_parallel": True, "head": "positions"},
    ),
    "shared vocabulary": (
        "interleaved",
        IN_EACH | {"tensor": 2},
        OVERLAP | {"head": "vocabulary", "sequence_parallel": True},
    ),
    "dense layers first, tensor": ("1f1b", THROUGH_SITES | {"tensor": 2}, {"dc_role": "stage"}),
    "dense layers first, sequence": (
        "zero_bubble_h1",
        {"stage": 2, "context": 2, "tensor": 2},
        {"sequence_parallel": True, "remat": "full", "context_method": "all_gather"},
    ),
    "split backward, experts": (
        "zero_bubble_h2",
        {"stage": 2, "expert": 2, "tensor": 2},
        {"sequence_parallel": True, "remat": "full"},
    ),
}


def hops_of(placement, stages_per_site):
    """Two ticks between sites, one inside."""
    return [
        1 if before // stages_per_site == behind // stages_per_site else 2
        for before, behind in itertools.pairwise(placement.stage_of)
    ]


def plan_of(schedule, axes, options):
    """Two layers to each chunk."""
    options = dict(options)
    head = options.get("head")
    shares = axes["stage"] if head else 1
    joint = options.pop("joint", False)
    through_sites = options.get("dc_role") == "stage"
    sites = [axes["stage"]] * (axes["dc"] if through_sites else 1)
    placement = Placement.interleaved(sites, 2 if schedule == "interleaved" else 1)
    if schedule == "zbv":
        placement = Placement.vee(axes["stage"])
    table = tick_table(schedule, placement, MICROBATCHES, hops_of(placement, axes["stage"]))
    return step_plan_on(
        make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes),
        policy("fp32"),
        MICROBATCHES,
        bucket_bytes=4096,
        staged_layers=StagedLayers(
            placement, (2,) * placement.chunks, shares, head == "vocabulary"
        ),
        tick_program=TickProgram.of(
            table,
            branch_free=schedule == "branch_free",
            joint=joint,
            shares_head=shares > 1,
            shares_embedding=head == "vocabulary",
        ),
        **options,
    )


@pytest.mark.parametrize("name", CASES)
def test_bytes_over_each_axis_are_those_of_the_program(name):
    schedule, axes, options = CASES[name]
    plan = plan_of(schedule, axes, options)
    mixture = "capacity" if "expert" in axes else "dense"
    model = Draw("llama", mixture, 2, 0.0, (), 1, ()).model()
    if name.startswith("dense layers first"):
        model = Draw("deepseek", "balanced", 8, 0.0, (), 1, ()).model()
        model = model.replace(first_k_dense_replace=2, num_hidden_layers=4)
    model = model.with_stacked_layers(plan.staged_layers.layers)
    counted = sends_as_counted(model, plan, ROWS, SEQUENCE, compiled=name in COMPILED)
    if "dc" in axes:
        between_sites = {each.kind for each in counted.over("dc") if each.in_loop}
        through_sites = options.get("dc_role") == "stage"
        assert between_sites == ({"collective-permute"} if through_sites else set())


@pytest.mark.parametrize(
    ("schedule", "options"),
    [
        ("1f1b", {}),
        ("interleaved", {}),
        ("zero_bubble_h1", {}),
        ("interleaved", {"head": "positions"}),
        ("interleaved", {"joint": True}),
        ("interleaved", {"joint": True, "head": "positions"}),
    ],
)
def test_by_their_ticks_all_stages_send_what_one_stage_would(schedule, options):
    model = Draw("llama", "dense", 2, 0.0, (), 1, ()).model()
    plan = plan_of(schedule, {"stage": 2, "tensor": 2}, options)
    model = model.with_stacked_layers(plan.staged_layers.layers)
    _, counted = traced_step(model, plan, ROWS, SEQUENCE)
    stages = stage_bytes(counted, plan)
    assert all(sent["tensor",] < counted.by_axes["tensor",] for sent in stages)
    if "head" in options:  # scattered and gathered once a microbatch, by halves
        over_stages = [each for each in counted.collectives if each.axes == ("stage",)]
        others = (each for each in over_stages if each.kind == HOP or not each.in_loop)
        stream = ROWS * SEQUENCE * model.hidden_size * 4
        assert {sent["stage",] for sent in stages} == {
            stream + sum(each.bytes_sent for each in others)
        }
    whole = step_plan_on(
        make_mesh(devices=jax.devices()[:2], tensor=2), policy("fp32"), MICROBATCHES
    )
    _, alone = traced_step(model, whole, ROWS, SEQUENCE)
    of_one, of_stages = (
        sum(each["tensor",] for each in sent) for sent in ([alone.by_axes], stages)
    )
    assert of_stages == pytest.approx(float(of_one), rel=1e-3), "a few sums of metrics apart"


@pytest.mark.parametrize("joint", [False, True])
def test_stages_that_share_the_vocabulary_sum_two_streams_and_their_cotangents(joint):
    model = Draw("llama", "dense", 2, 0.0, (), 1, ()).model()
    options = {"joint": joint, "head": "vocabulary"}
    plan = plan_of("interleaved", {"stage": 2, "tensor": 2}, options)
    model = model.with_stacked_layers(plan.staged_layers.layers)
    _, counted = traced_step(model, plan, ROWS, SEQUENCE)
    over_stages = [each for each in counted.collectives if each.axes == ("stage",)]
    others = [each for each in over_stages if not {"embedding", "head"} & set(each.name.split("/"))]
    tokens = ROWS * SEQUENCE
    streams = 4 * tokens * model.hidden_size * 4
    of_softmax = 3 * tokens * 4
    for sent in stage_bytes(counted, plan):
        assert sent["stage",] == streams + sum(each.bytes_sent for each in others)
        of_all = sent["stage", "tensor"]
        assert of_softmax * 3 / 2 <= of_all < of_softmax * 3 / 2 + 1024, "and a few metrics"


def test_a_compiled_program_tells_by_its_scopes_how_often_branches_run():
    model = Draw("llama", "dense", 2, 0.0, (), 1, ()).model()
    plan = plan_of("1f1b", {"stage": 2, "tensor": 2}, {"head": "vocabulary"})
    model = model.with_stacked_layers(plan.staged_layers.layers)
    step, counted = traced_step(model, plan, ROWS, SEQUENCE)
    sent = stage_bytes(counted, plan)
    compiled = collective_traffic(step.lower().compile(), plan.mesh, longest_loop=2)
    for traffic in (counted, compiled):
        for axes, whole in by_ticks(traffic, plan).by_axes.items():
            mean = sum((each.get(axes, 0) for each in sent), Fraction(0)) / len(sent)
            assert whole == pytest.approx(float(mean), rel=0.01), axes
