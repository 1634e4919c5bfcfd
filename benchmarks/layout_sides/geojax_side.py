"""The step of `geojax train`."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from geojax.optim import make_optimizer
from geojax.step.batches import global_batch, global_signals
from geojax.step.plan import SIGNALS, StepPlan
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import initial_state, state_layouts
from layout_sides.work import MODEL, ROWS, SCHEDULE, SEED, SEQUENCE, SETTINGS, STEPS, host_batch


def geojax_side(plan: StepPlan) -> tuple[jax.stages.Compiled, Any, Callable[[Any], Any]]:
    """The compiled step, its first state, and what takes a step: state to (state, loss)."""
    optimizer = make_optimizer(SETTINGS, STEPS)
    layouts = state_layouts(MODEL, optimizer, plan)
    shapes = batch_shape(ROWS, SEQUENCE)
    program = lower_step(layouts, MODEL, plan, optimizer, SCHEDULE, shapes).compile()
    batch = global_batch(plan, ROWS, range(ROWS), host_batch())
    signals = global_signals(plan, dict.fromkeys(SIGNALS, False))
    seed = np.uint32(SEED)

    def step(state: Any) -> tuple[Any, jax.Array]:
        state, metrics = program(state, batch, signals, seed)
        return state, metrics["loss"]

    return program, initial_state(MODEL, optimizer, layouts, plan, SEED), step
