"""The steps of a batch ramp: the order of work, and the time, of each smaller size."""

import dataclasses
from collections.abc import Callable

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.pipeline.schedule import Schedule, TickTable
from geojax.planner.resolve.pipeline_plan import choose_hop_ticks, within_memory
from geojax.planner.resolve.run_prediction import step_figure
from geojax.step.plan import StepPlan
from geojax.step.resolved import PipelineOrder, SmallerStep


def smaller_steps(
    config: RunConfig, order: Callable[[RunConfig], Schedule | TickTable] | None
) -> tuple[SmallerStep, ...]:
    """Resolve the steps of `batch.ramp`, ascending; () without one.

    Args:
        config: the run.
        order: returns the order of the stages' work in the run with another batch; None: there is
            no pipeline.

    Raises:
        UserError: the schedule cannot take the microbatches of a size.
    """
    steps = []
    for size in config.batch.sizes.smaller:
        sized = config.of_batch(size)
        try:
            made = None if order is None else PipelineOrder.of(order(sized))
        except UserError as error:
            raise UserError(
                f"batch.ramp: a batch of {size} sequences has {sized.batch.microbatches} "
                f"microbatches in a pipeline: {error}"
            ) from None
        steps.append(SmallerStep(global_batch_size=size, pipeline=made, seconds=step_figure(sized)))
    return tuple(steps)


def ticks_of_size(config: RunConfig, plan: StepPlan) -> TickTable:
    """Return the ticks of a run with a smaller batch than that of its plan.

    Args:
        config: the run with that batch.
        plan: the step of the full batch, which has settled layers, ticks of hops and the head.

    Raises:
        UserError: the schedule cannot take so few microbatches, or keep within its memory.
    """
    staged, program = plan.staged_layers, plan.tick_program
    assert staged is not None, "ticks are those of a pipeline"
    assert program is not None, "a pipeline in one program has ticks"
    config = config.changed(pipeline=plan.layout.pipeline)
    table = choose_hop_ticks(config, staged).table
    layout = plan.layout.of_batch(config.batch.global_batch_size)
    sized = dataclasses.replace(plan, layout=layout, tick_program=program.of_table(table))
    made = within_memory(config, sized).tick_program
    assert made is not None, "a pipeline keeps its ticks"
    return made.ticks
