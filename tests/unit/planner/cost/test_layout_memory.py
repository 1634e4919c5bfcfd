"""The memory of a layout in closed form, held to the step's trace and to the schedules."""

from pathlib import Path

import pytest
from support.plans import step_plan_on

from geojax.config.run_config import RunConfig
from geojax.models import ModelConfig, parameter_count
from geojax.optim import OptimizerSettings
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.schedule import Placement
from geojax.pipeline.tick_tables import hops_between_sites, tick_table
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.cost.layer_bytes import kept_bytes, layer_bytes
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.memory import layout_memory, pairs_in_flight
from geojax.planner.resolve.run_layout import layout_of_run
from geojax.planner.resolve.traced_run import trace_run
from geojax.planner.step_pieces import step_pieces
from geojax.precision import policy
from geojax.step.program import batch_shape
from geojax.step.stage_layers import StagedLayers

LLAMA = Path(__file__).parents[4] / "configs" / "llama3-8b-2x8.yaml"
TENSOR = (
    *("--zero.stage", "1", "--mesh", "{dc: 2, data: 2, tensor: 4}"),
    *("--batch.microbatches", "128", "--parallelism.sequence", "true"),
)


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("--zero.stage", "1", "--remat", "full"), id="ZeRO 1"),
        pytest.param((*TENSOR, "--remat", "selective"), id="tensor"),
        pytest.param(("--communication.gradient_compression", "int8"), id="int8"),
    ],
)
def test_it_is_within_a_tenth_of_the_trace(overrides):
    """The shipped configs are held to theirs in tests/unit/train/test_shipped_configs.py."""
    config = RunConfig.load(LLAMA, overrides)
    step = trace_run(config)
    layout = layout_of_run(config).changed(
        communication={
            "overlap_grad_reduce": step.plan.overlap_grad_reduce,
            "bucket_layers": step.plan.bucket_layers,
        }
    )
    estimate = layout_memory(config.model, layout)
    assert estimate.bytes == pytest.approx(step.memory.bytes, rel=0.1)


