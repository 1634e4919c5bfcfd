"""Comparison of a run's measured steps with its plan, window by window, as events and metrics."""

import dataclasses
import statistics
from collections.abc import Callable, Mapping

from geojax.islands.traffic import LinkTraffic
from geojax.step.resolved import Step
from geojax.topology import Topology
from geojax.train.links.deviations import (
    WINDOWS,
    LinkFigures,
    LinkRequest,
    StepFigures,
    changed_links,
    deviations,
    is_unexplained,
)
from geojax.transport import MeasuredLink


@dataclasses.dataclass(frozen=True)
class Plan:
    """Figures of a step by the run's topology."""

    figures: StepFigures
    relative_error: float | None = None
    """Share by which the predicted time of a step may be wrong; None: it was never validated."""


def plan_of_step(step: Step, topology: Topology | None, site: str) -> Plan | None:
    """Return what is expected of a run's step, and of the links of a site.

    Args:
        step: the run's.
        topology: its sites and links.
        site: name of the site; one that the topology does not know has no links.

    Returns:
        The plan; None for one site, or without a topology.
    """
    if topology is None or step.layout.mesh.dc == 1:
        return None
    links = {
        other: LinkFigures(link.round_trip_seconds, link.bytes_per_second)
        for other, link in topology.links_of(site).items()
    }
    return _plan_of(step, links)


def _plan_of(step: Step, links: Mapping[str, LinkFigures]) -> Plan:
    if step.seconds is None:
        return Plan(StepFigures(None, links))
    return Plan(StepFigures(step.seconds.value, links), step.seconds.relative_error)


class PlanComparison:
    """The windows of a run so far, on one process of a site.

    The first window tells the run's own pace, to which later ones are held; links are held to the
    plan.

    Args:
        plan: the run's.
        interval: steps of a window.
        measured_links: returns what was measured of the link to each other site since the last
            call.
        tell: shows an event of a step to the user, and notes it.
        write: records metrics of a step.
    """

    def __init__(
        self,
        plan: Plan,
        interval: int,
        measured_links: Callable[[], Mapping[str, MeasuredLink]],
        tell: Callable[[int, str], None],
        write: Callable[[int, Mapping[str, float]], None],
    ):
        self._interval, self._tell, self._write = interval, tell, write
        self._plan = plan
        self.restart(None, measured_links)

    def restart(
        self, plan: Plan | None, measured_links: Callable[[], Mapping[str, MeasuredLink]]
    ) -> None:
        """Take the next window for the run's own pace.

        Args:
            plan: holds from now on; None: the plan stays.
            measured_links: as in `Comparison`.
        """
        self._plan, self._measured_links = plan or self._plan, measured_links
        self._expected: StepFigures | None = None
        self._windows: list[StepFigures] = []
        self._told: set[tuple[str, str | None]] = set()
        self._steps: list[tuple[float, Mapping[str, LinkTraffic]]] = []
        self._warming_up = True

    def restart_with(
        self, step: Step, measured_links: Callable[[], Mapping[str, MeasuredLink]]
    ) -> None:
        """Take the next window for the pace of a step of another batch, over the same links."""
        self.restart(_plan_of(step, self._plan.figures.links), measured_links)

    def record(self, step: int, seconds: float, links: Mapping[str, LinkTraffic]) -> None:
        """Count a step; at the end of a window compare, and log what deviates since this window."""
        if self._warming_up:  # compilers, caches and TCP find their pace in the first step
            self._warming_up = False
            self._measured_links()
            return
        self._steps.append((seconds, links))
        if len(self._steps) < self._interval:
            return
        window = self._window()
        self._steps = []
        self._write(step, _metrics(window, self._plan.figures.links))
        if self._expected is None:
            self._begin(step, window)
        self._windows = [*self._windows, window][-WINDOWS:]
        self._compare(step, window)

    def request(self) -> LinkRequest:
        """Return what the windows so far ask of a new plan."""
        if self._expected is None:
            return LinkRequest()
        return LinkRequest(
            changed_links(self._expected, self._windows),
            is_unexplained(self._expected, self._windows),
        )

    def _window(self) -> StepFigures:
        seconds = statistics.median(seconds for seconds, _ in self._steps)
        measured = self._measured_links()
        _, newest = self._steps[-1]
        waits = {
            site: {
                cause: statistics.fmean(links[site].wait_seconds[cause] for _, links in self._steps)
                for cause in traffic.wait_seconds
            }
            for site, traffic in newest.items()
        }
        return StepFigures(
            seconds,
            {
                site: LinkFigures(*measured.get(site, MeasuredLink()), waits.get(site))
                for site in dict.fromkeys([*measured, *waits])
            },
        )

    def _begin(self, step: int, window: StepFigures) -> None:
        """Expect the first window's pace from now on, and log how it compares with the plan's."""
        planned = self._plan.figures
        links = {
            site: dataclasses.replace(
                link,
                **{
                    name: value
                    for name, value in vars(planned.links.get(site, LinkFigures())).items()
                    if value is not None
                },
            )
            for site, link in window.links.items()
        }
        self._expected = StepFigures(window.step_seconds, links)
        if planned.step_seconds is None or window.step_seconds is None:
            return
        slower, error = window.step_seconds / planned.step_seconds - 1, self._plan.relative_error
        known = "unvalidated" if error is None else f"known to {error:.0%}"
        self._tell(
            step,
            f"a step takes {window.step_seconds:.3g} s, {slower:+.0%} of the plan's "
            f"{planned.step_seconds:.3g} s ({known}); later steps are compared with this one",
        )

    def _compare(self, step: int, window: StepFigures) -> None:
        assert self._expected is not None, "the first window gives it"
        found = deviations(self._expected, window)
        for each in found:
            if (each.kind, each.site) not in self._told:
                self._tell(step, each.text)
        told: set[tuple[str, str | None]] = {(each.kind, each.site) for each in found}
        if self._told and not told:
            self._tell(step, "steps and links are as expected again")
        self._told = told


def _metrics(window: StepFigures, planned: Mapping[str, LinkFigures]) -> dict[str, float]:
    """Return what a window adds to the metrics of its steps; `planned` is of the topology."""
    values = {}
    for site, link in window.links.items():
        if link.round_trip_seconds is not None:
            values[f"link/{site}/round_trip_seconds"] = link.round_trip_seconds
        if link.bytes_per_second is not None:
            values[f"link/{site}/bytes_per_second"] = link.bytes_per_second
            rate = planned.get(site, LinkFigures()).bytes_per_second
            if rate is not None:
                values[f"link/{site}/topology_bytes_per_second"] = rate
    return values
