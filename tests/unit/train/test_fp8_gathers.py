"""Kernels travel as FP8 numbers, and a step is bit by bit that of kernels rounded on arrival."""

import dataclasses
import math

import jax
import numpy as np
import pytest
from support.small_models import SEQUENCE, make_batch

from geojax import make_mesh
from geojax.models import ModelConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.precision import RECIPES, policy
from geojax.train import rounded_kernels
from geojax.train.batches import global_batch, global_signals, rows_of_process
from geojax.train.plan import StepPlan
from geojax.train.state import initial_state, state_layouts
from geojax.train.step import batch_shape, lower_step

STEPS = 2
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
RECIPES_HERE = RECIPES | {"delayed": dataclasses.replace(RECIPES["delayed"], history=4)}


MIXTURE = {"experts": 4, "experts_per_token": 2, "shared_experts": 1}
CASES = {
    # recipe, dtype of what is not FP8, axes, options, sizes of the model
    "delayed": (
        "delayed",
        "bf16",
        {"data": 2, "tensor": 2},
        {"zero_stage": 3, "accumulation": 2, "overlap": True, "remat": "selective"},
        {"key_value_heads": 1},
    ),
    "current": (
        "current",
        "fp64",
        {"dc": 2, "data": 2, "expert": 2},
        {"zero_stage": 3, "shard_across_sites": True, "keep_gathered": True},
        {"mixture": MIXTURE},
    ),
    "block": ("block", "bf16", {"data": 2}, {"zero_stage": 1}, {"hidden": 256}),
}


def trained(case):
    """The losses of some steps, and the state after them."""
    recipe, compute, axes, options, sizes = case
    mesh = make_mesh(devices=jax.devices()[: math.prod(axes.values())], **axes)
    own = dataclasses.replace(policy(compute), recipe=RECIPES_HERE[recipe])
    plan = StepPlan(mesh, own, **options)
    model = ModelConfig(
        **{"layers": 3, "hidden": 32, "heads": 2, "head_dim": 32, "feed_forward": 40} | sizes,
        vocabulary=61,
        maximum_positions=64,
        norm="rmsnorm",
        activation="swiglu",
    )
    rows = 4 * mesh.shape["data"]
    settings = OptimizerSettings(peak_learning_rate=1e-2, warmup_steps=1)
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    lowered = lower_step(layouts, model, plan, optimizer, schedule, batch_shape(rows, SEQUENCE))
    step = lowered.compile(compiler_options=QUICK)
    state = initial_state(model, optimizer, layouts, plan, 3)
    signals = global_signals(plan, {"stop": False, "save": False})
    losses = []
    for number in range(STEPS):
        made = make_batch(model, seed=number, rows=rows)
        batch = global_batch(plan, rows, rows_of_process(plan, rows), made)
        state, metrics = step(state, batch, signals, np.uint32(0))
        losses.append(float(metrics["loss"]))
    return losses, state


@pytest.mark.parametrize("name", CASES)
def test_a_step_is_bit_by_bit_that_of_kernels_rounded_on_arrival(name, monkeypatch):
    with jax.enable_x64(CASES[name][1] == "fp64"):
        losses, state = trained(CASES[name])
        monkeypatch.setattr(rounded_kernels, "travels_rounded", lambda *_: False)
        expected_losses, expected = trained(CASES[name])
        assert losses == expected_losses
        assert losses[0] != losses[1]
        jax.tree.map(np.testing.assert_array_equal, state, expected)
