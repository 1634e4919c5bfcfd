"""Compiled ahead of time for H100s: messages of a stage's chunks beside the passes of others.

A chunk's gradients cross while other chunks go backwards, and its weights come while others go
forwards.
"""

import pytest
from support.h100 import h100_devices, needs_cuda
from support.plans import step_plan_on

from geojax.collectives import BFLOAT16
from geojax.hlo.overlap import flights
from geojax.hlo.thunks import read_launches
from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import policy
from geojax.runtime.xla_flags import recommended_flags
from geojax.step.program import batch_shape, lower_step
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import state_layouts
from geojax.topology import Topology

STAGES, CHUNKS, MICROBATCHES, SEQUENCE = 2, 3, 4, 4096

DATA = 8
"""Ranks of `data`, of so many that XLA takes a sum in the site for longer than one over `dc`."""


@needs_cuda
@pytest.mark.parametrize("in_site", [False, True], ids=["weights", "sums in the site"])
def test_the_parts_are_in_flight_beside_ticks(in_site, tmp_path):
    model = ModelConfig.load("llama3-8b").model_copy(
        update={"num_hidden_layers": STAGES * CHUNKS, "vocab_size": 65536}
    )
    topology = Topology.load("two-h100-sites")
    sites = tuple(site.model_copy(update={"hosts": 4}) for site in topology.sites)
    topology = topology.model_copy(update={"sites": sites})
    devices = h100_devices(sites=2, hosts=4)
    mesh = make_mesh(topology, dc=2, stage=STAGES, data=DATA, tensor=2, devices=devices)
    placement = Placement.interleaved([STAGES], CHUNKS)
    table = tick_table("interleaved", placement, MICROBATCHES, [1] * (placement.chunks - 1))
    plan = step_plan_on(
        mesh,
        policy("bf16"),
        MICROBATCHES,
        remat="selective",
        sequence_parallel=True,
        wire_format=BFLOAT16,
        overlap_grad_reduce=True,
        overlap_scatter=in_site,
        overlap_param_gather=not in_site,
        staged_layers=StagedLayers(placement, (1,) * placement.chunks),
        tick_program=TickProgram.of(table, branch_free=False),
    )
    settings = OptimizerSettings()
    optimizer, rates = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    batch = batch_shape(2 * MICROBATCHES * DATA, SEQUENCE)
    options = {
        name.removeprefix("--"): value == "true" if value in ("true", "false") else int(value)
        for name, value in recommended_flags("gpu").items()
    }
    options |= (plan.compiler_options or {}) | {"xla_dump_to": str(tmp_path)}
    step = lower_step(layouts, model, plan, optimizer, rates, batch)
    program = step.compile(compiler_options=options)

    def beside_products(axis):
        found = (each for each in flights(program, mesh) if each.collective.axes == (axis,))
        return [each for each in found if each.products]

    early, scattered = beside_products("dc"), beside_products("data")
    # The head, and every chunk but the first; the last of them crosses behind the ticks.
    assert len(early) == CHUNKS - in_site
    kinds = [each.collective.kind for each in scattered if not each.collective.in_loop]
    assert kinds.count("reduce-scatter") >= (CHUNKS - 1) * in_site
    assert in_site or not kinds
    gathers = [
        each
        for each in scattered
        if each.collective.kind == "all-gather" and each.collective.in_loop
    ]
    assert len(gathers) == (not in_site)  # one message, in the loop over chunks
    assert {flight.collective.kind for flight in early} == {"all-gather"}
    assert min(flight.collective.payload_bytes for flight in early) > 2**23
    launches = read_launches(tmp_path)
    starts = {flight.start for flight in early}
    late = {flight.start for flight in gathers}
    link, site = (
        {launch.stream for launch in launches if launch.instruction in own}
        for own in (starts, late)
    )
    assert (len(link), len(site)) == (1, not in_site)
    assert None not in link | site
    # Inside a loop nothing waits on the stream of the message that is under way beside it.
    looped = {flight.start for flight in flights(program, mesh) if flight.collective.in_loop}
    others = {launch.stream for launch in launches if launch.instruction in looped - late}
    assert others
    assert not (link | site) & others
