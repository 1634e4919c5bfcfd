"""Compiled ahead of time for H100s, what ranks of `tensor` send travels beside products."""

import dataclasses
import functools
import itertools
import re

import pytest
from support.h100 import compiled_step, h100_devices, needs_cuda
from support.plans import step_plan_on

from geojax.hlo import collective_traffic
from geojax.hlo.module import parse_module
from geojax.hlo.overlap import flights
from geojax.mesh import make_mesh
from geojax.models import ModelConfig
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import FULL_TICKS, TickProgram
from geojax.pipeline.generators.paired import paired_interleaved
from geojax.pipeline.schedule import Kind
from geojax.pipeline.ticks import Packing, in_ticks
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.collectives import layer_collectives
from geojax.planner.cost.execution import GEOJAX
from geojax.planner.cost.layer import LayerTimes, Piece
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.networks import SiteNetworks
from geojax.precision import policy
from geojax.step.program import batch_shape
from geojax.step.stage_layers import StagedLayers
from geojax.topology import Topology

LAYERS, TENSOR, SEQUENCE = 4, 8, 4096
MODEL = ModelConfig.load("llama3-70b").replace(num_hidden_layers=LAYERS, vocab_size=4096)


def program_of(plan, model=MODEL, *, sequences=1):
    """The program of a step whose microbatches have so many sequences."""
    batch = batch_shape(sequences * plan.layout.batch.microbatches, SEQUENCE)
    return compiled_step(model, plan, batch)[0]


def of_activations(collective):
    """Whether ranks of `tensor` send activations, and not numbers of the loss."""
    return collective.axes == ("tensor",) and collective.payload_bytes > 2**20


def compiled_flights(program, plan):
    """What travels over `tensor` and is awaited later, of activations."""
    return [each for each in flights(program, plan.mesh) if of_activations(each.collective)]


def share_beside_products(program, plan):
    """The share of the bytes that are in flight while a product is computed."""
    traffic = collective_traffic(program, plan.mesh).collectives
    beside = (each.collective for each in compiled_flights(program, plan) if each.products)
    sent = sum(each.bytes_sent for each in traffic if of_activations(each))
    return float(sum(each.bytes_sent for each in beside) / sent)


def hidden_share_of_model(plan, **batch):
    """The share of a layer's messages over `tensor` that the cost model hides."""
    batch = {"sequence_length": SEQUENCE} | batch
    layout = LayoutCandidate.of(plan.layout.changed(batch=batch))
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
    found = compiled_flights(program_of(plan), plan)

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


@needs_cuda
def test_one_message_of_a_backward_waits_where_what_enters_is_gathered_again():
    mesh = make_mesh(tensor=TENSOR, devices=h100_devices(sites=1, hosts=1))
    plan = step_plan_on(mesh, policy("bf16"), sequence_parallel=True, remat="selective")
    program = program_of(plan)
    beside = sum(
        each.collective.executions for each in compiled_flights(program, plan) if each.products
    )
    # A layer has two gathers and two scatters forwards, and two gathers more backwards.
    modelled = hidden_share_of_model(plan)
    assert modelled > 0.45
    assert modelled <= beside / (10 * LAYERS) + 0.05


@needs_cuda
def test_parts_of_the_stream_travel_while_others_are_multiplied():
    mesh = make_mesh(tensor=TENSOR, devices=h100_devices(sites=1, hosts=1))
    options = {"sequence_parallel": True, "remat": "selective", "chunks": 2}
    plan = step_plan_on(mesh, policy("bf16"), **options)
    program = program_of(plan)
    of_part = SEQUENCE // 2 * MODEL.hidden_size * 2
    scattered = [
        each
        for each in collective_traffic(program, plan.mesh).collectives
        if each.kind == "reduce-scatter" and each.payload_bytes == of_part
    ]
    assert sum(each.executions for each in scattered) == 8 * LAYERS, "two of each region and pass"
    modelled = hidden_share_of_model(plan)
    assert modelled > 0.5
    assert modelled <= share_beside_products(program, plan) + 0.05


def joint_plan(table, *, head):
    """Stages whose chunks have a layer each and whose passes of one tick are one branch."""
    placement = table.schedule.placement
    stages = placement.stages
    mesh = make_mesh(stage=stages, tensor=TENSOR, devices=h100_devices(sites=1, hosts=stages))
    plan = step_plan_on(
        mesh,
        policy("bf16"),
        4 * stages,
        sequence_parallel=True,
        remat="selective",
        head=head,
        staged_layers=StagedLayers(
            placement,
            (1,) * placement.chunks,
            1 if head == "last_stage" else stages,
            shares_vocabulary=head == "vocabulary",
        ),
        tick_program=TickProgram.of(
            table,
            branch_free=False,
            joint=True,
            shares_head=head != "last_stage",
            shares_embedding=head == "vocabulary",
        ),
    )
    return dataclasses.replace(plan, layout=plan.layout.changed(pipeline={"schedule": "1f1b"}))


@needs_cuda
def test_a_forward_and_a_backward_in_one_tick_hide_what_either_sends():
    model = MODEL.replace(num_hidden_layers=2)
    plan = joint_plan(tick_table("1f1b", Placement.linear(2), 8, [1]), head="last_stage")
    # Of fourteen messages of a tick embedding and head, in branches of their own, have four.
    beside = share_beside_products(program_of(plan, model), plan) * 14 / 10
    assert beside > 0.75
    assert hidden_share_of_model(plan, microbatches=10**6, global_batch_size=10**6) <= beside + 0.05


def full_ticks(plan):
    """The number of ticks in which all stages have both passes."""
    runs = [each for each in plan.tick_program.segments if each.pattern[0].full]
    (both,) = (each for each in runs if Kind.FORWARD in each.pattern[0].kinds)
    return both.count


