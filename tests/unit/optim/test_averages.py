"""Averages of the weights: validation, samples and export take them in place of the weights."""

import dataclasses

import jax
import numpy as np
import pytest
from support import whole_state
from support.plans import step_plan_on
from support.small_models import model_of

from geojax import make_mesh
from geojax.checkpoint import Checkpointer
from geojax.checkpoint.reading.initial_weights import with_weights
from geojax.checkpoint.reading.saved_model import SavedModel
from geojax.errors import UserError
from geojax.named_arrays import leaves_by_name
from geojax.optim import OptimizerSettings, make_optimizer
from geojax.precision import policy
from geojax.settings import validate
from geojax.step.program import batch_shape, trace_evaluation
from geojax.step.state import initial_state, state_layouts

MODEL = model_of("llama")
EMA = OptimizerSettings(ema_decay=0.9)
SCHEDULE_FREE = OptimizerSettings(name="schedule_free_adamw", schedule="constant")


def state_with(settings):
    """A plan, its layouts, and a state whose average is one more than its weights."""
    plan = step_plan_on(make_mesh(devices=jax.devices()[:4], dc=2, data=2), policy("fp32"))
    optimizer = make_optimizer(settings, 10)
    layouts = state_layouts(MODEL, optimizer, plan)
    state = initial_state(MODEL, optimizer, layouts, plan, 0)
    jax.tree.map(np.testing.assert_array_equal, state.evaluated_weights, state.parameters)
    *others, last = state.optimizer
    last = last._replace(average=jax.tree.map(lambda leaf: leaf + 1, last.average))
    return plan, layouts, dataclasses.replace(state, optimizer=(*others, last))


def test_a_saved_run_is_read_as_its_average(tmp_path):
    plan, layouts, state = state_with(SCHEDULE_FREE)
    with Checkpointer(tmp_path / "checkpoints", plan.mesh, sites=("a", "b")) as checkpointer:
        checkpointer.save(7, state, layouts, {})
    saved = SavedModel.open(tmp_path)
    average = whole_state.trim(state.evaluated_weights, layouts.parameters, plan.mesh)
    for leaf, expected in leaves_by_name(average).items():
        for indices, values in saved.blocks(leaf):
            np.testing.assert_array_equal(values, np.asarray(expected)[np.ix_(*indices)])
    read = saved.read(layouts.parameters, plan.mesh)
    found = whole_state.trim(read, layouts.parameters, plan.mesh)
    jax.tree.map(np.testing.assert_array_equal, found, average)


def test_a_validation_reads_the_average_and_not_the_weights():
    plan, layouts, _ = state_with(EMA)
    program = trace_evaluation(layouts, MODEL, plan, batch_shape(8, 32)).jaxpr.jaxpr
    (equation,) = [each for each in program.eqns if each.primitive.name == "shard_map"]
    inside = equation.params["jaxpr"]
    used = {id(variable) for each in inside.eqns for variable in each.invars}
    read = [
        name
        for name, variable in zip(leaves_by_name(layouts), program.invars, strict=False)
        if id(inside.invars[equation.invars.index(variable)]) in used
    ]
    weights = leaves_by_name(layouts.parameters)
    assert len(read) == len(weights)
    assert all(".average." in name for name in read)


def test_the_average_of_a_run_starts_at_its_initial_weights(monkeypatch):
    plan, layouts, state = state_with(EMA)
    read = jax.tree.map(lambda leaf: leaf + 2, state.parameters)
    monkeypatch.setattr("geojax.checkpoint.reading.initial_weights.read_weights", lambda *_: read)
    started = with_weights(state, None, layouts.parameters, plan.mesh)
    jax.tree.map(np.testing.assert_array_equal, started.evaluated_weights, read)
    pairs = zip(*map(jax.tree.leaves, (started.evaluated_weights, read)), strict=True)
    assert all(average is not weight for average, weight in pairs), "a step donates both"


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({}, "schedule=constant"),
        ({"schedule": "constant", "ema_decay": 0.9}, "ema_decay=null"),
        ({"schedule": "constant", "beta1": 0}, "beta1 above 0"),
        (
            {"schedule": "constant", "groups": [{"pattern": "x", "optimizer": "lion"}]},
            "no other optimizer in a group",
        ),
    ],
)
def test_an_optimizer_that_averages_refuses_what_it_takes_the_place_of(changes, missing):
    settings = {"name": "schedule_free_adamw", **changes}
    with pytest.raises(UserError, match=f"schedule_free_adamw requires {missing}: it averages"):
        validate(OptimizerSettings, settings, "run.yaml")
