"""What the compiled gradients of a pipelined step hold: rings, hops, and memory."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from support.pipelines import SEQUENCE, Case, trace_gradients

from geojax.hlo import collective_traffic
from geojax.hlo.module import parse_module
from geojax.mesh import AXES
from geojax.pipeline import SCHEDULES
from geojax.pipeline.execution import executor
from geojax.pipeline.execution.ring_buffers import nan_of
from geojax.pipeline.execution.ring_pool import RingLeaf, RingPool, RingRows
from geojax.pipeline.execution.tick_program import NOTHING
from geojax.pipeline.schedule import Kind
from geojax.planner.step_pieces import step_pieces
from geojax.step.program import batch_shape

ROWS = 5
"""Of a microbatch on a device: nothing but a ring has the shape of a ring."""
BRANCHES = {"branches": "branches"}
CASES = {
    "branch-free": Case("branch_free", hop_ticks=2),
    "near hops": Case("branch_free", "3 sites", hop_ticks=1, rows="data"),
    "with branches": Case("1f1b", hop_ticks=3, tensor="sequence", **BRANCHES),
    "remat": Case("gpipe", hop_ticks=2, remat="full", context="context", **BRANCHES),
    "chunks handed over": Case("interleaved", "3 sites", hop_ticks=2, tensor="tensor", **BRANCHES),
    "split backward": Case("zero_bubble_h2", hop_ticks=2, remat="selective", **BRANCHES),
    "both ends on one stage": Case("zbv", hop_ticks=3, rows="data", **BRANCHES),
    "in each site": Case("latency_hiding", "in each", hop_ticks=2, **BRANCHES),
}


@functools.cache
def compiled(name):
    """The plan, the compiled program, and the shape of every ring that began as NaN."""
    began = []

    def recorded(leaf, *leading, zero=0.0):
        if leading:
            began.append((*leading, *leaf.shape))
        return nan_of(leaf, *leading, zero=zero)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(executor, "nan_of", recorded)
        plan, traced = trace_gradients(CASES[name], rows=ROWS)
    return plan, traced.lower().compile(), began


def in_loops(text):
    """Every instruction in the body of a loop, with those that it calls."""
    module = parse_module(text)

    def walk(name, within):
        for instruction in module.computations[name]:
            if within:
                yield instruction
            for called in instruction.calls:
                if called in module.computations:
                    yield from walk(called, within or instruction.opcode == "while")

    return walk(module.entry, False)


@pytest.mark.parametrize("name", CASES)
def test_rings_are_updated_in_place(name):
    """Those of more than one slot: of one, what is put replaces all there is."""
    _, program, began = compiled(name)
    rings = {f"[{','.join(map(str, shape))}]" for shape in began if shape[0] > 1}
    assert len(rings) > 1
    instructions = list(in_loops(program.as_text()))
    for ring in rings:
        held = [each for each in instructions if ring in each.shape]
        assert held, f"{ring} passes through the loop"
        assert not [each.name for each in held if each.opcode in ("copy", "copy-start")]


@pytest.mark.parametrize("name", CASES)
def test_of_a_loop_only_hops_cross_sites(name):
    plan, program, _ = compiled(name)
    crossing = [each for each in collective_traffic(program, plan.mesh).over("dc") if each.in_loop]
    assert {each.kind for each in crossing} <= {"collective-permute"}
    assert bool(crossing) == (plan.layout.dc.role == "stage")


@pytest.mark.parametrize("name", CASES)
def test_bytes_of_hops_are_those_of_the_formula(name):
    plan, program, _ = compiled(name)
    sent = dict.fromkeys(expected_hops(CASES[name].model, plan), 0)
    for each in collective_traffic(program, plan.mesh).collectives:
        if each.kind == "collective-permute" and set(each.axes) & {"dc", "stage"}:
            sent[each.axes] += each.bytes_sent
    assert sent == expected_hops(CASES[name].model, plan)


def expected_hops(model, plan):
    """Bytes that a device sends, by axes: for each channel, the ticks of the segments in which it
    is, times a stream's [rows, columns of a rank, hidden].

    A permute counts once for each set of axes that any of its messages crosses.
    """
    columns = SEQUENCE // plan.parallelism.context
    if plan.parallelism.sequence:
        columns //= plan.parallelism.tensor
    stream = ROWS * columns * model.hidden_size * plan.policy.compute_dtype.itemsize
    sizes = [plan.mesh.shape[axis] for axis in plan.stage_axes]
    expected = {}
    for number, channel in enumerate(plan.tick_program.channels):
        segments = plan.tick_program.segments
        ticks = sum(number in form.channels for segment in segments for _, form in segment.ticks())
        ends = np.array(np.unravel_index(np.array(channel.pairs), sizes))
        for crossed in {tuple(pair[:, 0] != pair[:, 1]) for pair in ends.transpose(1, 0, 2)}:
            axes = tuple(itertools.compress(plan.stage_axes, crossed))
            axes = tuple(axis for axis in AXES if axis in axes)
            expected[axes] = expected.get(axes, 0) + ticks * stream
    return expected


@pytest.mark.parametrize("name", [name for name in CASES if CASES[name].branches])
def test_rings_hold_the_bytes_that_the_schedule_says(name):
    plan, _, began = compiled(name)
    shares = math.prod(plan.mesh.shape[axis] for axis in plan.batch_axes)
    batch = batch_shape(ROWS * plan.layout.batch.microbatches * shares, SEQUENCE)
    layer = step_pieces(CASES[name].model, plan, batch).held
    schedule = plan.tick_program.ticks.schedule
    said = max(schedule.most_held(plan.staged_layers.layers_per_chunk, layer))
    of_layers = began[2:]  # behind those of streams and cotangents; all numbers have four bytes
    # Each ring is as long as the stage needs that needs most of it, which may be another for each.
    assert said <= sum(4 * math.prod(shape) for shape in of_layers) <= 1.1 * said


@pytest.mark.parametrize("name", ["branch-free", "with branches"])
def test_rings_begin_as_nan(name):
    plan, _, began = compiled(name)
    slots = plan.tick_program.slots
    stream = began[0][1:]
    assert (slots["inputs"], *stream) in began
    assert (slots["cotangents"], *stream) in began
    assert len(began) > 2, "and those of the layers"


def test_nan_of():
    for dtype in (jnp.float32, jnp.bfloat16):
        assert np.isnan(nan_of(jax.ShapeDtypeStruct((2, 3), dtype), 4).astype(jnp.float32)).all()
    # What is no number of that kind begins as 0.
    np.testing.assert_array_equal(nan_of(jax.ShapeDtypeStruct((2,), jnp.int32), 4), 0)


@pytest.mark.parametrize("name", ["branch_free", "1f1b"])
def test_what_does_not_arrive_is_seen(name, monkeypatch):
    """A message less, and what has never been written is read: everything behind it is NaN."""
    branches = {} if name == "branch_free" else BRANCHES
    case = Case(name, "in each", **branches)
    program = case.program()
    lost = program.columns["channel.0"].copy()
    tick, stage = np.argwhere(lost != NOTHING)[0]
    lost[tick, stage] = NOTHING
    columns = {**program.columns, "channel.0": lost}
    leaking = dataclasses.replace(program, columns=columns)
    monkeypatch.setattr(Case, "program", lambda *_: leaking)
    made = case.gradients()
    assert math.isnan(made.loss)
    assert all(np.isnan(leaf).any() for leaf in jax.tree.leaves(made.gradients))


def inner(equation):
    """The jaxprs that an equation holds."""
    for value in equation.params.values():
        for part in value if isinstance(value, (tuple, list)) else (value,):
            part = getattr(part, "jaxpr", part)
            if hasattr(part, "eqns"):
                yield part


def held_by(jaxpr, primitive):
    """Every equation of a primitive in a jaxpr, however deep."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == primitive:
            yield equation
        for part in inner(equation):
            yield from held_by(part, primitive)


