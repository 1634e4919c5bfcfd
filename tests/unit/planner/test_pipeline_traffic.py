"""What a step with pipeline stages sends over each mesh axis is byte for byte the formula.

Read from the program as it is written, and for some from the compiled one.
"""

import itertools
import math

import jax
import pytest
from support.drawn_layouts import Draw
from support.plans import step_plan_on
from support.step_traffic import lowered_step, sent_bytes

from geojax import make_mesh
from geojax.collectives import INT8
from geojax.hlo import collective_traffic
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.planner.traffic import predicted_step_bytes
from geojax.precision import policy
from geojax.step.program import batch_shape
from geojax.step.stage_layers import StagedLayers

ROWS, SEQUENCE, MICROBATCHES = 16, 32, 4
THROUGH_SITES = {"dc": 2, "stage": 2}
IN_EACH = {"dc": 2, "stage": 2}
OVERLAP = {"overlap_grad_reduce": True}
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


@pytest.mark.parametrize("name", CASES)
def test_bytes_over_each_axis_are_those_of_the_formula(name):
    schedule, axes, options = CASES[name]
    through_sites = options.get("dc_role") == "stage"
    sites = [axes["stage"]] * (axes["dc"] if through_sites else 1)
    placement = Placement.interleaved(sites, 2 if schedule == "interleaved" else 1)
    if schedule == "zbv":
        placement = Placement.vee(axes["stage"])
    table = tick_table(schedule, placement, MICROBATCHES, hops_of(placement, axes["stage"]))
    plan = step_plan_on(
        make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes),
        policy("fp32"),
        MICROBATCHES,
        bucket_bytes=4096,
        staged_layers=StagedLayers(placement, (2,) * placement.chunks),
        tick_program=TickProgram.of(table, branch_free=schedule == "branch_free"),
        **options,
    )
    mixture = "capacity" if "expert" in axes else "dense"
    model = Draw("llama", mixture, 2, 0.0, (), 1, ()).model()
    if name.startswith("dense layers first"):
        model = Draw("deepseek", "balanced", 8, 0.0, (), 1, ()).model()
        model = model.replace(first_k_dense_replace=2, num_hidden_layers=4)
    model = model.with_stacked_layers(2 * placement.chunks)
    step, expected = lowered_step(model, plan, ROWS, SEQUENCE)
    predicted = predicted_step_bytes(model, plan, batch_shape(ROWS, SEQUENCE))
    for program in (step, step.compile()) if name in COMPILED else (step,):
        assert sent_bytes(program, plan.mesh) == expected
        traffic = collective_traffic(program, plan.mesh)
        assert traffic.total_bytes_over("dc") == predicted.total_bytes_over("dc")
        between_sites = {each.kind for each in traffic.over("dc") if each.in_loop}
        assert between_sites == ({"collective-permute"} if through_sites else set())
