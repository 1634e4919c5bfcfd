"""Every layout gives the loss and the gradients of one device that knows of no layout."""

import functools
import math

import jax
import numpy as np
import pytest
from support.distances import assert_no_further_than, distances
from support.equality import (
    assert_equal_gradients,
    exact_reference,
    gradients_of_step,
    on_layout,
    setting,
)
from support.plans import step_plan_on
from support.small_models import ROWS, SEQUENCE, make_batch, model_of

from geojax import make_mesh
from geojax.collectives import BFLOAT16
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import policy
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import initial_state, state_layouts

STEPS = 20


def test_a_chunk_size_changes_nothing_but_the_messages():
    with jax.enable_x64(True):
        losses, gradients = zip(
            *(
                on_layout("llama", "fp64", {"dc": 2, "data": 4}, 1, bucket_bytes=size)
                for size in (None, 1024, 2**24)
            ),
            strict=True,
        )
    assert losses[0] == losses[1] == losses[2]
    assert_equal_gradients(gradients[1], gradients[0], 1e-14)
    assert_equal_gradients(gradients[2], gradients[0], 1e-14)


def without_a_microbatch(batch):
    """The rows that each rank computes second have no loss."""
    mask = batch["loss_mask"].copy()
    mask.reshape(4, 2, -1, mask.shape[1])[:, 1] = 0
    return batch | {"loss_mask": mask}


FAULTS = {
    "a microbatch is dropped": ({}, without_a_microbatch, {}),
    "the attention's scale is lost": ({"query_pre_attn_scalar": 1}, dict, {}),
    "sums are rounded between sites": ({}, dict, {"wire_format": BFLOAT16}),
}
"""Changes of the model, of the batch and of the plan."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_fp32_is_further_from_float64_than_rounding(fault):
    changes, change_batch, options = FAULTS[fault]
    model, parameters, batch, dropout_key = setting("llama", "fp32")
    mesh = make_mesh(devices=jax.devices()[:4], dc=2, data=2)
    plan = step_plan_on(mesh, policy("fp32"), microbatches=2, bucket_bytes=4096, **options)
    wrong = model.replace(**changes), parameters, change_batch(batch), dropout_key
    exact, one_device = exact_reference("llama")
    found = distances(gradients_of_step(*wrong, plan), exact)
    with pytest.raises(AssertionError, match="further from float64 than 4 times one device"):
        assert_no_further_than(one_device, found)


@functools.cache
def compiled(axes, microbatches, precision="fp32"):
    """The plan of a layout, a function that makes the first state, and the training step."""
    model = model_of("llama")
    settings = OptimizerSettings(peak_learning_rate=1e-2, warmup_steps=5)
    schedule = learning_rate_schedule(settings, STEPS)
    optimizer = make_optimizer(settings, STEPS)
    mesh = make_mesh(devices=jax.devices()[: math.prod(dict(axes).values())], **dict(axes))
    plan = step_plan_on(mesh, policy(precision), microbatches, bucket_bytes=4096)
    layouts = state_layouts(model, optimizer, plan)
    lowered = lower_step(layouts, model, plan, optimizer, schedule, batch_shape(ROWS, SEQUENCE))
    start = functools.partial(initial_state, model, optimizer, layouts, plan, 3)
    return plan, start, lowered.compile()


def train(axes, steps, *, microbatches=1, precision="fp32", wreck=()):
    """Losses of a few steps on one batch after another; steps in `wreck` see a NaN in one row."""
    model = model_of("llama")
    plan, start, program = compiled(tuple(axes.items()), microbatches, precision)
    state, history = start(), []
    for step in range(steps):
        batch = make_batch(model, seed=step)
        if step in wreck:
            batch["loss_mask"][5, 7] = np.nan
        signals = global_signals(plan, {"stop": step == 1, "save": False})
        rows_on_mesh = global_batch(plan, ROWS, sequences_of_process(plan, ROWS), batch)
        state, metrics = program(state, rows_on_mesh, signals, np.uint32(0))
        history.append(jax.device_get(metrics))
    return state, history


def losses_of(history):
    return {"losses": np.array([step["loss"] for step in history])}


@functools.cache
def exact_losses():
    """The losses of twenty steps on one device in float64, from the same weights."""
    with jax.enable_x64(True):
        return losses_of(train({"data": 1}, STEPS, precision="fp64")[1])


@pytest.mark.parametrize(
    ("axes", "microbatches"), [({"dc": 2, "data": 4}, 1), ({"dc": 3, "data": 2}, 2)]
)
def test_twenty_steps_stay_together_on_every_layout(axes, microbatches):
    exact = exact_losses()
    alone = losses_of(train({"data": 1}, STEPS)[1])
    spread = losses_of(train(axes, STEPS, microbatches=microbatches)[1])
    assert_no_further_than(distances(alone, exact), distances(spread, exact))
    assert alone["losses"][-1] < alone["losses"][0] - 0.05, "the model should have learned"


def test_the_same_layout_gives_the_same_bits():
    one, history = train({"dc": 2, "data": 2}, 6)
    compiled.cache_clear()
    two, again = train({"dc": 2, "data": 2}, 6)
    assert [step["loss"] for step in history] == [step["loss"] for step in again]
    jax.tree.map(np.testing.assert_array_equal, one.parameters, two.parameters)


def test_a_step_that_is_not_finite_is_skipped_by_all_and_counted():
    _, history = train({"dc": 2, "data": 2}, 6, wreck={2, 3})
    assert [int(step["skipped"]) for step in history] == [0, 0, 1, 2, 2, 2]
    assert [int(step["skipped_in_a_row"]) for step in history] == [0, 0, 1, 2, 0, 0]
    assert np.isfinite([history[step]["loss"] for step in (4, 5)]).all()
    rates = [float(step["learning_rate"]) for step in history]
    assert rates[2] == rates[3] == rates[4], "a skipped step takes no part in the schedule"


def test_a_skipped_step_changes_nothing_but_the_counters():
    before, _ = train({"dc": 2, "data": 2}, 4)
    after, history = train({"dc": 2, "data": 2}, 5, wreck={4})
    assert int(history[-1]["skipped"]) == 1
    assert int(after.step) == int(before.step) + 1
    jax.tree.map(np.testing.assert_array_equal, after.parameters, before.parameters)
    jax.tree.map(np.testing.assert_array_equal, after.optimizer, before.optimizer)


def test_what_one_process_asks_every_process_hears():
    _, history = train({"dc": 2, "data": 2}, 3)
    assert [float(step["stop"]) for step in history] == [0, 1, 0]
    assert [float(step["save"]) for step in history] == [0, 0, 0]