def operations(product):
    """Multiplications of a `dot_general`."""
    (contracted, _), _ = product.params["dimension_numbers"]
    sizes = product.invars[0].aval.shape
    return math.prod(product.outvars[0].aval.shape) * math.prod(sizes[dim] for dim in contracted)


def products_by_kind(case):
    """The matrix products of a tick's forward, of its backward, and of its weights' gradients."""
    _, traced = trace_gradients(case)
    for loop in held_by(traced.jaxpr.jaxpr, "scan"):
        (body,) = inner(loop)
        branches = [each for each in body.eqns if each.primitive.name == "cond"]
        if len(branches) > 1:
            return [
                [product for part in inner(branch) for product in held_by(part, "dot_general")]
                for branch in branches
            ]
    raise AssertionError("no loop over ticks")


def test_a_split_backward_does_each_half_once():
    _, whole = products_by_kind(Case("1f1b", **BRANCHES))
    _, of_inputs, of_weights = products_by_kind(Case("zero_bubble_h1", **BRANCHES))
    kernels = {"query", "key", "value", "output", "gate", "up", "down"}
    assert len(of_weights) == len(kernels), "one product for each kernel"
    assert all(len(product.outvars[0].aval.shape) == 2 for product in of_weights)
    halves = sum(map(operations, of_inputs)) + sum(map(operations, of_weights))
    assert halves == sum(map(operations, whole))


