"""Every layout gives the loss and the gradients of one device that knows of no layout."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec
from support.small_models import LAYOUTS, ROWS, SEQUENCE, make_batch, model_of

from geojax import make_mesh
from geojax.models import init_parameters, loss_sum
from geojax.optim import OptimizerSettings, layout, learning_rate_schedule, make_optimizer
from geojax.precision import policy
from geojax.train.batches import global_batch, global_signals, rows_of_process
from geojax.train.state import initial_state, state_layouts
from geojax.train.step import (
    BATCH_SPEC,
    StepPlan,
    batch_shape,
    lower_step,
    mean_gradients,
    signals_shape,
)


def setting(family, precision):
    """A model with its parameters, a batch, and a dropout key where the model has dropout."""
    model = model_of(family)
    parameters = init_parameters(model, jax.random.key(1), policy(precision).master_dtype)
    return (
        model,
        parameters,
        make_batch(model),
        jax.random.key(7) if model.dropout else None,
    )


@functools.cache
def reference(family, precision):
    """Loss and gradient of the whole batch on one device, without a mesh or a collective."""
    model, parameters, batch, dropout_key = setting(family, precision)

    def mean(parameters):
        loss, count = loss_sum(parameters, batch, model, dropout_key=dropout_key)
        return loss / count

    return jax.jit(jax.value_and_grad(mean))(parameters)


def on_layout(family, precision, axes, accumulation, **communication):
    """The same through the gradient half of the training step."""
    model, parameters, batch, dropout_key = setting(family, precision)
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    layouts = layout.parameter_layouts(parameters, mesh)
    plan = StepPlan(mesh, policy(precision), accumulation, **communication)
    specs = jax.tree.map(lambda place: place.spec(), layouts)

    def gradients_and_metrics(shards, rows, signals):
        return mean_gradients(
            shards,
            rows,
            signals,
            layouts=layouts,
            model=model,
            plan=plan,
            dropout_key=dropout_key,
        )

    program = jax.shard_map(
        gradients_and_metrics,
        mesh=mesh,
        in_specs=(specs, BATCH_SPEC, BATCH_SPEC),
        out_specs=(specs, PartitionSpec()),
        check_vma=True,
    )
    padded = jax.tree.map(lambda leaf, place: place.pad(leaf), parameters, layouts)
    shards = jax.device_put(padded, layout.shardings(layouts, mesh))
    rows = global_batch(mesh, ROWS, rows_of_process(mesh, ROWS), batch)
    signals = jnp.zeros(signals_shape(mesh).shape)
    gradients, metrics = jax.jit(program)(shards, rows, signals)
    return metrics["loss"], layout.trim(gradients, layouts, mesh)


def assert_equal_gradients(actual, expected, tolerance, zero_leaves=()):
    """Each leaf within `tolerance` of its largest entry; `zero_leaves` are zero in exact arithmetic
    and hold nothing but rounding noise, which is compared with the largest gradient of all."""
    largest = max(np.abs(leaf).max() for leaf in jax.tree.leaves(expected))

    def compare(path, leaf, wanted):
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        leaf, wanted = np.asarray(leaf), np.asarray(wanted)
        if name in zero_leaves:
            noise = 10 * np.finfo(leaf.dtype).eps * largest
            assert max(np.abs(leaf).max(), np.abs(wanted).max()) <= noise, f"{name} is not zero"
            return
        error = np.abs(leaf - wanted).max() / np.abs(wanted).max()
        assert error <= tolerance, f"{name}: {error:.2e} of the largest"

    jax.tree_util.tree_map_with_path(compare, actual, expected)


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("family", "precision", "tolerance"),
    [
        ("gpt3", "fp64", 1e-10),
        ("llama", "fp64", 1e-10),
        ("nemotron", "fp64", 1e-10),
        ("llama", "fp32", 1e-5),
    ],
)
def test_loss_and_gradients_equal_those_of_one_device(family, precision, tolerance, name):
    axes, accumulation = LAYOUTS[name]
    with jax.enable_x64(precision == "fp64"):
        loss, gradients = reference(family, precision)
        actual_loss, actual = on_layout(family, precision, axes, accumulation, chunk_bytes=4096)
        assert abs(actual_loss - loss) <= tolerance * abs(loss)
        # Softmax does not see what a key bias adds to all scores of a query alike.
        zero = ("layers.attention.key.bias",) if family == "gpt3" else ()
        assert_equal_gradients(actual, gradients, tolerance, zero)


def test_a_chunk_size_changes_nothing_but_the_messages():
    with jax.enable_x64(True):
        losses, gradients = zip(
            *(
                on_layout("llama", "fp64", {"dc": 2, "data": 4}, 1, chunk_bytes=size)
                for size in (None, 1024, 2**24)
            ),
            strict=True,
        )
    assert losses[0] == losses[1] == losses[2]
    assert_equal_gradients(gradients[1], gradients[0], 1e-14)
    assert_equal_gradients(gradients[2], gradients[0], 1e-14)


def train(axes, steps, *, accumulation=1, wreck=(), schedule_steps=None):
    """Losses of a few steps on one batch after another; steps in `wreck` see a NaN in one row."""
    model = model_of("llama")
    settings = OptimizerSettings(peak_learning_rate=1e-2, warmup_steps=5)
    schedule = learning_rate_schedule(settings, schedule_steps or steps)
    optimizer = make_optimizer(settings, schedule_steps or steps)
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    plan = StepPlan(mesh, policy("fp32"), accumulation, chunk_bytes=4096)
    layouts = state_layouts(model, optimizer, mesh, plan.policy.master_dtype)
    lowered = lower_step(layouts, model, plan, optimizer, schedule, batch_shape(ROWS, SEQUENCE))
    program = lowered.compile()
    state, history = initial_state(model, optimizer, layouts, mesh, 3), []
    for step in range(steps):
        batch = make_batch(model, seed=step)
        if step in wreck:
            batch["loss_mask"][5, 7] = np.nan
        signals = global_signals(mesh, {"stop": step == 1, "save": False})
        rows_on_mesh = global_batch(mesh, ROWS, rows_of_process(mesh, ROWS), batch)
        state, metrics = program(state, rows_on_mesh, signals, np.uint32(0))
        history.append(jax.device_get(metrics))
    return state, history


@pytest.mark.parametrize(
    ("axes", "accumulation"), [({"dc": 2, "data": 4}, 1), ({"dc": 3, "data": 2}, 2)]
)
def test_twenty_steps_stay_together_on_every_layout(axes, accumulation):
    _, alone = train({"data": 1}, 20)
    _, spread = train(axes, 20, accumulation=accumulation)
    losses = [[step["loss"] for step in history] for history in (alone, spread)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=0, atol=1e-4)
    assert losses[0][-1] < losses[0][0] - 0.05, "the model should have learned something"


def test_the_same_layout_gives_the_same_bits():
    one, history = train({"dc": 2, "data": 2}, 6)
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
    before, _ = train({"dc": 2, "data": 2}, 4, schedule_steps=5)
    after, history = train({"dc": 2, "data": 2}, 5, wreck={4})
    assert int(history[-1]["skipped"]) == 1
    assert int(after.step) == int(before.step) + 1
    jax.tree.map(np.testing.assert_array_equal, after.parameters, before.parameters)
    jax.tree.map(np.testing.assert_array_equal, after.optimizer, before.optimizer)


def test_what_one_process_asks_every_process_hears():
    _, history = train({"dc": 2, "data": 2}, 3)
    assert [float(step["stop"]) for step in history] == [0, 1, 0]
    assert [float(step["save"]) for step in history] == [0, 0, 0]
