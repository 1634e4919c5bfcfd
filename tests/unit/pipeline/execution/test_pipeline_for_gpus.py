"""Compiled ahead of time for H100s: what crosses the cut travels while the tick is computed."""

import itertools
import time

import pytest
from support.h100 import h100_devices, needs_cuda
from support.plans import step_plan_on

from geojax.hlo import collective_traffic
from geojax.hlo.module import parse_module, shape_bytes
from geojax.hlo.overlap import flights
from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import policy
from geojax.runtime.xla_flags import gpu_compiler_options
from geojax.step.program import batch_shape, lower_step
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import state_layouts
from geojax.topology import Topology

SEQUENCE = 4096
FORMS = {"branch_free": True, "1f1b": False}
LAYOUTS = {"data": {"data": 4}, "tensor": {"tensor": 4}}


def compiled_step(model, schedule, *, hosts, stages_per_site, microbatches, **axes):
    """The step of a model through two sites, between which a message has two ticks."""
    topology = Topology.load("two-h100-sites")
    sites = tuple(site.model_copy(update={"hosts": hosts}) for site in topology.sites)
    topology = topology.model_copy(update={"sites": sites})
    devices = h100_devices(sites=2, hosts=hosts)
    mesh = make_mesh(topology, dc=2, stage=stages_per_site, devices=devices, **axes)
    placement = Placement.linear(2 * stages_per_site)
    hops = [1] * (placement.chunks - 1)
    hops[stages_per_site - 1] = 2
    table = tick_table(schedule, placement, microbatches, hops)
    plan = step_plan_on(
        mesh,
        policy("bf16"),
        microbatches,
        remat="selective",
        sequence_parallel="tensor" in axes,
        dc_role="stage",
        staged_layers=StagedLayers(
            placement, (model.num_hidden_layers // placement.chunks,) * placement.chunks
        ),
        tick_program=TickProgram.of(table, branch_free=FORMS[schedule]),
    )
    settings = OptimizerSettings()
    optimizer, rates = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    batch = batch_shape(microbatches * axes.get("data", 1), SEQUENCE)
    step = lower_step(layouts, model, plan, optimizer, rates, batch)
    return step.compile(compiler_options=gpu_compiler_options()), plan


def over_the_cut(program, mesh):
    """The flights of the messages between sites; every such message is one."""
    permutes = [
        collective
        for collective in collective_traffic(program, mesh).collectives
        if collective.kind == "collective-permute" and "dc" in collective.axes
    ]
    found = [flight for flight in flights(program, mesh) if flight.collective in permutes]
    assert len(found) == len(permutes) > 0, "all are asynchronous"
    return found


def copied_in_ticks(program):
    """The bytes of each copy in the bodies of the loops over ticks: those that send messages."""
    module = parse_module(program.as_text())
    bodies = [
        computation
        for computation in module.computations.values()
        if any(each.opcode == "collective-permute-start" for each in computation)
    ]
    assert bodies
    copies = (each for each in itertools.chain(*bodies) if each.opcode in ("copy", "copy-start"))
    return [shape_bytes(each.shape) for each in copies]


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("schedule", FORMS)
def test_messages_cross_the_cut_while_the_tick_is_computed(schedule, layout):
    size = {"num_hidden_layers": 8, "vocab_size": 32768}
    model = ModelConfig.load("llama3-8b").model_copy(update=size)
    program, plan = compiled_step(
        model, schedule, hosts=1, stages_per_site=2, microbatches=8, **LAYOUTS[layout]
    )
    found = over_the_cut(program, plan.mesh)
    for flight in found:
        assert flight.products == flight.products_around, "beside all that the tick computes"
    ticks = [flight.collective.executions for flight in found]
    table = plan.tick_program.ticks
    fill = sum(table.hop_ticks)
    # One loop; or one of forwards, one of both, one of backwards.
    assert sorted(ticks) == (sorted([fill, 8, 8, fill]) if FORMS[schedule] else [table.ticks] * 2)
    message = found[0].collective.payload_bytes
    assert max(copied_in_ticks(program)) <= message, "neither rings nor sums are copied"


@needs_cuda
@pytest.mark.slow
@pytest.mark.parametrize("schedule", FORMS)
def test_the_step_of_a_large_model_compiles_for_3072_devices(schedule):
    began = time.process_time()
    program, plan = compiled_step(
        ModelConfig.load("llama3-70b"),
        schedule,
        hosts=192,
        stages_per_site=8,
        microbatches=32,
        data=24,
        tensor=8,
    )
    assert time.process_time() - began < 120, "seconds of a core, to trace and compile"
    assert plan.mesh.size == 3072
    for flight in over_the_cut(program, plan.mesh):
        assert flight.products == flight.products_around
    memory = program.memory_analysis()
    assert memory.argument_size_in_bytes + memory.temp_size_in_bytes < 80e9, "it fits an H100"
