"""Under FP8 recipes the trace of a step has the bytes of its program: numbers of one byte too."""

import dataclasses
import functools
import math

import jax
import pytest
from support.plans import step_plan_on
from support.small_models import SEQUENCE
from support.step_traffic import sends_as_counted

from geojax import make_mesh
from geojax.models import ModelConfig
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.planner.traffic.weights import predicted_weight_bytes
from geojax.precision import RECIPES, policy
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import parameter_layouts

ROWS, LAYERS = 16, 4
SIZES = {
    "num_hidden_layers": LAYERS,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 61,
}
MIXTURE = {"num_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}
LONG_BLOCKS = {"hidden_size": 256, "intermediate_size": 512}


@functools.cache
def pipeline(schedule):
    placement = Placement.linear(2)
    table = tick_table(schedule, placement, 4, [1])
    return {
        "dc_role": "stage",
        "staged_layers": StagedLayers(placement, (2, 2)),
        "tick_program": TickProgram.of(table, branch_free=schedule == "branch_free"),
        "microbatches": 4,
    }


CASES = {
    # recipe, axes, options, sizes of the model
    "delayed, zero 1": ("delayed", {"dc": 2, "data": 4}, {"microbatches": 2}, {}),
    "delayed, zero 3": (
        "delayed",
        {"dc": 2, "data": 2, "tensor": 2},
        {"zero_stage": 3, "remat": "full", "share_amax_across_dc": True},
        {},
    ),
    "delayed, pipeline": ("delayed", {"dc": 2, "data": 2, "tensor": 2}, pipeline, {}),
    "delayed, experts": (
        "delayed",
        {"data": 2, "expert": 2, "tensor": 2},
        {"zero_stage": 3},
        MIXTURE,
    ),
    "current, zero 2": (
        "current",
        {"dc": 2, "data": 2, "tensor": 2},
        {"zero_stage": 2, "overlap_grad_reduce": True, "microbatches": 2, "remat": "selective"},
        {"num_key_value_heads": 1},
    ),
    "current, zero 3, across sites": (
        "current",
        {"dc": 2, "data": 4},
        {"zero_stage": 3, "shard_across_sites": True, "microbatches": 2},
        {},
    ),
    "current, zero 3, weights kept": (
        "current",
        {"data": 2, "context": 2, "tensor": 2},
        {"zero_stage": 3, "reshard_after_forward": False, "sequence_parallel": True},
        {},
    ),
    "current, whole": (
        "current",
        {"context": 2, "tensor": 2},
        {"zero_stage": 0, "remat": "full"},
        MIXTURE,
    ),
    "current, pipeline": ("current", {"dc": 2, "data": 2, "tensor": 2}, pipeline, {}),
    "block": ("block", {"data": 2, "tensor": 2}, {"zero_stage": 3}, LONG_BLOCKS),
    "mxfp8": ("mxfp8", {"data": 2}, {"zero_stage": 3}, {}),
}


@pytest.mark.parametrize("name", CASES)
def test_bytes_over_each_axis_are_those_of_the_program(name):
    recipe, axes, options, sizes = CASES[name]
    if options is pipeline:
        options = pipeline("branch_free" if recipe == "current" else "zero_bubble_h1")
    model = ModelConfig(
        **SIZES | sizes, max_position_embeddings=64, norm="rmsnorm", hidden_act="silu"
    )
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    own = dataclasses.replace(policy("fp32"), recipe=RECIPES[recipe])
    plan = step_plan_on(mesh, own, **options)
    counted = sends_as_counted(model, plan, ROWS, SEQUENCE)
    of_weights = predicted_weight_bytes(model, parameter_layouts(model, plan), plan)
    for axes in {axes for axes in of_weights if "data" in axes}:
        gathers = [each for each in counted.collectives if each.kind == "all-gather"]
        sent = sum(each.bytes_sent for each in gathers if each.axes == axes)
        assert sent == of_weights[axes], "of kernels a byte a number, and their scales"
