"""Time of the update, by optimizer."""

import pytest
from support.plans import step_plan_on

from geojax.models import ModelConfig
from geojax.models.parameters import parameter_count
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.networks import SiteNetworks
from geojax.planner.cost.update import update_terms
from geojax.planner.step_traffic import step_traffic
from geojax.precision import policy
from geojax.step.program import batch_shape, trace_step
from geojax.step.state import parameter_layouts, state_layouts
from geojax.topology import Topology

MODEL = ModelConfig.load("llama3-8b").replace(num_hidden_layers=4)
LAYOUT = LayoutCandidate.made(sequence_length=4096, mesh={"dc": 2, "data": 4, "tensor": 2})


def plan_of(layout):
    mesh = abstract_mesh(layout.mesh_sizes, platform="gpu")
    return step_plan_on(
        mesh=mesh, policy=policy("bf16"), microbatches=1, zero_stage=layout.zero.stage
    )


def sent_by(name):
    """What a step with an optimizer sends, by axes."""
    plan, settings = plan_of(LAYOUT), OptimizerSettings(name=name)
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(MODEL, optimizer, plan)
    batch = batch_shape(8, 128)
    return step_traffic(trace_step(layouts, MODEL, plan, optimizer, schedule, batch), plan).by_axes


def update(layout=LAYOUT, **settings):
    plan = plan_of(layout)
    topology = Topology.load("two-h100-sites-2x8")
    networks = SiteNetworks(topology.sites[0], layout.mesh_sizes, Calibration())
    optimizer = OptimizerSettings.model_validate(settings)
    terms = update_terms(MODEL, optimizer, parameter_layouts(MODEL, plan), plan, networks)
    return {term.name: term for term in terms}


@pytest.mark.parametrize(
    ("settings", "of_number"),
    [
        ({"name": "adamw"}, 34),
        ({"name": "adamw", "moment_dtype": "bf16"}, 26),
        ({"name": "adamw", "ema_decay": 0.999}, 42),
        ({"name": "lion"}, 26),
        ({"name": "schedule_free_adamw", "schedule": "constant"}, 34),
        ({"name": "adafactor"}, 18 + 3 * 4),
    ],
    ids=str,
)
def test_an_update_moves_gradient_weight_and_state(settings, of_number):
    made = update(**settings)["optimizer"]
    numbers = made.bytes / of_number
    # Of 4 x 2 ranks each has an eighth, but for scales and key and value heads.
    assert numbers == pytest.approx(parameter_count(MODEL) / 8, rel=0.01)
    assert settings["name"] in made.source
    assert made.exposed_seconds == made.seconds > 0


def test_muon_orthogonalizes_the_matrices_that_a_rank_is_dealt():
    def seconds(sizes):
        flops = sum(5 * (4 * a * a * b + 2 * a**3) for a, b in sizes)
        return flops / (494.5e12 * Calibration().other_matmul_efficiency)

    made = update(name="muon")
    # Eight ranks divide 4 queries, 4 outputs, 8 keys and values, 8 gates and ups, and 4 downs.
    dealt = [(4096, 4096)] * 2 + [(1024, 4096)] + [(4096, 14336)] * 2
    assert made["Newton-Schulz"].seconds == pytest.approx(seconds(dealt), rel=0.2)
    alone = update(LAYOUT.changed(zero={"stage": 0}, mesh={"tensor": 1, "data": 8}), name="muon")
    of_layer = [(4096, 4096)] * 2 + [(1024, 4096)] * 2 + [(4096, 14336)] * 3
    assert alone["Newton-Schulz"].seconds == pytest.approx(seconds(4 * of_layer), rel=0.2)
    assert "optimizer in the site" not in alone, "whole matrices need no exchange"
    assert "Newton-Schulz" not in update()


@pytest.mark.parametrize("name", ["muon", "adafactor"])
def test_statistics_of_other_shards_have_the_bytes_of_the_program(name):
    made = update(name=name)["optimizer in the site"]
    own, plain = (
        sum(sent for axes, sent in sent_by(each).items() if "dc" not in axes)
        for each in (name, "adamw")
    )
    assert made.bytes == pytest.approx(float(own - plain), rel=0.02)
    assert made.network == "inside_host"
    assert made.messages > 0
    assert "optimizer in the site" not in update(), "AdamW works element by element"
