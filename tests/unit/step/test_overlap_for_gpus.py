"""Compiled ahead of time for H100s, gradients cross between sites while a layer goes backwards."""

import tempfile
from pathlib import Path

import pytest
from support.h100 import h100_devices, needs_cuda
from support.plans import step_plan_on

from geojax.hlo.overlap import flights
from geojax.hlo.thunks import read_launches
from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import policy
from geojax.runtime.compilation import without_compilation_cache
from geojax.runtime.xla_flags import gpu_compiler_options
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts
from geojax.topology import Topology

LAYERS, ROWS, SEQUENCE = 8, 2, 4096


def compiled_step(hosts, **options):
    """The step of a Llama 3 8B of a few layers on two sites, its mesh, and its launches."""
    size = {"num_hidden_layers": LAYERS, "vocab_size": 32768}
    model = ModelConfig.load("llama3-8b").model_copy(update=size)
    mesh = make_mesh(
        _topology(hosts), dc=2, data=8 * hosts, devices=h100_devices(sites=2, hosts=hosts)
    )
    plan = step_plan_on(
        mesh, policy("bf16"), remat="selective", overlap_grad_reduce=True, **options
    )
    settings = OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    batch = batch_shape(ROWS * 8 * hosts * plan.layout.batch.microbatches, SEQUENCE)
    step = lower_step(layouts, model, plan, optimizer, schedule, batch)
    with tempfile.TemporaryDirectory() as folder, without_compilation_cache():
        dump = {"xla_dump_to": folder}
        program = step.compile(
            compiler_options=gpu_compiler_options() | (plan.compiler_options or {}) | dump
        )
        return program, mesh, read_launches(Path(folder))


def _topology(hosts):
    topology = Topology.load("two-h100-sites")
    sites = (site.model_copy(update={"hosts": hosts}) for site in topology.sites)
    return topology.model_copy(update={"sites": tuple(sites)})


@needs_cuda
@pytest.mark.parametrize(
    ("hosts", "options"),
    [
        (1, {}),
        (1, {"microbatches": 2, "zero_stage": 2}),
        # Messages so short that a compiler would rather send them when they are awaited.
        (16, {"bucket_layers": 2}),
    ],
)
def test_the_sums_over_sites_are_in_flight_while_layers_go_backwards(hosts, options):
    program, mesh, launches = compiled_step(hosts, **options)
    turns = LAYERS // options.get("bucket_layers", 1)
    over_sites = [
        flight
        for flight in flights(program, mesh)
        if flight.collective.axes == ("dc",) and flight.collective.in_loop
    ]
    for flight in over_sites:
        assert flight.collective.kind == "all-reduce"
        assert flight.collective.executions == turns - 2, "two turns fill the pipeline"
        assert 2 * flight.products > flight.products_around, "most of the layer is computed beside"
    assert over_sites
    if hosts == 1:
        return  # XLA takes a message between GPUs of one host for too short to need another beside
    # The in-site phase of a bucket, on one stream, beside the cross-site phase of that before it.
    in_site = {
        flight.start
        for flight in flights(program, mesh)
        if flight.collective.kind == "reduce-scatter" and flight.collective.in_loop
    }
    together = {launch.instruction: launch.together for launch in launches}
    for flight in over_sites:
        assert together[flight.start] & in_site


@needs_cuda
def test_the_weights_of_the_next_layer_come_while_a_layer_is_computed():
    program, mesh, _ = compiled_step(1, zero_stage=3)
    gathers = [
        flight
        for flight in flights(program, mesh)
        if flight.collective.kind == "all-gather" and flight.collective.in_loop
    ]
    loops = {flight.collective.executions for flight in gathers}
    assert loops == {LAYERS, LAYERS - 2}, "forwards and, but for the turns before, backwards"
    beside = [flight.collective.payload_bytes for flight in gathers if flight.products]
    assert sum(beside) > 0.8 * sum(flight.collective.payload_bytes for flight in gathers)
