"""A new plan at a checkpoint, for links that are not as they were: the same at every process.

    comparison     three windows in a row are off                       (the process that logs)
    LinksOf...     all processes agree on what the links are now         (all of them, together)
    Replanning     the step for those links; a trainer with its program    (each, the same)

The layout stays: mesh, stages and chunks, the state of the optimizer and what a checkpoint holds.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
from jax.sharding import Mesh

from geojax.islands.exchange import Exchange
from geojax.quantities import quantity
from geojax.runtime import barrier
from geojax.runtime.agreement import value_of_first
from geojax.step.resolved import Step
from geojax.topology import SiteLink, Topology
from geojax.train.adapt.comparison import LinkRequest, PlanComparison, plan_of_step
from geojax.train.adapt.deviations import RATE_TOLERANCE, LinkFigures, with_links
from geojax.train.adapt.link_meter import LinkMeter
from geojax.train.trainer import Trainer

State = TypeVar("State")

Links = Mapping[tuple[str, str], LinkFigures]
"""Figures of each direction of the links that changed, by sender and receiver."""


class LinkAgreement(Protocol):
    """A way of all processes to agree on the links; they call its methods together."""

    def changed(self, request: LinkRequest, timeout_seconds: float) -> Links | None:
        """Return what changed; None where no process has asked."""
        ...

    def meet(self, timeout_seconds: float) -> None:
        """Wait for all processes, which have compiled."""
        ...


class LinksOfOneProgram:
    """Links that all devices time together, beside the round trips that process 0 knows.

    Args:
        mesh: the run's.
        names: the sites' names, in order.
        topology: describes the links, as they are taken to be at the start.
    """

    def __init__(self, mesh: Mesh, names: tuple[str, ...], topology: Topology):
        self._first, self._topology = names[0], topology
        self._meter = LinkMeter(mesh, names, topology)
        self._usual = self._meter.rates()

    def changed(self, request: LinkRequest, timeout_seconds: float) -> Links | None:
        """Time the links if process 0 asks; a rate is in proportion to that of the start."""
        trips = {site: link.round_trip_seconds for site, link in request.changed.items()}
        asked = json.dumps([request.is_one, trips])
        is_one, trips = json.loads(value_of_first("changed links", asked, timeout_seconds))
        if not is_one:
            return None
        measured = [(*pair, rate / self._usual[pair]) for pair, rate in self._meter.rates().items()]
        told = value_of_first("rates of links", json.dumps(measured), timeout_seconds)
        found = {}
        for first, second, share in json.loads(told):
            trip = trips.get(second) if first == self._first else None
            is_off = not 1 / (1 + RATE_TOLERANCE) <= share <= 1 + RATE_TOLERANCE
            for pair in ((first, second), (second, first)):
                described = self._topology.link(*pair).bytes_per_second
                found[pair] = LinkFigures(trip, share * described if is_off else described)
        return found

    def meet(self, timeout_seconds: float) -> None:
        """Wait for all processes."""
        barrier("compiled anew", timeout_seconds)


class LinksOfIslands:
    """Links that each site times on its own messages, exchanged between the sites.

    Args:
        exchange: the site's.
        mesh: its devices.
        names: the sites' names, in order.
    """

    def __init__(self, exchange: Exchange, mesh: Mesh, names: tuple[str, ...]):
        self._exchange, self._mesh, self._names = exchange, mesh, names

    def changed(self, request: LinkRequest, timeout_seconds: float) -> Links | None:
        """Exchange the links that changed, as their senders see them."""
        rows = np.full((len(self._names), 2), np.nan, np.float32)
        for number, name in enumerate(self._names):
            link = request.changed.get(name, LinkFigures())
            rows[number] = [
                np.nan if value is None else value
                for value in (link.round_trip_seconds, link.bytes_per_second)
            ]
        told = value_of_first("changed links", json.dumps(rows.tolist()), timeout_seconds)
        of_sites = self._exchange.of_hosts(np.array(json.loads(told), np.float32), self._mesh)
        found = {
            (sender, receiver): LinkFigures(*map(_known, of_site[number]))
            for sender, of_site in zip(self._names, of_sites, strict=True)
            for number, receiver in enumerate(self._names)
            if not np.isnan(of_site[number]).all()
        }
        return found or None

    def meet(self, timeout_seconds: float) -> None:
        """Wait for all sites."""
        barrier("compiled anew", timeout_seconds)
        self._exchange.of_hosts(np.zeros(1, np.float32), self._mesh)


def _known(value: Any) -> Any:
    """Return a number; None for nan."""
    return None if np.isnan(value) else float(value)


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

    def replanned(self, trainer: Trainer[State], step: int) -> Trainer[State] | None:
        """Return a trainer with a step for the links as they are; None: nothing changes.

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
            self._compare_with(trainer)
            return None
        self._topology = topology
        self._log(f"step {step}: planning anew: {'; '.join(changes)}")
        started = time.monotonic()
        resolved = self._resolve(topology, step)
        made = trainer.replanned(resolved)
        if made is None:
            self._log(f"step {step}: the plan for this link is the same; nothing changes")
            self._compare_with(trainer, resolved)
            return None
        self._links.meet(timeout)
        compression = resolved.layout.communication.gradient_compression
        self._log(
            f"step {step}: compiled anew in {time.monotonic() - started:.0f} s; "
            f"gradient_compression {compression}; to start so: --adapt.links '{_as_json(topology)}'"
        )
        for line in made.link_lines():
            self._log(line)
        self._compare_with(made, resolved)
        return made

    def _compare_with(self, trainer: Trainer[Any], step: Step | None = None) -> None:
        if self._comparison is not None:
            plan = plan_of_step(step, self._topology, self._site) if step is not None else None
            self._comparison.restart(plan, trainer.measured_links)


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
