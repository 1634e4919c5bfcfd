"""fp16 on every layout: an overflow on one rank skips the step and halves the scale for all."""

import functools

import jax
import numpy as np
import pytest
from support.distances import assert_no_further_than, distances
from support.small_models import ROWS, SEQUENCE, make_batch, model_of

from geojax import make_mesh
from geojax.config.run_config import RunConfig
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.resolve.choices import resolved_plan
from geojax.step.batches import global_batch, global_signals, sequences_of_process
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import initial_state, state_layouts

STEPS, WRECKED, GROW_AFTER = 8, 2, 3
INITIAL = 2.0**10

LAYOUTS = {
    "one-device": {},
    "context-zero3-overlap": {
        "mesh": {"dc": 2, "data": 2, "context": 2},
        "zero": {"stage": 3},
        "communication": {"overlap_grad_reduce": True},
        "microbatches": 2,
        "remat": "selective",
    },
    "sites-as-stages": {
        "mesh": {"dc": 2, "data": 4},
        "dc": {"role": "stage"},
        "pipeline": {"hop_ticks": 2},
        "microbatches": 3,
    },
}


@functools.cache
def train(layout, precision="fp16"):
    """States (before the first step too) and metrics of a few steps, of which one is wrecked."""
    changes = dict(LAYOUTS[layout])
    if precision == "fp16":
        changes["loss_scale"] = {"initial": INITIAL, "grow_after_steps": GROW_AFTER}
    model = model_of("llama")
    config = RunConfig(
        run_directory="unused",
        steps=STEPS,
        model=model,
        data={},
        batch={
            "global_batch_size": ROWS,
            "sequence_length": SEQUENCE,
            "microbatches": changes.pop("microbatches", 1),
        },
        precision=precision,
        optimizer=OptimizerSettings(peak_learning_rate=1e-2, warmup_steps=5),
        **changes,
    )
    sizes = config.mesh.model_dump()
    plan = resolved_plan(config, make_mesh(devices=jax.devices()[: config.mesh.devices], **sizes))
    optimizer = make_optimizer(config.optimizer, STEPS)
    schedule = learning_rate_schedule(config.optimizer, STEPS)
    layouts = state_layouts(model, optimizer, plan)
    shapes = batch_shape(ROWS, SEQUENCE)
    program = lower_step(layouts, model, plan, optimizer, schedule, shapes).compile()
    state = initial_state(model, optimizer, layouts, plan, 3)
    signals = global_signals(plan, {"stop": False, "save": False})
    states, history = [jax.device_get(state)], []
    for step in range(STEPS):
        batch = make_batch(model, seed=step)
        if step == WRECKED:
            # One token of one row, which one rank of one site holds, weighs so much that its
            # gradient leaves the range of float16; the loss, in float32, is a large number.
            batch["loss_mask"][5, 7] = 1e7 if precision == "fp16" else np.nan
        rows = global_batch(plan, ROWS, sequences_of_process(plan, ROWS), batch)
        state, metrics = program(state, rows, signals, np.uint32(0))
        states.append(jax.device_get(state))
        history.append(jax.device_get(metrics))
    return states, history


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_overflow_on_one_rank_halves_the_scale_and_changes_nothing_else(layout):
    states, history = train(layout)
    wrecked = history[WRECKED]
    assert np.isfinite(wrecked["loss"]), "only the gradient overflows"
    assert not np.isfinite(wrecked["gradient_norm"])
    before, after = states[WRECKED], states[WRECKED + 1]
    assert after.loss_scale.scale == before.loss_scale.scale / 2 == INITIAL / 2
    assert (before.loss_scale.clean_steps, after.loss_scale.clean_steps) == (WRECKED, 0)
    jax.tree.map(np.testing.assert_array_equal, after.parameters, before.parameters)
    jax.tree.map(np.testing.assert_array_equal, after.optimizer, before.optimizer)
    counters = [(s.step, s.skipped, s.skipped_in_a_row) for s in states[WRECKED : WRECKED + 3]]
    assert counters == [(2, 0, 0), (3, 1, 1), (4, 1, 0)], "the data goes on"
    rates = [float(metrics["learning_rate"]) for metrics in history]
    assert rates[WRECKED + 1] == rates[WRECKED], "and the schedule does not"


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_scale_grows_after_enough_clean_steps(layout):
    _, history = train(layout)
    half = INITIAL / 2
    scales = [float(metrics["loss_scale"]) for metrics in history]
    assert scales == [INITIAL] * 3 + [half] * GROW_AFTER + [INITIAL] * 2


def clean_steps(history):
    steps = [step for step in range(STEPS) if step != WRECKED]
    return {
        name: np.array([history[step][name] for step in steps])
        for name in ("loss", "gradient_norm")
    }


@functools.cache
def exact_steps():
    """The same without rounding: in float64 the wrecked step is skipped for its NaN."""
    with jax.enable_x64(True):
        return clean_steps(train("one-device", "fp64")[1])


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "one-device"])
def test_every_layout_trains_as_one_device_does(layout):
    (_, alone), (_, spread) = train("one-device"), train(layout)
    exact = exact_steps()
    assert_no_further_than(*(distances(clean_steps(each), exact) for each in (alone, spread)))
    assert alone[-1]["loss"] < alone[0]["loss"] - 0.05, "the model should have learned something"