@functools.cache
def turned_step(stages=2, chunks_per_stage=1, sequences=1, head="positions"):
    """The program and the plan of stages that share a head, and turn a tick later."""
    placement = Placement.interleaved((stages,), chunks_per_stage)
    hops = (1,) * (placement.chunks - 1)
    order = paired_interleaved(placement, 4 * stages, hops, turn=1)
    plan = joint_plan(in_ticks(order, hops, hops, Packing.TOGETHER), head=head)
    model = MODEL.replace(num_hidden_layers=placement.chunks)
    return program_of(plan, model, sequences=sequences), plan


@needs_cuda
def test_a_head_that_stages_share_leaves_passes_joint_and_sends_the_stream_once_each_way():
    program, plan = turned_step()
    stream = SEQUENCE // TENSOR * MODEL.hidden_size * 2
    over_stages = [
        each
        for each in collective_traffic(program, plan.mesh).collectives
        if each.axes == ("stage",) and each.in_loop and each.kind != "collective-permute"
    ]
    assert sorted(each.kind for each in over_stages) == ["all-gather", "reduce-scatter"]
    assert [each.bytes_sent / each.executions for each in over_stages] == [stream / 2] * 2
    # Of fourteen messages of a tick four are of embedding and head.
    beside = share_beside_products(program, plan) * 14 / 10
    assert beside > 0.75
    assert hidden_share_of_model(plan, microbatches=10**6, global_batch_size=10**6) <= beside + 0.05


@needs_cuda
def test_one_message_of_a_tick_waits_where_no_stage_is_idle():
    program, plan = turned_step()
    found = [
        each
        for each in compiled_flights(program, plan)
        if each.collective.in_loop
        and each.collective.executions == full_ticks(plan)
        and each.products_around
    ]
    assert len(found) == 10, "of a layer forwards and backwards"
    assert sum(not each.products for each in found) <= 1


@needs_cuda
@pytest.mark.parametrize("head", ["positions", "vocabulary"])
def test_hops_travel_beside_gradients_of_weights_where_no_stage_is_idle(head):
    program, plan = turned_step(head=head)
    hops = [
        each
        for each in flights(program, plan.mesh)
        if each.collective.kind == "collective-permute"
        and each.collective.executions == full_ticks(plan)
    ]
    assert len(hops) == 2, "of the stream and of its cotangent"
    assert all(each.products for each in hops)


@needs_cuda
def test_a_branch_of_joint_ticks_returns_the_residuals_of_one_layer_and_no_ring():
    program, _ = turned_step()
    computations = parse_module(program.as_text()).computations.values()
    branches = [each for each in itertools.chain(*computations) if each.opcode == "conditional"]
    feed_forward = f"{SEQUENCE},{MODEL.intermediate_size // TENSOR}]"
    residuals = {
        shape
        for each in branches
        for shape in re.findall(r"bf16(\[\S+?\])", each.shape)
        if shape.endswith(feed_forward)
    }
    assert residuals == {f"[1,{feed_forward}"}


@needs_cuda
def test_joint_ticks_read_stacks_of_weights_and_sums_in_branches_alone():
    program, _ = turned_step(stages=4, chunks_per_stage=2)
    kernel = f"{MODEL.hidden_size},{MODEL.intermediate_size // TENSOR}]"
    loops = [
        {each.name: each for each in body}
        for body in parse_module(program.as_text()).computations.values()
        if {"collective-permute-start", "while"} & {each.opcode for each in body}
        == {"collective-permute-start"}
    ]
    assert loops
    for body, dtype in itertools.product(loops, ("bf16", "f32")):
        stacks = {
            name for name, each in body.items() if each.shape.startswith(f"{dtype}[2,{kernel}")
        }
        readers = [each for each in body.values() if stacks.intersection(each.operands)]
        assert {each.opcode for each in readers} == {"tuple"}, "of branches and of the next tick"
        branches = [each for each in body.values() if each.opcode == "conditional"]
        assert any(f"{dtype}[1,{kernel}" in each.shape for each in branches), "where it changes"


@needs_cuda
def test_products_of_joint_ticks_add_to_the_sums_in_place():
    kernel = f"{MODEL.hidden_size},{MODEL.intermediate_size // TENSOR}]"
    program, _ = turned_step(stages=4, chunks_per_stage=2)
    computations = parse_module(program.as_text()).computations
    of_three = [
        body
        for body in computations.values()
        if any(each.shape.startswith(f"f32[{kernel}") and len(each.operands) == 3 for each in body)
    ]
    assert of_three, "a product of two arrays that adds to a third"
    branches = [
        computations[name]
        for each in itertools.chain(*computations.values())
        for name in each.calls
        if each.opcode == "conditional"
    ]
    opcodes = {
        (each.opcode, each.name.split(".")[0])
        for each in itertools.chain(*of_three, *branches)
        if each.shape.startswith(f"f32[1,{kernel}")
        and each.opcode not in ("bitcast", "get-tuple-element", "parameter")
    }
    assert {name for _, name in opcodes} == {"loop_dynamic_slice_fusion"}, "of another chunk"


@needs_cuda
def test_the_stream_of_several_sequences_is_not_turned_before_products():
    program, _ = turned_step(stages=4, chunks_per_stage=2, sequences=2)
    stream = f"bf16[2,{SEQUENCE},{MODEL.hidden_size}]"
    made = itertools.chain(*parse_module(program.as_text()).computations.values())
    full_ticks = [
        each for each in made if each.shape.startswith(stream) and FULL_TICKS in each.tail
    ]
    assert any("all-gather" in each.opcode for each in full_ticks)
    copies = [each.tail for each in full_ticks if each.name.startswith("loop_transpose")]
    assert not [tail for tail in copies if "_layers/" in tail]
