"""Compiled ahead of time for H100s, linear layers are FP8 products of cuBLASLt."""

import collections

import pytest
from support.h100 import h100_devices, needs_cuda

from geojax.collectives.hlo import parse_module
from geojax.collectives.trip_count import trip_count
from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import policy
from geojax.runtime.xla_flags import recommended_flags
from geojax.topology import Topology
from geojax.train.fp8_products import require_fp8_products
from geojax.train.plan import StepPlan
from geojax.train.state import state_layouts
from geojax.train.step import batch_shape, lower_step

LAYERS = 4
LINEAR = 7
"""Linear layers in a layer: query, key, value, output, gate, up, down."""
PRODUCTS = 3
"""Of each: forwards, and two gradients."""


def compiled_step(name, axes, **options):
    size = {"layers": LAYERS, "vocabulary": 32768}
    model = ModelConfig.load("llama3-8b").model_copy(update=size)
    topology = Topology.load("two-h100-sites")
    sites = tuple(site.model_copy(update={"hosts": 1}) for site in topology.sites)
    topology = topology.model_copy(update={"sites": sites})
    mesh = make_mesh(topology, dc=2, devices=h100_devices(sites=2, hosts=1), **axes)
    plan = StepPlan(mesh, policy(name), products_backend="xla", **options)
    settings = OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    batch = batch_shape(2 * axes["data"] * plan.accumulation, 4096)
    flags = {
        flag.removeprefix("--"): value == "true" if value in ("true", "false") else int(value)
        for flag, value in recommended_flags("gpu").items()
    }
    step = lower_step(layouts, model, plan, optimizer, schedule, batch)
    program = step.compile(compiler_options=flags | plan.compiler_options)
    require_fp8_products(program, model, plan)
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


@needs_cuda
@pytest.mark.parametrize(
    ("name", "axes", "options"),
    [
        ("fp8-delayed", {"data": 8}, {"zero_stage": 3, "remat": "selective"}),
        ("fp8-current", {"data": 4, "tensor": 2}, {"sequence_parallel": True, "accumulation": 2}),
    ],
)
def test_every_linear_layer_but_those_at_the_ends_multiplies_in_fp8(name, axes, options):
    program = compiled_step(name, axes, **options)
    made = calls(program)
    microbatches = options.get("accumulation", 1)
    inner = LAYERS - 2 * policy(name).recipe.plain_ends
    assert made["__cublas$lt$matmul$f8"] == microbatches * inner * LINEAR * PRODUCTS, made
