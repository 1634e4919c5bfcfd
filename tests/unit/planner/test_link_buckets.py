"""Buckets chosen by the link, at the sizes of published runs; messages before and after."""

import dataclasses

import jax
import pytest
from support.plans import step_plan_on
from support.small_models import model_of

from geojax import make_mesh
from geojax.accelerators import accelerator_named
from geojax.collectives import BFLOAT16, INT8
from geojax.mesh import AXES
from geojax.models import ModelConfig
from geojax.models.flops import model_flops
from geojax.models.parameters import parameter_shapes
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.pipeline.registry import schedule_entry
from geojax.pipeline.simulation.model_costs import layer_operations
from geojax.pipeline.tick_tables import tick_table
from geojax.planner.abstract_mesh import abstract_mesh
from geojax.planner.buckets import (
    MEMORY_SHARE,
    ComputeTimes,
    LinkShare,
    choose_buckets,
    exposure_lines,
    link_share,
    predict_exposure,
)
from geojax.planner.traffic.gradients import gradient_messages
from geojax.precision import policy
from geojax.step.config_plan import DEFAULT_BUCKET_BYTES
from geojax.step.program import batch_shape, trace_step
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import parameter_layouts, state_layouts
from geojax.topology import Topology

H100 = accelerator_named("h100-sxm")
LINK: LinkShare = link_share(Topology.load("two-h100-sites"), 1536)
NO_MEMORY_LIMIT = 10**15


def plan_on(sizes, **options):
    """A plan for H100s, with sequence parallelism and bf16 weights."""
    sizes = {axis: sizes.get(axis, 1) for axis in AXES}
    mesh = abstract_mesh(sizes, accelerator=H100)
    return step_plan_on(mesh, policy("bf16"), sequence_parallel=True, **options)


def times_of(model, plan, sequences, length):
    """The work of a step on H100s at 40% of their peak."""
    rate, mesh = 0.4 * H100.peak("bfloat16"), plan.mesh
    tokens = sequences * length
    ranks = mesh.shape["data"] * mesh.shape["dc"]
    microbatch = tokens / (ranks * plan.layout.batch.microbatches)
    operations = layer_operations(model, length, plan.layout.remat)
    of_layer = microbatch / (rate * mesh.shape["tensor"] * mesh.shape["context"])
    return ComputeTimes(
        model_flops(model, length) * tokens / (rate * mesh.size),
        operations.forward * of_layer,
        (operations.backward + operations.weight) * of_layer,
    )


def llama_70b(**options):
    sizes = {"dc": 2, "data": 192, "tensor": 8}
    plan = plan_on(sizes, microbatches=4, remat="full", **options)
    model = ModelConfig.load("llama3-70b")
    return model, plan, times_of(model, plan, 1536, 8192)


def nemotron_340b():
    """The layout that its report publishes, in each of two sites."""
    placement = schedule_entry("1f1b").placement([12], 1)
    plan = plan_on(
        {"dc": 2, "stage": 12, "data": 16, "tensor": 8},
        microbatches=72,
        staged_layers=StagedLayers(placement, (8,) * 12),
        tick_program=TickProgram.of(
            tick_table("1f1b", placement, 72, (1,) * 11), branch_free=False
        ),
    )
    model = ModelConfig.load("nemotron4-340b")
    return model, plan, times_of(model, plan, 2304, 4096)


def nemotron_340b_interleaved():
    """The same with eight chunks of a layer a stage, which leave early."""
    placement = schedule_entry("interleaved").placement([12], 8)
    _, plan, _ = nemotron_340b()
    plan = dataclasses.replace(
        plan,
        wire_format=BFLOAT16,
        staged_layers=StagedLayers(placement, (1,) * 96),
        tick_program=TickProgram.of(
            tick_table("interleaved", placement, 72, (1,) * 95), branch_free=False
        ),
    )
    model = ModelConfig.load("nemotron4-340b")
    return model, plan, times_of(model, plan, 2304, 4096)


def before(model, plan, times):
    """What buckets of a constant size expose."""
    return predict_exposure(
        model, dataclasses.replace(plan, bucket_bytes=DEFAULT_BUCKET_BYTES), LINK, times
    )


def test_a_device_has_its_share_of_the_link():
    assert LINK.bytes_per_second == pytest.approx(3.2e12 / 8 / 1536)
    assert LINK.bandwidth_delay_bytes == pytest.approx(5.47e6, rel=1e-3)
    alone = link_share(Topology.load("two-h100-sites"), 1)
    assert alone.bytes_per_second == 400e9 / 8, "its network card is slower than the link"


