"""The bytes that a site sends over `dc` in one step: predicted, and as the compiler has it."""

import dataclasses

import jax

from geojax.hlo import HloParseError, Traffic, collective_traffic
from geojax.planner.passes import longest_loop
from geojax.quantities import quantity
from geojax.step.plan import StepPlan


@dataclasses.dataclass(frozen=True)
class CrossSiteBytes:
    """Bytes that all devices of a site together send over `dc` in one step, the mean of sites."""

    predicted: float
    """The bytes that the step asks for, before the compiler."""
    compiled: float | None = None
    """The bytes read from the compiled program; None where its text was not or cannot be read."""
    unreadable: str = ""
    """The reason why the text of the compiled program cannot be read."""

    @property
    def bytes(self) -> float:
        """The compiled program's bytes where they are known, otherwise the predicted ones."""
        return self.predicted if self.compiled is None else self.compiled

    def __str__(self) -> str:
        line = f"predicted {quantity(self.predicted, 'B')} over dc"
        if self.compiled is None:
            return line
        return f"{line}, compiled {quantity(self.compiled, 'B')}"


def cross_site_bytes(
    traffic: Traffic, plan: StepPlan, program: jax.stages.Compiled | None = None
) -> CrossSiteBytes:
    """Sum the bytes of a step over `dc`, and read them from the compiled `program` if given.

    Text that cannot be read is no error: the figure is for the log.

    Args:
        traffic: the collectives of the step, from `geojax.planner.step_traffic`.
        plan: how the step runs.
        program: the compiled step.
    """
    sites = plan.mesh.shape["dc"]
    predicted = float(traffic.total_bytes_over("dc") / sites)
    if program is None:
        return CrossSiteBytes(predicted)
    try:
        compiled = collective_traffic(program, plan.mesh, longest_loop=longest_loop(plan))
    except HloParseError as error:
        return CrossSiteBytes(predicted, unreadable=str(error))
    return CrossSiteBytes(predicted, float(compiled.total_bytes_over("dc") / sites))
