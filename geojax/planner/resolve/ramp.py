"""The steps of a batch ramp: the order of work, and the time, of each smaller size."""

import dataclasses
from collections.abc import Callable

from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.pipeline.schedule import Schedule, TickTable
from geojax.planner.resolve.pipeline_plan import choose_hop_ticks, within_memory
from geojax.planner.resolve.run_prediction import step_times
from geojax.planner.resolve.run_stages import chosen_layers
from geojax.planner.resolve.site_schedule import event_schedule
from geojax.step.plan import StepPlan
from geojax.step.resolved import PipelineOrder, SmallerStep

Order = Callable[[RunConfig], Schedule | TickTable]
"""Function that returns the order of the stages' work in a run with another batch."""


def smaller_steps(config: RunConfig, order: Order | None) -> tuple[SmallerStep, ...]:
    """Resolve the steps of `batch.ramp`, ascending; () without one.

    Args:
        config: the run.
        order: that of a batch; None: there is no pipeline.

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
        times = step_times(sized)._asdict()
        steps.append(SmallerStep(global_batch_size=size, pipeline=made, **times))
    return tuple(steps)


def order_in_ticks(plan: StepPlan) -> Order | None:
    """Return the function that orders the stages of one program for a smaller batch than its plan.

    Layers, ticks of hops and the head are those of the plan. None: there is no pipeline.
    """
    staged, program = plan.staged_layers, plan.tick_program
    if staged is None or program is None:
        return None

    def order(sized: RunConfig) -> TickTable:
        sized = sized.changed(pipeline=plan.layout.pipeline)
        layout = plan.layout.of_batch(sized.batch.global_batch_size)
        ticks = program.of_table(choose_hop_ticks(sized, staged).table)
        made = within_memory(sized, dataclasses.replace(plan, layout=layout, tick_program=ticks))
        assert made.tick_program is not None, "a pipeline keeps its ticks"
        return made.tick_program.ticks

    return order


def order_by_events(config: RunConfig) -> Order | None:
    """Return the function that orders the stages of islands for a smaller batch, on their layers.

    None: the sites are no stages.
    """
    staged = chosen_layers(config)
    if staged is None:
        return None
    layers = staged.layers_per_chunk
    return lambda sized: event_schedule(sized.changed(pipeline={"layers": layers}))
