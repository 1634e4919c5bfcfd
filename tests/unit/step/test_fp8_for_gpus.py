"""Compiled ahead of time for H100s, linear layers are FP8 products, by whichever backend."""

import collections

import pytest
from support.engine import for_hopper, needs_transformer_engine
from support.h100 import h100_devices, needs_cuda
from support.plans import step_plan_on

from geojax.hlo.module import parse_module
from geojax.hlo.trip_count import trip_count
from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.fp8_products import require_fp8_products
from geojax.precision import policy
from geojax.runtime.xla_flags import gpu_compiler_options
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts
from geojax.topology import Topology

LAYERS = 4
LINEAR = 7
"""Linear layers in a layer: query, key, value, output, gate, up, down."""
PRODUCTS = 3
"""Of each: forwards, and two gradients."""


def lowered_step(name, axes, backend="xla", **options):
    """The step of one model for two sites of H100s; the plan, and the model."""
    size = {"num_hidden_layers": LAYERS, "vocab_size": 32768}
    model = ModelConfig.load("llama3-8b").model_copy(update=size)
    topology = Topology.load("two-h100-sites")
    sites = tuple(site.model_copy(update={"hosts": 1}) for site in topology.sites)
    topology = topology.model_copy(update={"sites": sites})
    mesh = make_mesh(topology, dc=2, devices=h100_devices(sites=2, hosts=1), **axes)
    plan = step_plan_on(mesh, policy(name), fp8_backend=backend, **options)
    settings = OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    batch = batch_shape(2 * axes["data"] * plan.layout.batch.microbatches, 4096)
    step = lower_step(layouts, model, plan, optimizer, schedule, batch)
    return step, plan, model


def compiled_step(*args, **options):
    step, plan, model = lowered_step(*args, **options)
    program = step.compile(compiler_options=gpu_compiler_options() | plan.compiler_options)
    if plan.fp8_backend == "xla":
        require_fp8_products([program], model, plan)
    return program


def calls(program):
    """How often each custom call runs in a step, by its target."""
    module = parse_module(program.as_text())
    counts = collections.Counter()

    def walk(computation, times):
        for each in computation:
            if each.opcode == "custom-call":
                counts[each.attributes["custom_call_target"].strip('"')] += times
            for name in each.calls:
                turns = times
                if each.opcode == "while":
                    turns *= trip_count(module, computation, each)
                walk(module.computations[name], turns)

    walk(module.computations[module.entry], 1)
    return counts


RUNS = [
    ("fp8-delayed", {"data": 8}, {"zero_stage": 3, "remat": "selective"}),
    ("fp8-current", {"data": 4, "tensor": 2}, {"sequence_parallel": True, "microbatches": 2}),
]


def products_wanted(name, options):
    """Matrix products of linear layers that follow the recipe, in a step."""
    inner = LAYERS - 2 * policy(name).recipe.num_bf16_layers_per_end
    return options.get("microbatches", 1) * inner * LINEAR * PRODUCTS


@needs_cuda
@pytest.mark.parametrize(("name", "axes", "options"), RUNS)
def test_every_linear_layer_but_those_at_the_ends_multiplies_in_fp8(name, axes, options):
    made = calls(compiled_step(name, axes, **options))
    assert made["__cublas$lt$matmul$f8"] == products_wanted(name, options), made


@needs_cuda
@needs_transformer_engine
@pytest.mark.parametrize(("name", "axes", "options"), RUNS)
def test_the_products_of_transformer_engine_are_made_once_each(monkeypatch, name, axes, options):
    for_hopper(monkeypatch)
    made = calls(compiled_step(name, axes, "transformer_engine", **options))
    wanted = products_wanted(name, options)
    assert made["te_gemm_v2_ffi"] == wanted, made
    # x forwards, x and dy backwards; weights came rounded.
    assert made["te_dbias_quantize_ffi"] == wanted // PRODUCTS * 3, made
    assert not made["__cublas$lt$matmul$f8"], made


@needs_cuda
@needs_transformer_engine
@pytest.mark.parametrize(
    ("remat", "again"),
    [
        ("none", 0),
        ("selective", 0),
        # All but the last one, whose result no gradient needs.
        ("full", LINEAR - 1),
    ],
)
def test_rematerialisation_keeps_the_products_of_transformer_engine(monkeypatch, remat, again):
    for_hopper(monkeypatch)
    step, *_ = lowered_step("fp8-delayed", {"data": 8}, "transformer_engine", remat=remat)
    # All layers are one loop forwards and one backwards.
    made = step.as_text().count("stablehlo.custom_call @te_gemm_v2_ffi(")
    assert made == LINEAR * PRODUCTS + again
