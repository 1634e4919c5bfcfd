"""The bytes of a step by axis: counted in its trace, and read from its program."""

from geojax.hlo import collective_traffic
from geojax.models import parameter_kinds
from geojax.optim import OptimizerSettings, learning_rate_schedule, make_optimizer
from geojax.planner.passes import longest_loop
from geojax.planner.step_traffic import step_traffic
from geojax.step.program import batch_shape, trace_step
from geojax.step.state import state_layouts


def traced_step(model, plan, rows, sequence, settings=None):
    """The step, and the count of its collectives."""
    settings = settings or OptimizerSettings()
    optimizer = make_optimizer(settings, 10, parameter_kinds(model))
    schedule = learning_rate_schedule(settings, 10)
    layouts = state_layouts(model, optimizer, plan)
    step = trace_step(layouts, model, plan, optimizer, schedule, batch_shape(rows, sequence))
    return step, step_traffic(step, plan)


def sends_as_counted(model, plan, rows, sequence, settings=None, *, compiled=False):
    """Compare the count of a step with its lowered or compiled program, and return it."""
    step, counted = traced_step(model, plan, rows, sequence, settings)
    program = step.lower()
    for each in (program, program.compile()) if compiled else (program,):
        read = collective_traffic(each, plan.mesh, longest_loop=longest_loop(plan))
        assert by_kind(read) == by_kind(counted)
        assert read.total_bytes_over("dc") == counted.total_bytes_over("dc")
    return counted


def by_kind(traffic):
    """What a device sends, by the axes and the kind of the collectives, and what is uncertain."""
    return {
        (axes, kind): (total.bytes_sent, total.at_least > 0)
        for axes, kinds in traffic.sums().items()
        for kind, total in kinds.items()
        if total.bytes_sent
    }