def test_seventy_billion_parameters_cross_in_few_messages():
    model, plan, times = llama_70b()
    constant = before(model, plan, times)
    assert constant.messages.count > 2000
    assert constant.messages.longest < 90e3
    assert constant.latency_seconds > 40

    chosen = choose_buckets(model, plan, LINK, times, H100.memory_bytes)
    assert chosen.plan.overlap_grad_reduce
    assert chosen.exposure.messages.count < 30
    assert chosen.exposure.latency_seconds < 0.2
    assert chosen.exposure.messages.bytes == pytest.approx(constant.messages.bytes, rel=0.01)

    plain = choose_buckets(
        model, plan, LINK, times, H100.memory_bytes, ("bucket_bytes", "bucket_layers")
    )
    assert not plain.plan.overlap_grad_reduce
    assert plain.exposure.messages.count < 10
    assert plain.plan.bucket_bytes == MEMORY_SHARE * H100.memory_bytes, "memory is the limit"
    assert plain.exposure.seconds > chosen.exposure.seconds


@pytest.mark.parametrize("wire", [None, BFLOAT16, INT8], ids=["fp32", "bf16", "int8"])
def test_the_published_layout_sends_messages_of_ten_bandwidth_delay_products(wire):
    model, plan, times = nemotron_340b()
    plan = dataclasses.replace(plan, wire_format=wire)
    assert before(model, plan, times).messages.count > 800
    chosen = choose_buckets(model, plan, LINK, times, H100.memory_bytes)
    messages = chosen.exposure.messages
    assert messages.count < 20
    # One may be shorter: the last leaves that share a message.
    assert sorted(messages.after_backward)[1] > 10 * LINK.bandwidth_delay_bytes
    assert chosen.exposure.latency_seconds < 0.02 * times.compute_seconds
    assert chosen.plan.bucket_bytes <= MEMORY_SHARE * H100.memory_bytes

    early = dataclasses.replace(chosen.plan, overlap_grad_reduce=True)
    (head,) = predict_exposure(model, early, LINK, times).messages.early
    share = model.vocab_size * model.hidden_size // (12 * 16 * 8)
    assert head.bytes == (4 * share if wire is None else wire.message_bytes(share))


def test_sharded_gradients_need_no_room_for_their_other_ranks():
    model, plan, _ = llama_70b(zero_stage=3)
    chosen = choose_buckets(model, plan, LINK, None, NO_MEMORY_LIMIT)
    assert not chosen.plan.overlap_grad_reduce, "the backward's time is not known"
    assert chosen.plan.bucket_bytes == pytest.approx(20 * LINK.bandwidth_delay_bytes, rel=1e-6)
    assert chosen.exposure.messages.count < 10


def test_more_layers_travel_together_where_the_backward_is_short():
    model, plan, times = llama_70b()
    layers = []
    for factor in (0.25, 1, 4, 16):
        fast = dataclasses.replace(times, layer_backward=factor * times.layer_backward)
        chosen = choose_buckets(
            model, plan, LINK, fast, NO_MEMORY_LIMIT, ("bucket_layers", "overlap_grad_reduce")
        )
        layers.append(chosen.plan.bucket_layers if chosen.plan.overlap_grad_reduce else 80)
    assert layers == sorted(layers, reverse=True)
    assert layers[0] > layers[-1]


def test_more_chunks_leave_together_where_the_round_trip_is_long():
    model, plan, times = nemotron_340b_interleaved()
    chosen_layers = []
    for milliseconds in (1, 21, 70, 150):
        link = dataclasses.replace(LINK, round_trip_seconds=milliseconds / 1e3)
        chosen = choose_buckets(model, plan, link, times, H100.memory_bytes)
        assert chosen.plan.overlap_grad_reduce
        chosen_layers.append(chosen.plan.bucket_layers)
        one = dataclasses.replace(chosen.plan, bucket_layers=1)
        alone = predict_exposure(model, one, link, times)
        assert chosen.exposure.seconds <= alone.seconds
        assert chosen.exposure.messages.bytes == pytest.approx(alone.messages.bytes)
    assert chosen_layers == [1, 1, 2, 3]
    assert chosen.exposure.seconds < 0.7 * alone.seconds

    given = dataclasses.replace(plan, overlap_grad_reduce=True, bucket_layers=1)
    kept = choose_buckets(model, given, link, times, H100.memory_bytes, ("bucket_bytes",))
    assert kept.plan.bucket_layers == 1
    unknown = choose_buckets(model, given, link, None, H100.memory_bytes, ("bucket_layers",))
    assert unknown.plan.bucket_layers == 1, "the backward's time is not known"