@pytest.mark.parametrize(
    ("schedule", "role", "stages", "virtual", "microbatches"),
    [
        ("branch_free", "data", 4, 1, 16),
        ("branch_free", "stage", 4, 1, 16),
        ("branch_free", "stage", 4, 1, 3),
        ("1f1b", "data", 4, 1, 16),
        ("1f1b", "stage", 4, 1, 16),
        ("gpipe", "data", 2, 1, 5),
        ("interleaved", "data", 4, 2, 8),
        ("interleaved", "data", 3, 4, 10),
        ("interleaved", "stage", 2, 4, 8),
        ("interleaved", "stage", 6, 3, 12),
        ("interleaved", "stage", 8, 2, 4),
        ("zero_bubble_h1", "data", 4, 1, 16),
        ("zbv", "data", 4, 2, 16),
    ],
)
def test_it_knows_what_a_schedule_holds(schedule, role, stages, virtual, microbatches):
    layout = LayoutCandidate.made(
        sequence_length=8192,
        microbatches=microbatches,
        mesh={"dc": 2, "stage": stages // (2 if role == "stage" else 1)},
        dc={"role": role},
        pipeline={"virtual_stages": virtual, "schedule": schedule},
    )
    placement = schedule_entry(schedule).placement(layout.stages_per_site, virtual)
    hops = hops_between_sites(placement, layout.stages_per_site[0], 2)
    table = tick_table(schedule, placement, microbatches, hops)
    assert pairs_in_flight(layout) == max(table.schedule.in_flight)


def test_remat_keeps_less_and_sequence_parallelism_shares_it():
    model = ModelConfig.load("llama3-70b")
    layout = LayoutCandidate.made(
        sequence_length=8192, mesh={"tensor": 8}, parallelism={"sequence": True}
    )

    def kept(size=1, **sections):
        return kept_bytes(model, layout.changed(**sections).with_microbatches(1, size))

    stream = 8192 * 8192 * 2
    assert kept(remat="full") == stream / 8
    assert kept(remat="full", parallelism={"sequence": False}) == stream
    assert kept(remat="full") < kept(remat="selective") < kept(remat="none")
    assert kept(size=2, remat="selective") == 2 * kept(remat="selective")
    assert kept(remat="selective") == 171966464, "as `geojax.planner.step_pieces` counts"


@pytest.mark.parametrize(
    ("remat", "sequence"), [("none", True), ("selective", True), ("full", False)]
)
def test_a_layer_holds_what_its_trace_does(remat, sequence):
    model = ModelConfig.load("llama3-70b").replace(num_hidden_layers=4)
    layout = LayoutCandidate.made(
        sequence_length=4096,
        microbatches=2,
        mesh={"stage": 2, "tensor": 8},
        parallelism={"sequence": sequence},
        remat=remat,
        pipeline={"schedule": "zero_bubble_h1"},
    )
    placement = Placement.linear(2)
    plan = step_plan_on(
        mesh=abstract_mesh(layout.mesh_sizes, platform="gpu"),
        policy=policy("bf16"),
        microbatches=2,
        remat=remat,
        sequence_parallel=sequence,
        staged_layers=StagedLayers(placement, (2, 2)),
        tick_program=TickProgram.of(
            tick_table("zero_bubble_h1", placement, 2, [1]), branch_free=False
        ),
    )
    traced = step_pieces(model, plan, batch_shape(2, 4096)).held
    assert layer_bytes(model, layout) == pytest.approx(traced, rel=1e-3)
    whole = layer_bytes(model, layout.changed(pipeline={"schedule": "1f1b"}))
    assert whole == pytest.approx(traced.without_split, rel=1e-3)


def test_a_tied_table_has_gradients_as_a_head_too():
    """The trace of this layout takes 66.2 GB."""
    layout = LayoutCandidate.made(
        sequence_length=8192,
        microbatches=16,
        mesh={"dc": 2, "stage": 1, "data": 4, "tensor": 2},
        dc={"role": "stage"},
        pipeline={"virtual_stages": 21, "schedule": "interleaved"},
        parallelism={"sequence": True},
    )
    memory = layout_memory(ModelConfig.load("gemma2-9b"), layout)
    assert memory.bytes == pytest.approx(66.2e9, rel=0.05)


def test_a_layout_shards_what_its_zero_stage_says():
    model = ModelConfig.load("llama3-8b")
    memory = [
        layout_memory(
            model,
            LayoutCandidate.made(sequence_length=8192, mesh={"data": 8}, zero={"stage": stage}),
        )
        for stage in range(4)
    ]
    state = [_state_bytes(each) for each in memory]
    assert state[1] == pytest.approx(state[0] / 8)
    gradients, weights = (
        [each.phases[phase][use] for each in memory]
        for phase, use in (("reduce", "gradients"), ("head", "gathered weights"))
    )
    assert gradients[2] == pytest.approx(gradients[1] / 8)
    assert weights[3] < weights[2] / 4
    across = layout_memory(
        model,
        LayoutCandidate.made(
            sequence_length=8192, mesh={"dc": 2, "data": 8}, zero={"across_sites": True}
        ),
    )
    assert _state_bytes(across) == pytest.approx(state[1] / 2)
    assert memory[0].largest == "optimizer moments"


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        ({"name": "adamw"}, 12),
        ({"name": "adamw", "moment_dtype": "bf16"}, 8),
        ({"name": "lion"}, 8),
        ({"name": "lion", "moment_dtype": "bf16"}, 6),
    ],
)
def test_the_state_is_as_large_as_the_optimizer_makes_it(optimizer, state_bytes):
    model = ModelConfig.load("llama3-8b")
    memory = layout_memory(
        model,
        LayoutCandidate.made(sequence_length=8192, zero={"stage": 0}),
        optimizer=OptimizerSettings(**optimizer),
    )
    assert _state_bytes(memory) / parameter_count(model) == pytest.approx(state_bytes, rel=1e-6)


def _state_bytes(memory):
    return memory.by_use["master weights"] + memory.by_use["optimizer moments"]
