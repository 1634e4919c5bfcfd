"""Compiled ahead of time for H100s, gradients over `tensor` travel beside weights' gradients."""

import pytest
from support.h100 import h100_devices, needs_cuda
from support.plans import step_plan_on

from geojax.hlo.overlap import flights
from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.collectives import layer_collectives
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layer import LayerTimes, Piece
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.networks import SiteNetworks
from geojax.precision import policy
from geojax.runtime.compilation import without_compilation_cache
from geojax.runtime.xla_flags import gpu_compiler_options
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts
from geojax.topology import Topology

LAYERS, TENSOR, SEQUENCE = 4, 8, 4096
MODEL = ModelConfig.load("llama3-70b").replace(num_hidden_layers=LAYERS, vocab_size=4096)


def compiled_flights(plan):
    """What travels over `tensor` in the compiled step, of whole activations."""
    settings = OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts, batch = state_layouts(MODEL, optimizer, plan), batch_shape(1, SEQUENCE)
    lowered = lower_step(layouts, MODEL, plan, optimizer, schedule, batch)
    with without_compilation_cache():
        program = lowered.compile(gpu_compiler_options() | (plan.compiler_options or {}))
    return [
        flight
        for flight in flights(program, plan.mesh)
        if flight.collective.axes == ("tensor",) and flight.collective.payload_bytes > 2**20
    ]


def hidden_share_of_model(plan):
    """The share of a layer's messages over `tensor` that the cost model hides."""
    layout = LayoutCandidate.of(plan.layout.changed(batch={"sequence_length": SEQUENCE}))
    site = Topology.load("two-h100-sites-2x8").sites[0]
    times = LayerTimes(MODEL, layout, site, Calibration(), GEOJAX)
    networks = SiteNetworks(site, layout.mesh_sizes, Calibration())
    (tensor,) = layer_collectives(times, networks, Piece("attention", "", 0.0, 0.0))
    return tensor.hidden / (tensor.hidden + tensor.exposed)


@needs_cuda
@pytest.mark.parametrize(
    ("precision", "backend"), [("bf16", "reference"), ("fp8-current", "xla")], ids=["bf16", "fp8"]
)
def test_input_gradients_are_scattered_while_weight_gradients_are_computed(precision, backend):
    mesh = make_mesh(tensor=TENSOR, devices=h100_devices(sites=1, hosts=1))
    plan = step_plan_on(mesh, policy(precision), sequence_parallel=True, fp8_backend=backend)
    found = compiled_flights(plan)

    def executions(kind, beside):
        return sum(
            flight.collective.executions
            for flight in found
            if flight.collective.kind == kind and bool(flight.products) == beside
        )

    assert executions("reduce-scatter", True) == 2 * LAYERS, "of attention and of feed-forward"
    messages = 8 * LAYERS  # two gathers and two scatters forwards, and backwards
    beside = executions("reduce-scatter", True) + executions("all-gather", True)
    modelled = hidden_share_of_model(plan)
    assert modelled > 0.2
    assert modelled <= beside / messages + 0.05
