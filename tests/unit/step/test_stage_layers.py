"""Weights on pipeline stages: gathered, and their gradients reduced, as the whole model's would be.

Instead of a pipeline each rank multiplies the weights of its stage with a number of its own: the
sum over all ranks that hold a weight is then known for every one.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from support import whole_state
from support.plans import step_plan_on
from support.small_models import drawn_parameters, make_batch, model_of

from geojax import make_mesh
from geojax.collectives import INT8
from geojax.hlo import collective_traffic
from geojax.hlo.conventions import all_reduce_bytes
from geojax.optim import OptimizerSettings, global_norm, make_optimizer
from geojax.pipeline.schedule import Placement
from geojax.planner.program_traffic import program_traffic
from geojax.planner.traffic.by_axes import add, no_bytes
from geojax.planner.traffic.gradients import predicted_gradient_bytes
from geojax.planner.traffic.weights import predicted_weight_bytes
from geojax.precision import policy
from geojax.sharding.stage_assignment import PADDING_LAYER
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.error_feedback import error_layouts
from geojax.step.gather import gather_weights
from geojax.step.grad_reduce import reduce_gradients
from geojax.step.plan import SIGNALS
from geojax.step.stage_layers import StagedLayers, stage_assignments
from geojax.step.state import parameter_layouts
from geojax.step.update import sum_in_site, sum_scalars_over_sites, sum_signals

V_SHAPED = StagedLayers(Placement(2, (0, 1, 1, 0)), (1, 2, 1, 1))
INTERLEAVED = StagedLayers(Placement(4, (0, 1, 0, 1, 2, 3)), (1, 1, 1, 1, 2, 1))


def one_chunk_each(*layers):
    return StagedLayers(Placement(len(layers), tuple(range(len(layers)))), layers)


@dataclasses.dataclass(frozen=True)
class Case:
    axes: dict
    staged: StagedLayers
    role: str
    options: dict = dataclasses.field(default_factory=dict)
    family: str = "gpt3"


SITES_AS_STAGES = Case({"dc": 2, "stage": 2, "data": 2}, one_chunk_each(2, 1, 1, 1), "stage")
CASES = {
    "untied": dataclasses.replace(SITES_AS_STAGES, family="nemotron"),
    "interleaved": dataclasses.replace(SITES_AS_STAGES, staged=INTERLEAVED),
    "zero 0": dataclasses.replace(SITES_AS_STAGES, options={"zero_stage": 0}),
    "three sites": Case({"dc": 3, "data": 2}, one_chunk_each(2, 2, 1), "stage"),
    "a pipeline in each site": Case({"dc": 2, "stage": 2, "data": 2}, one_chunk_each(3, 2), "data"),
    "int8 between the sites": Case(
        {"dc": 2, "stage": 2, "data": 2}, one_chunk_each(3, 2), "data", {"wire_format": INT8}
    ),
    "both ends on one stage": Case({"dc": 2, "stage": 2, "data": 2}, V_SHAPED, "data"),
    "sharded across sites": Case(
        {"dc": 2, "stage": 2, "data": 2},
        one_chunk_each(3, 2),
        "data",
        {"shard_across_sites": True},
    ),
    "sequence parallel": Case(
        {"dc": 2, "stage": 2, "tensor": 2},
        one_chunk_each(1, 2, 1, 1),
        "stage",
        {"sequence_parallel": True},
    ),
    "context": Case({"dc": 2, "stage": 2, "context": 2}, one_chunk_each(1, 2, 1, 1), "stage"),
}
TIED_FACTOR = 10.0
"""Of what the last stage makes of a tied table's gradient; the first stage's is 1."""


def plan_and_model(case):
    devices = jax.devices()[: math.prod(case.axes.values())]
    mesh = make_mesh(devices=devices, **case.axes)
    plan = step_plan_on(
        mesh,
        policy("fp64"),
        bucket_bytes=2**14,
        dc_role=case.role,
        staged_layers=case.staged,
        **case.options,
    )
    return plan, model_of(case.family).model_copy(update={"num_hidden_layers": case.staged.layers})


def reduced_by(plan, layouts):
    """Shards (and errors) to the reduced shards of made-up gradients, the errors, and the norm."""
    stage = plan.staged_layers
    batch_and_context = [*plan.batch_axes, "context"]

    def gradient(leaf, place):
        rank = 1.0 + jax.lax.axis_index(batch_and_context)
        if not place.has_stage_dim:
            held = place.stages.of_this_stage() != PADDING_LAYER
            return leaf * rank * held.reshape(-1, *(1,) * (leaf.ndim - 1))
        mine = jax.lax.axis_index(place.stages.axes)
        factor = jnp.where(mine == stage.last_stage, TIED_FACTOR, 1.0)
        factor = factor if place.stages.shared else 1.0
        # Where a stage does not use a leaf, what it computes may be anything.
        held = place.stages.of_this_stage()[0] != PADDING_LAYER
        return jnp.where(held, leaf * rank * factor, jnp.nan)

    def reduced(shards, errors):
        weights = gather_weights(shards, layouts, plan)
        gradients = jax.tree.map(gradient, weights, layouts)
        summed = reduce_gradients(gradients, errors, layouts, plan)
        return *summed, global_norm(summed.gradients, layouts)

    specs, error_specs = (
        jax.tree.map(lambda place: place.spec(), tree)
        for tree in (layouts, error_layouts(layouts, plan))
    )
    return jax.jit(
        jax.shard_map(
            reduced,
            mesh=plan.mesh,
            in_specs=(specs, error_specs),
            out_specs=(specs, error_specs, PartitionSpec()),
            check_vma=True,
        )
    )


@functools.cache
def run(name):
    case = CASES[name]
    with jax.enable_x64(True):
        plan, model = plan_and_model(case)
        layouts = parameter_layouts(model, plan)
        whole = drawn_parameters(model, plan.policy.master_dtype)
        whole = jax.tree.map(lambda leaf: leaf + 1.0, whole)  # biases are not zero
        program = reduced_by(plan, layouts)
        state = whole_state.pad(whole, layouts, plan.mesh)
        of_errors = error_layouts(layouts, plan)
        errors = jax.tree.map(lambda place: 0.01 * jnp.ones(place.shape), of_errors)
        errors = whole_state.pad(errors, of_errors, plan.mesh)
        traced = program.trace(state, errors)
        compiled = traced.lower().compile()
        summed, errors, norm = compiled(state, errors)
        owed = jax.tree.map(  # what the errors have grown by, all sites together
            lambda leaf, place: np.asarray(leaf - 0.01).sum(place.model_shards[-1].dim),
            whole_state.trim(errors, of_errors, plan.mesh),
            of_errors,
        )
        counted = program_traffic(traced, plan.mesh)
        return plan, layouts, whole, summed, owed, norm, counted, compiled


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_summed_over_those_that_make_a_part_of_them(name):
    plan, layouts, whole, summed, owed, norm, *_ = run(name)
    ranks = math.prod(plan.mesh.shape[axis] for axis in (*plan.batch_axes, "context"))
    of_all = ranks * (ranks + 1) / 2

    def expected(leaf, place):
        times = of_all * (plan.mesh.shape["tensor"] if place.partial else 1)
        return leaf * times * (1 + TIED_FACTOR if place.stages.shared else 1)

    with jax.enable_x64(True):
        wanted = jax.tree.map(expected, whole, layouts)
        actual = whole_state.trim(summed, layouts, plan.mesh)
        close = functools.partial(np.testing.assert_allclose, rtol=1e-12)
        numbers = np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(actual)])
        close(norm, np.linalg.norm(numbers))
        if plan.keeps_error_feedback:
            assert all(np.any(leaf) for leaf in jax.tree.leaves(owed)), "something was rounded"
            jax.tree.map(close, jax.tree.map(jnp.add, actual, owed), wanted)
        else:
            jax.tree.map(close, actual, wanted)
        # Every holder has the same, and there is nothing in empty rows.
        jax.tree.map(close, summed, whole_state.pad(actual, layouts, plan.mesh))


@pytest.mark.parametrize("name", CASES)
def test_bytes_over_each_axis_are_those_of_the_formulas_and_the_norm(name):
    plan, layouts, *_, counted, compiled = run(name)
    _, model = plan_and_model(CASES[name])
    sent = collective_traffic(compiled, plan.mesh).by_axes
    assert sent == counted.by_axes
    predicted = no_bytes()
    add(predicted, predicted_weight_bytes(model, layouts, plan))
    add(predicted, predicted_gradient_bytes(model, layouts, plan))
    for axes in sent.keys() | predicted.keys():
        of_norm = sent.get(axes, 0) - predicted[axes]
        assert 0 <= of_norm < 100, axes
    assert not [axes for axes in sent if "dc" in axes and len(axes) > 1]


def test_an_update_keeps_empty_rows_empty_and_holders_equal():
    plan, layouts, whole, summed, _, norm, *_ = run("interleaved")
    optimizer = make_optimizer(OptimizerSettings(peak_learning_rate=0.1), steps=10)

    @jax.jit
    def update(state):
        updates, _ = optimizer.update(summed, optimizer.init(state), state, norm=norm)
        return optax.apply_updates(state, updates)

    with jax.enable_x64(True):
        updated = update(whole_state.pad(whole, layouts, plan.mesh))
        trimmed = whole_state.trim(updated, layouts, plan.mesh)
        again = whole_state.pad(trimmed, layouts, plan.mesh)
        jax.tree.map(np.testing.assert_array_equal, updated, again)
        changed = jax.tree.map(lambda new, old: bool(jnp.all(new != old)), trimmed, whole)
        assert jax.tree.all(changed)


def test_only_a_tied_table_crosses_between_sites_that_are_stages():
    plan, *_, compiled = run("untied")
    norm = all_reduce_bytes(plan.policy.reduce_dtype.itemsize, plan.mesh.shape["dc"])
    assert collective_traffic(compiled, plan.mesh).bytes_over("dc") == norm


def test_layers_go_chunk_after_chunk():
    assert INTERLEAVED.layers_of_stage == (
        (0, -1, 2, -1),
        (1, -1, 3, -1),
        (4, 5, -1, -1),
        (6, -1, -1, -1),
    )
    assert V_SHAPED.layers_of_stage == ((0, -1, 4, -1), (1, 2, 3, -1))


def test_each_leaf_is_on_the_stages_that_use_it():
    model = model_of("gpt3").model_copy(update={"num_hidden_layers": 5})
    rows = stage_assignments(model, one_chunk_each(2, 1, 2), ("stage",))
    assert rows["embedding"]["tokens"]["embedding"].order == (0, PADDING_LAYER, 0)
    assert rows["embedding"]["positions"]["embedding"].order == (0, PADDING_LAYER, PADDING_LAYER)
    assert rows["final_norm"]["scale"].order == (PADDING_LAYER, PADDING_LAYER, 0)
    assert rows["layers"]["attention"]["query"]["kernel"].layers_of_stage == (
        (0, 1),
        (2, -1),
        (3, 4),
    )
    untied = stage_assignments(model_of("nemotron"), one_chunk_each(1, 2), ("stage",))
    assert untied["head"]["kernel"].order == (PADDING_LAYER, 0)
    assert not untied["embedding"]["tokens"]["embedding"].shared


@pytest.mark.parametrize(("role", "shares"), [("stage", 2), ("data", 4)])
def test_stages_of_a_pipeline_see_the_same_rows(role, shares):
    stages = 4 if role == "stage" else 2
    case = Case({"dc": 2, "stage": 2, "data": 2}, one_chunk_each(*[1] * stages), role)
    plan, model = plan_and_model(case)
    batch = make_batch(model)
    on_mesh = global_batch(plan, 24, sequences_of_process(plan, 24), batch)
    np.testing.assert_array_equal(on_mesh["tokens"], batch["tokens"])
    held = {shard.data.shape for shard in on_mesh["tokens"].addressable_shards}
    assert held == {(24 // shares, 32)}


def test_what_a_process_asks_is_heard_once_from_whatever_stage():
    plan, _ = plan_and_model(SITES_AS_STAGES)
    signals = global_signals(plan, dict.fromkeys(SIGNALS, True))
    assert signals.shape == (8, len(SIGNALS))
    summed = jax.jit(
        jax.shard_map(
            lambda rows: sum_scalars_over_sites(
                sum_in_site(sum_signals(rows, jnp.float32(0))), plan
            ),
            mesh=plan.mesh,
            in_specs=plan.signal_spec,
            out_specs=PartitionSpec(),
            check_vma=True,
        )
    )(signals)
    np.testing.assert_array_equal(summed, 1)