def test_an_early_message_of_several_chunks_fits_into_a_share_of_the_memory():
    model, plan, times = nemotron_340b_interleaved()
    link = dataclasses.replace(LINK, round_trip_seconds=0.15)
    numbers = sum(leaf.size for leaf in jax.tree.leaves(parameter_shapes(model)["layers"]))
    of_chunk = 4 * numbers / 96 / 8
    for memory in (1.5 * of_chunk, 2.5 * of_chunk, 3.5 * of_chunk):
        chosen = choose_buckets(model, plan, link, times, int(memory / MEMORY_SHARE)).plan
        early = min(chosen.bucket_layers, 8 - chosen.bucket_layers)
        assert 1 <= early <= memory / of_chunk


def test_what_is_given_stays():
    model, plan, times = llama_70b()
    given = dataclasses.replace(plan, bucket_bytes=2**30, bucket_layers=2)
    chosen = choose_buckets(
        model, given, LINK, times, H100.memory_bytes, ("overlap_grad_reduce",)
    ).plan
    assert (chosen.bucket_bytes, chosen.bucket_layers) == (2**30, 2)
    assert choose_buckets(model, given, LINK, times, None, ()).plan == given


def test_the_log_says_what_was_chosen_and_what_would_help():
    model, plan, times = llama_70b()
    constant = dataclasses.replace(plan, bucket_bytes=DEFAULT_BUCKET_BYTES)
    exposure = predict_exposure(model, constant, LINK, times)
    chosen, exposed, warning = exposure_lines(exposure, constant, LINK, times)
    assert "bucket_bytes 16.8 MB: 2126 messages a device and step, the longest 87.3 kB" in chosen
    assert "45 s that no compute hides" in exposed
    assert warning.startswith("warning: exposed latency is more than 2% of a step; leave ")

    best = choose_buckets(model, plan, LINK, times, H100.memory_bytes)
    longer = dataclasses.replace(times, compute_seconds=4 * times.compute_seconds)
    auto = ("bucket_bytes", "bucket_layers", "overlap_grad_reduce")
    lines = exposure_lines(best.exposure, best.plan, LINK, longer, auto=auto)
    assert len(lines) == 2, "no warning"
    assert "overlap_grad_reduce true (auto)" in lines[0]


LAYOUTS = {
    "buckets": ({"dc": 2, "data": 2}, {"bucket_bytes": 4096}),
    "a bucket a leaf": ({"dc": 2, "data": 2}, {"bucket_bytes": None}),
    "zero 2, tensor": ({"dc": 2, "data": 2, "tensor": 2}, {"zero_stage": 2, "bucket_bytes": 4096}),
    "zero 0": ({"dc": 2, "data": 2}, {"zero_stage": 0, "bucket_bytes": 2048}),
    "overlap": ({"dc": 2, "data": 2}, {"overlap_grad_reduce": True, "bucket_layers": 1}),
    "one message": (
        {"dc": 2, "data": 2, "tensor": 2},
        {"sequence_parallel": True, "bucket_bytes": 2**30},
    ),
    "sharded over sites": ({"dc": 2, "data": 2}, {"shard_across_sites": True}),
}


@pytest.mark.parametrize(("sizes", "options"), LAYOUTS.values(), ids=LAYOUTS)
def test_as_many_messages_are_predicted_as_the_step_has(sizes, options):
    model = model_of("llama")
    devices = 1
    for size in sizes.values():
        devices *= size
    plan = step_plan_on(
        make_mesh(devices=jax.devices()[:devices], **sizes), policy("fp32"), **options
    )
    settings = OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    step = trace_step(layouts, model, plan, optimizer, schedule, batch_shape(8, 16))
    predicted = gradient_messages(model, parameter_layouts(model, plan), plan).count
    assert sums_over_sites(step.jaxpr.jaxpr, of_arrays=True) == predicted


def sums_over_sites(jaxpr, times=1, *, of_arrays):
    """Collectives of a program that sum more than a few numbers over dc, those of loops often."""
    found = 0
    for equation in jaxpr.eqns:
        again = times * equation.params.get("length", 1)
        for value in equation.params.values():
            for inner in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(inner, "jaxpr", inner)
                if hasattr(inner, "eqns"):
                    found += sums_over_sites(inner, again, of_arrays=of_arrays)
        axes = equation.params.get("axes", equation.params.get("axis_name", ()))
        names = axes if isinstance(axes, tuple) else (axes,)
        reduces = "psum" in equation.primitive.name or "reduce_scatter" in equation.primitive.name
        if reduces and "dc" in names:
            found += times * sum(variable.aval.size > 8 for variable in equation.invars)
    return found
