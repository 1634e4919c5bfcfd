"""Ten training steps with every optimizer, in float64, equal `jax.grad` and optax on one device.

Whole steps: batches in, weights out. One of eleven batches is not finite, and its step is skipped.
Parameter groups give each optimizer leaves of one model, so that one program is for all of them.
"""

import dataclasses
import functools
import math

import jax
import numpy as np
import optax
import pytest
from support import whole_state
from support.drawn_layouts import SEQUENCE, Draw
from support.optax_chains import average_of_optax, chain_of_optax
from support.plans import step_plan_on
from support.small_models import make_batch

from geojax import make_mesh
from geojax.models import init_parameters, loss_sum, parameter_kinds, parameter_shapes
from geojax.named_arrays import leaves_by_name
from geojax.optim import (
    OPTIMIZERS,
    OptimizerSettings,
    learning_rate_schedule,
    make_optimizer,
)
from geojax.optim.averages import restart_average
from geojax.optim.optimizer import ParameterGroup
from geojax.pipeline import Placement, tick_table
from geojax.pipeline.execution.tick_program import TickProgram
from geojax.precision import policy
from geojax.sharding import leaf_layouts
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.program import batch_shape, lower_step
from geojax.step.stage_layers import StagedLayers
from geojax.step.state import initial_state, state_layouts

STEPS, BAD_STEP, SEED, ROWS = 11, 4, 3, 8
MODEL = Draw("llama", "dropless", 2, 0.0, (), 1, ()).model()
MODEL = MODEL.model_copy(update={"tie_word_embeddings": False})
KIND_OF = parameter_kinds(MODEL)
RATES = {"warmup_steps": 3, "peak_learning_rate": 1e-2}
GROUPS = {
    "adafactor": r"experts\.gate|query",
    "muon": r"experts\.up|attention\.output",
    "lion": r"experts\.down|attention\.key",
    "sgd": r"value|norm",
}
EACH = OptimizerSettings(
    **RATES,
    ema_decay=0.9,
    groups=tuple(ParameterGroup(pattern=GROUPS[name], optimizer=name) for name in GROUPS),
)
"""AdamW with an average of the weights, and in groups the optimizers that can be beside it."""
SCHEDULE_FREE = OptimizerSettings(**RATES, name="schedule_free_adamw", schedule="constant")


PLACEMENT = Placement.linear(2)
PIPELINE = {
    "microbatches": 2,
    "staged_layers": StagedLayers(PLACEMENT, (1, 1)),
    "tick_program": TickProgram.of(tick_table("1f1b", PLACEMENT, 2, [1]), branch_free=True),
}
CASES = {
    "zero-0": (EACH, {"dc": 2, "data": 2}, {"zero_stage": 0, "microbatches": 2}),
    "zero-2-expert": (EACH, {"dc": 2, "data": 2, "expert": 2}, {"zero_stage": 2}),
    "zero-3-tensor": (EACH, {"dc": 2, "data": 2, "tensor": 2}, {"zero_stage": 3}),
    # State of ZeRO 1.
    "pipeline": (EACH, {"dc": 2, "stage": 2, "data": 2}, PIPELINE),
    "schedule-free-pipeline": (SCHEDULE_FREE, {"stage": 2, "tensor": 2}, PIPELINE),
}


def batch_of(step):
    batch = make_batch(MODEL, seed=step, rows=ROWS, sequence=SEQUENCE)
    if step == BAD_STEP:
        batch["loss_mask"][5, 7] = np.nan
    return batch


@functools.cache
def start():
    initial = functools.partial(init_parameters, MODEL, dtype=policy("fp64").master_dtype)
    return jax.jit(initial)(jax.random.key(SEED))


@functools.cache
def of_optax(settings):
    """Parameters and their average after the finite steps, on one device and without a mesh."""
    optimizer = chain_of_optax(settings, STEPS, KIND_OF)

    @jax.jit
    def step(parameters, state, average, batch):
        sums, gradients = jax.value_and_grad(
            lambda parameters: loss_sum(parameters, batch, MODEL), has_aux=True
        )(parameters)
        mean = jax.tree.map(lambda leaf: leaf / sums[1], gradients)
        updates, state = optimizer.update(mean, state, parameters)
        parameters = optax.apply_updates(parameters, updates)
        return parameters, state, average_of_optax(settings, parameters, state, average)

    parameters = start()
    carry = parameters, optimizer.init(parameters), parameters
    for number in range(STEPS):
        if number != BAD_STEP:
            carry = step(*carry, batch_of(number))
    parameters, _, average = jax.device_get(carry)
    return parameters, average


def on_layout(settings, axes, options):
    """The same of as many calls of the training step."""
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    plan = step_plan_on(mesh, policy("fp64"), **options)
    optimizer = make_optimizer(settings, STEPS, KIND_OF)
    layouts = state_layouts(MODEL, optimizer, plan)
    schedule = learning_rate_schedule(settings, STEPS)
    program = lower_step(
        layouts, MODEL, plan, optimizer, schedule, batch_shape(ROWS, SEQUENCE)
    ).compile()
    pad = jax.jit(
        lambda tree: jax.tree.map(lambda leaf, own: own.pad(leaf), tree, layouts.parameters),
        out_shardings=leaf_layouts.shardings(layouts.parameters, mesh),
    )
    # Weights drawn on another layout are others in the last bit of a float32.
    first, drawn = pad(start()), initial_state(MODEL, optimizer, layouts, plan, SEED)
    state = dataclasses.replace(
        drawn, parameters=first, optimizer=restart_average(drawn.optimizer, first)
    )
    share = sequences_of_process(plan, ROWS)
    signals = global_signals(plan, {"stop": False, "save": False})
    for number in range(STEPS):
        rows = global_batch(plan, ROWS, share, batch_of(number))
        state, _ = program(state, rows, signals, np.uint32(0))
    assert int(state.skipped) == 1
    both = state.parameters, state.evaluated_weights
    return [whole_state.on_host(tree, layouts.parameters) for tree in both]


def test_each_optimizer_has_leaves():
    used = {
        EACH.of_leaf(name, KIND_OF(name)).optimizer
        for name in leaves_by_name(parameter_shapes(MODEL))
    }
    assert used | {SCHEDULE_FREE.name} == set(OPTIMIZERS)


@pytest.mark.parametrize("name", CASES)
def test_ten_steps_equal_those_of_one_device(name):
    settings, axes, options = CASES[name]
    with jax.enable_x64():
        expected = of_optax(settings)
        actual = leaves_by_name(on_layout(settings, axes, options))
        for leaf, wanted in leaves_by_name(list(expected)).items():
            error = np.abs(np.asarray(actual[leaf]) - wanted).max() / np.abs(wanted).max()
            assert error <= 1e-10, f"{leaf}: {error:.2e} of the largest"
