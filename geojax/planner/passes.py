"""Passes of a step through the layers of the model, and their number."""

from geojax.models import AnyModel
from geojax.pipeline.schedule import Kind
from geojax.step.plan import StepPlan


def passes_of(plan: StepPlan, kind: Kind) -> int:
    """Count the passes of one kind, forwards or backwards, of a step.

    There is one a microbatch; in a pipeline one a tick of the loops that hold it.
    """
    if plan.tick_program is None:
        return plan.layout.batch.microbatches
    return sum(
        kind in form.kinds for segment in plan.tick_program.segments for _, form in segment.ticks()
    )


def heads_of(plan: StepPlan) -> int:
    """Count the heads of a step in its program: one a pass, or of those that stages share."""
    program = plan.tick_program
    if program is None or not program.shares_head:
        return passes_of(plan, Kind.BACKWARD)
    return sum(form.head for segment in program.segments for _, form in segment.ticks())


def layers_of_pass(model: AnyModel, plan: StepPlan) -> int:
    """Count the layers of a pass: the model's; in a pipeline those of the longest chunk."""
    return longest_loop(plan) or model.num_stacked_layers


def longest_loop(plan: StepPlan) -> int | None:
    """Return the iterations of the longest loop whose length is data: over a chunk's layers."""
    return plan.staged_layers.max_layers_per_chunk if plan.staged_layers else None
