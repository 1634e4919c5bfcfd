"""A new plan at a checkpoint, for links that are not as they were: the same at every process.

    comparison     three windows in a row are off                       (the process that logs)
    LinkAgreement  all processes agree on what the links are now         (all of them, together)
    Replanning     the step for those links; a runtime with its program  (each, the same)

The layout stays: mesh, stages and chunks, the state of the optimizer and what a checkpoint holds.
"""

import json
import time
from collections.abc import Callable
from typing import Any, TypeVar

from geojax.quantities import quantity
from geojax.step.resolved import Step
from geojax.topology import SiteLink, Topology
from geojax.train.adapt.comparison import PlanComparison, plan_of_step
from geojax.train.links.agreement import LinkAgreement
from geojax.train.links.deviations import LinkRequest, with_links
from geojax.train.runtime import Runtime

State = TypeVar("State")


class Replanning:
    """The new plans of a run.

    Args:
        topology: the sites, and their links as they are taken to be at the start.
        site: name of this process's site.
        links: agrees on the links.
        resolve: returns the step for other links, the same on every process; its second argument
            is the number of steps done.
        comparison: of the run's steps, on the process that logs.
        log: shows a line to the user.
        timeout_seconds: time that a process has to come.
    """

    def __init__(
        self,
        topology: Topology,
        site: str,
        links: LinkAgreement,
        resolve: Callable[[Topology, int], Step],
        comparison: PlanComparison | None,
        log: Callable[[str], None],
        timeout_seconds: float,
    ):
        self._topology, self._site, self._links = topology, site, links
        self._resolve, self._timeout = resolve, timeout_seconds
        self._comparison, self._log = comparison, log

    def replanned(self, runtime: Runtime[State], step: int) -> Runtime[State] | None:
        """Return a runtime with a step for the links as they are; None: nothing changes.

        All processes call it together after a checkpoint.

        Raises:
            MissingProcessesError: a process does not come.
        """
        timeout = self._timeout
        request = LinkRequest() if self._comparison is None else self._comparison.request()
        measured = self._links.changed(request, timeout)
        if measured is None:
            return None
        topology = with_links(self._topology, measured)
        changes = _changes(self._topology, topology)
        if not changes:
            self._log(
                f"step {step}: the links are as planned: a straggler or slower kernels (geojax "
                "probe finds which). The plan stays, and later steps are compared with these"
            )
            self._compare_with(runtime)
            return None
        self._topology = topology
        self._log(f"step {step}: planning anew: {'; '.join(changes)}")
        started = time.monotonic()
        resolved = self._resolve(topology, step)
        made = runtime.replanned(resolved)
        if made is None:
            self._log(f"step {step}: the plan for this link is the same; nothing changes")
            self._compare_with(runtime, resolved)
            return None
        self._links.meet(timeout)
        compression = resolved.layout.communication.gradient_compression
        self._log(
            f"step {step}: compiled anew in {time.monotonic() - started:.0f} s; "
            f"gradient_compression {compression}; to start so: --adapt.links '{_as_json(topology)}'"
        )
        for line in made.links.lines():
            self._log(line)
        self._compare_with(made, resolved)
        return made

    def _compare_with(self, runtime: Runtime[Any], step: Step | None = None) -> None:
        if self._comparison is not None:
            plan = None
            if step is not None:
                sized = step.of_batch(runtime.sequences)
                plan = plan_of_step(sized, self._topology, self._site)
            self._comparison.restart(plan, runtime.links.measured)


def _changes(before: Topology, after: Topology) -> list[str]:
    """Say of each link that changed what it was and what it is."""
    return [
        f"the link {'-'.join(old.sites)} is {_link(new)}, and was {_link(old)}"
        for old, new in zip(before.links, after.links, strict=True)
        if [new.towards(site) for site in new.sites] != [old.towards(site) for site in old.sites]
    ]


def _link(link: SiteLink) -> str:
    rates = sorted({link.towards(site).bytes_per_second for site in link.sites})
    shown = " and ".join(quantity(8 * rate, "bit/s") for rate in rates)
    return f"{shown} at {link.round_trip_seconds * 1e3:.3g} ms"


def _as_json(topology: Topology) -> str:
    links = [link.model_dump(mode="json", exclude_none=True) for link in topology.links]
    return json.dumps(links)