STEADY = [name for name in SCHEDULES if name != "gpipe"]


@pytest.mark.parametrize("schedule", STEADY)
def test_slots_do_not_grow_with_the_microbatches(schedule):
    case = Case(schedule, hop_ticks=2, branches="" if schedule == "branch_free" else "branches")
    few, many = (case.program(count) for count in (24, 48))
    assert few.slots == many.slots
    assert rows(few, case) == rows(many, case)


def rows(program, case):
    """Those of a ring with all that a layer holds."""
    lasts = program.ticks.schedule.kinds[1:]
    lives = [(Kind.FORWARD, last) for last in lasts]
    lives += [(Kind.BACKWARD, last) for last in lasts[1:]]
    leaves = [RingLeaf(0, column, *life) for column, life in enumerate(lives)]
    return RingRows.of(program, RingPool((None,), tuple(leaves)), case.layers_per_chunk).counts


@functools.cache
def memory(schedule, microbatches):
    """Bytes of temporaries, and the plan."""
    branches = {} if schedule == "branch_free" else BRANCHES
    plan, traced = trace_gradients(Case(schedule, hop_ticks=2, **branches), microbatches)
    return traced.lower().compile().memory_analysis().temp_size_in_bytes, plan


FEW, MANY = 8, 24


def slot_bytes():
    """What a microbatch more takes where all are kept: residuals, and the stream of the head."""
    return (memory("gpipe", MANY)[0] - memory("gpipe", FEW)[0]) / (MANY - FEW)


def test_memory_of_gpipe_grows_by_a_slot_for_each_microbatch():
    bytes_of_few, plan = memory("gpipe", FEW)
    assert max(plan.tick_program.ticks.schedule.in_flight) == FEW
    # All there is but for the rings does not grow.
    assert 0 < bytes_of_few - FEW * slot_bytes() < 3 * slot_bytes()


@pytest.mark.parametrize("schedule", ["branch_free", "1f1b", "latency_hiding"])
def test_memory_of_others_does_not_grow(schedule):
    few, many = (memory(schedule, count)[0] for count in (FEW, MANY))
    # The table has more ticks; no tensor is larger.
    assert abs(many - few) < slot_bytes() / 4
    assert many < memory("gpipe", MANY)[0] / 2


def test_latency_hiding_stays_under_its_limit():
    taken, plan = memory("latency_hiding", MANY)
    limit = Case("latency_hiding").limit
    assert max(plan.tick_program.ticks.schedule.in_flight) <= limit
    without_rings = memory("gpipe", FEW)[0] - FEW * slot_bytes()
    assert taken < without_rings + (limit + 0.5) * slot_bytes()
    assert memory("1f1b", MANY)[0] > taken, "which needs more"
