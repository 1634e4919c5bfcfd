"""Steps whose products TransformerEngine makes train as those of the reference, state included."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from support import whole_state
from support.engine import for_hopper, in_plain_jax, needs_transformer_engine
from support.plans import step_plan_on
from support.small_models import make_batch

from geojax import make_mesh
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import policy
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.program import batch_shape, lower_step
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import initial_state, state_layouts

ROWS, SEQUENCE, HISTORY = 8, 32, 4
RECIPE_ERROR = 0.059
"""Of a gradient: what rounding one operand to E4M3 and the other to E5M2 costs."""
MODEL = ModelConfig(
    num_hidden_layers=4,
    hidden_size=32,
    num_attention_heads=2,
    num_key_value_heads=2,
    intermediate_size=64,
    vocab_size=61,
    max_position_embeddings=64,
    norm="rmsnorm",
    hidden_act="silu",
)


def two_stages():
    """Which layers are at the ends only the running program knows; B and W go separately."""
    placement = Placement.linear(2)
    table = tick_table("zero_bubble_h1", placement, 4, [1])
    return {
        "microbatches": 4,
        "dc_role": "stage",
        "staged_layers": StagedLayers(placement, (2, 2)),
        "tick_program": TickProgram.of(table, branch_free=False),
    }


LAYOUTS = {
    # policy, steps (a history is read from the second on), axes, options
    "remat": ("fp8-delayed", 2, {"dc": 2, "tensor": 2}, {"zero_stage": 3, "remat": "selective"}),
    "split": ("fp8-current", 1, {"dc": 2, "tensor": 2}, two_stages()),
}


def trained(backend, name, steps, axes, options):
    """The losses of a few steps, and the state after them."""
    own = policy(name)
    if own.recipe.history:
        recipe = dataclasses.replace(own.recipe, history=HISTORY)
        own = dataclasses.replace(own, recipe=recipe)
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    plan = step_plan_on(mesh, own, fp8_backend=backend, **options)
    settings = OptimizerSettings(peak_learning_rate=1e-2, warmup_steps=1)
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(MODEL, optimizer, plan)
    lowered = lower_step(layouts, MODEL, plan, optimizer, schedule, batch_shape(ROWS, SEQUENCE))
    program = lowered.compile()
    state = initial_state(MODEL, optimizer, layouts, plan, 3)
    signals, losses = global_signals(plan, {"stop": False, "save": False}), []
    for step in range(steps):
        made = make_batch(MODEL, seed=step, rows=ROWS, sequence=SEQUENCE)
        batch = global_batch(plan, ROWS, sequences_of_process(plan, ROWS), made)
        state, metrics = program(state, batch, signals, np.uint32(0))
        losses.append(float(metrics["loss"]))
    return losses, whole_state.trim(state, layouts, plan.mesh)


def relative(made, expected):
    made, expected = (np.asarray(leaf, np.float64) for leaf in (made, expected))
    return np.linalg.norm(made - expected) / np.linalg.norm(expected)


@needs_transformer_engine
@pytest.mark.parametrize("name", LAYOUTS)
def test_losses_gradients_and_histories_are_those_of_the_reference(monkeypatch, name):
    for_hopper(monkeypatch)
    in_plain_jax(monkeypatch)
    losses, state = trained("transformer_engine", *LAYOUTS[name])
    expected_losses, expected = trained("reference", *LAYOUTS[name])
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4)
    # The first moments are the gradients so far.
    (moments,) = (each.mu for each in state.optimizer if hasattr(each, "mu"))
    (wanted,) = (each.mu for each in expected.optimizer if hasattr(each, "mu"))
    for (path, own), other in zip(
        jax.tree.leaves_with_path(moments), jax.tree.leaves(wanted), strict=True
    ):
        assert relative(own, other) < RECIPE_ERROR, f"{jax.tree_util.keystr(path)}"
    histories = jax.tree.leaves_with_path(state.amax_history)
    assert len(histories) == (7 if name == "remat" else 0)
    for (path, own), other in zip(histories, jax.tree.leaves(expected.amax_history), strict=True):
        assert (np.asarray(own)[..., : LAYOUTS[name][1]] > 0).all()
        np.testing.assert_allclose(own, other, rtol=RECIPE_ERROR, err_msg=str(path))
