"""The bytes of a step by axis: in its program, and by the formula."""

from geojax.hlo import collective_traffic
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.traffic import predicted_step_bytes
from geojax.step.program import batch_shape, lower_step
from geojax.step.state import state_layouts


def lowered_step(model, plan, rows, sequence, settings=None):
    """The step, not yet compiled, and what the formula says that a device sends in it."""
    settings = settings or OptimizerSettings()
    optimizer, schedule = make_optimizer(settings, 10), learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    batch = batch_shape(rows, sequence)
    step = lower_step(layouts, model, plan, optimizer, schedule, batch)
    return step, predicted_step_bytes(model, plan, batch, settings).by_axes


def sent_bytes(program, mesh):
    """What a device sends, by the axes of the collectives."""
    sums = collective_traffic(program, mesh).sums()
    return {axes: sum(total.bytes_sent for total in kinds.values()) for axes, kinds in sums.items()}
