"""A step's trace has the bytes of its lowered program over each mesh axis, on every layout."""

import math

import jax
import pytest
from support.drawn_layouts import Draw
from support.plans import step_plan_on
from support.step_traffic import sends_as_counted

from geojax import make_mesh
from geojax.collectives import BFLOAT16, INT8
from geojax.precision import policy

ROWS, SEQUENCE = 48, 32
SITES = {"dc": 2, "data": 4}
LAYOUTS = {
    "zero 0": (SITES, {"zero_stage": 0}),
    "zero 1": (SITES, {"zero_stage": 1}),
    "zero 2": (SITES, {"zero_stage": 2, "microbatches": 2}),
    "zero 3": (SITES, {"zero_stage": 3, "microbatches": 2}),
    "zero 3, weights kept": (SITES, {"zero_stage": 3, "reshard_after_forward": False}),
    "zero 1 across sites": (SITES, {"shard_across_sites": True}),
    "zero 3 across sites": (SITES, {"zero_stage": 3, "shard_across_sites": True}),
    "overlap": (SITES, {"overlap_grad_reduce": True}),
    "overlap, zero 2": (SITES, {"overlap_grad_reduce": True, "zero_stage": 2, "microbatches": 2}),
    "overlap, zero 3": (SITES, {"overlap_grad_reduce": True, "zero_stage": 3}),
    "overlap, two layers together": (
        SITES,
        {"overlap_grad_reduce": True, "bucket_layers": 2, "zero_stage": 2, "microbatches": 2},
    ),
    "tensor": ({"dc": 2, "data": 2, "tensor": 2}, {"microbatches": 2}),
    "tensor, more ranks than key heads": ({"dc": 2, "tensor": 4}, {"remat": "full"}),
    "sequence": ({"dc": 2, "data": 2, "tensor": 2}, {"sequence_parallel": True}),
    "sequence, selective": (
        {"dc": 2, "tensor": 4},
        {"sequence_parallel": True, "remat": "selective", "zero_stage": 3},
    ),
    "ring": ({"dc": 2, "context": 4}, {"context_method": "ring"}),
    "gathered keys": (
        {"dc": 2, "data": 2, "context": 2},
        {"context_method": "all_gather", "zero_stage": 2},
    ),
    "ulysses": (
        {"dc": 2, "data": 2, "context": 2},
        {"context_method": "ulysses", "remat": "full", "microbatches": 2},
    ),
    "context and tensor": (
        {"data": 2, "context": 2, "tensor": 2},
        {"sequence_parallel": True, "zero_stage": 3},
    ),
    "bf16 wire": (SITES, {"wire_format": BFLOAT16}),
    "int8 wire, three sites": ({"dc": 3, "data": 2}, {"wire_format": INT8}),
    "int8 wire, tensor, zero 2": (
        {"dc": 2, "data": 2, "tensor": 2},
        {"wire_format": INT8, "zero_stage": 2},
    ),
    "int8 wire, context, zero 0": (
        {"dc": 2, "data": 2, "context": 2},
        {"context_method": "all_gather", "wire_format": INT8, "zero_stage": 0},
    ),
    "int8 wire, overlap": (
        SITES,
        {"wire_format": INT8, "overlap_grad_reduce": True, "microbatches": 2},
    ),
}

DEEPSEEK_LAYOUTS = {
    "sites": (SITES, {"zero_stage": 1, "microbatches": 2}),
    "tensor": ({"dc": 2, "data": 2, "tensor": 2}, {"remat": "selective"}),
    "tensor, full": ({"dc": 2, "data": 2, "tensor": 2}, {"remat": "full", "zero_stage": 2}),
    "sequence": ({"expert": 2, "data": 2, "tensor": 2}, {"sequence_parallel": True}),
    "sequence, selective": (
        {"dc": 2, "data": 2, "tensor": 2},
        {"sequence_parallel": True, "remat": "selective", "zero_stage": 3},
    ),
    "sequence, full": (
        {"dc": 2, "data": 2, "tensor": 2},
        {"sequence_parallel": True, "remat": "full"},
    ),
    "ring": ({"dc": 2, "context": 2, "tensor": 2}, {"context_method": "ring"}),
    "gathered keys": ({"dc": 2, "context": 2}, {"context_method": "all_gather"}),
    "ulysses": ({"expert": 2, "context": 2}, {"context_method": "ulysses", "remat": "full"}),
}


def check(model, axes, options, precision="fp32"):
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    plan = step_plan_on(mesh, policy(precision), bucket_bytes=4096, **options)
    counted = sends_as_counted(model, plan, ROWS, SEQUENCE)
    over = {each.axes for each in counted.over("dc")}
    assert over <= {("dc",)}, "what crosses sites is summed inside them first"
    return counted


@pytest.mark.parametrize("name", DEEPSEEK_LAYOUTS)
def test_latents_and_first_dense_layers(name):
    axes, options = DEEPSEEK_LAYOUTS[name]
    model = Draw("deepseek", "balanced", 8, 0.0, (), 1, ()).model()
    model = model.replace(num_hidden_layers=4, first_k_dense_replace=2)
    check(model, axes, options, "bf16" if "context" in axes else "fp32")


def test_queries_without_a_latent():
    model = Draw("deepseek", "dense", 8, 0.0, (), 1, ()).model().replace(q_lora_rank=0)
    check(model, {"dc": 2, "tensor": 2}, {"sequence_parallel": True})


def test_a_module_for_later_tokens():
    model = Draw("deepseek", "balanced", 8, 0.0, (), 1, ()).model()
    model = model.replace(num_hidden_layers=1, first_k_dense_replace=0, num_nextn_predict_layers=1)
    check(model, {"expert": 2, "tensor": 2}, {"sequence_parallel": True})


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_dense_model(name):
    axes, options = LAYOUTS[name]
    model = Draw("llama", "dense", 2, 0.0, (), 1, ()).model()
    if "overlap_grad_reduce" in options:  # enough of them for a loop
        model = model.model_copy(update={"num_hidden_layers": 8})
    counted = check(model, axes, options)
    in_loops = {each.kind for each in counted.over("dc") if each.in_loop} if "dc" in axes else set()
    assert bool(in_loops) == ("overlap_grad_reduce" in options)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_a_norm_behind_a_block(sequence_parallel):
    model = Draw("gemma", "dense", 2, 0.0, (), 1, ()).model()
    check(
        model,
        {"dc": 2, "tensor": 2},
        {"remat": "full", "sequence_parallel": sequence_parallel},
    )


@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"dc": 2, "data": 2, "tensor": 2}, {"zero_stage": 2}),
        ({"dc": 2, "expert": 2, "tensor": 2}, {"sequence_parallel": True, "zero_stage": 3}),
    ],
)
def test_sinks_and_biases_of_experts(axes, options):
    check(Draw("gpt-oss", "biased", 2, 0.0, (), 1, ()).model(), axes, options)
