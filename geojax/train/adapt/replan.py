"""A new plan at a checkpoint, for links that are not as they were: the same at every process.

    comparison     three windows in a row are off                       (the process that logs)
    LinksOf...     all processes agree on what the links are now         (all of them, together)
    Replanning     the config for those links; a trainer with its step   (each, the same)

The layout stays: mesh, stages and chunks, the state of the optimizer and what a checkpoint holds.
"""

import json
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

import numpy as np
from jax.sharding import Mesh

from geojax.collectives import WireName
from geojax.config.run_config import RunConfig
from geojax.errors import UserError
from geojax.islands.exchange import Exchange
from geojax.planner.adaptive import RATE_TOLERANCE, LinkFigures, with_links
from geojax.planner.cost.calibration import Calibration
from geojax.planner.cost.predict import predict
from geojax.quantities import quantity
from geojax.runtime import barrier
from geojax.runtime.agreement import value_of_first
from geojax.topology import SiteLink, Topology
from geojax.train.adapt.comparison import LinkRequest, PlanComparison, plan_of_run
from geojax.train.adapt.link_meter import LinkMeter
from geojax.train.plan.run_layout import layout_of_run
from geojax.train.trainer import Trainer

State = TypeVar("State")

Links = Mapping[tuple[str, str], LinkFigures]
"""Figures of each direction of the links that changed, by sender and receiver."""

_COMPRESSIONS: tuple[WireName, ...] = ("none", "bf16", "int8")
_WORTH = 0.03
"""Share of a step that more compression must save."""


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
        config: the run as it was started.
        site: name of this process's site.
        links: agrees on the links.
        comparison: of the run's steps, on the process that logs.
        log: shows a line to the user.
    """

    def __init__(
        self,
        config: RunConfig,
        site: str,
        links: LinkAgreement,
        comparison: PlanComparison | None,
        log: Callable[[str], None],
    ):
        topology = config.load_topology()
        assert topology is not None, "a run without a topology has no plan"
        self._started, self._site, self._links = config, site, links
        self._comparison, self._log, self._topology = comparison, log, topology

    def replanned(self, trainer: Trainer[State], step: int) -> Trainer[State] | None:
        """Return a trainer with a step for the links as they are; None: nothing changes.

        All processes call it together after a checkpoint.

        Raises:
            MissingProcessesError: a process does not come.
        """
        timeout = self._started.watchdog.first_step_seconds
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
        config = planned_for(self._started, topology)
        self._log(f"step {step}: planning anew: {'; '.join(changes)}")
        started = time.monotonic()
        made = trainer.replanned(config)
        if made is None:
            self._log(f"step {step}: the plan for this link is the same; nothing changes")
            self._compare_with(trainer, config)
            return None
        self._links.meet(timeout)
        compression = config.communication.gradient_compression
        self._log(
            f"step {step}: compiled anew in {time.monotonic() - started:.0f} s; "
            f"gradient_compression {compression}; to start so: --adapt.links '{_as_json(config)}'"
        )
        for line in made.link_lines():
            self._log(line)
        self._compare_with(made, config)
        return made

    def _compare_with(self, trainer: Trainer[Any], config: RunConfig | None = None) -> None:
        if self._comparison is not None:
            plan = plan_of_run(config, self._site) if config is not None else None
            self._comparison.restart(plan, trainer.measured_links)


def planned_for(config: RunConfig, topology: Topology) -> RunConfig:
    """Return a run's config for the links of `topology`, with the compression that suits them."""
    adapt = config.adapt.model_copy(update={"links": topology.links})
    config = config.model_copy(update={"adapt": adapt})
    if not adapt.compression or config.dc.role == "stage" or config.zero.across_sites:
        return config
    given = config.communication.gradient_compression
    candidates = [
        config.model_copy(
            update={
                "communication": config.communication.model_copy(
                    update={"gradient_compression": name}
                )
            }
        )
        for name in _COMPRESSIONS[_COMPRESSIONS.index(given) :]
        if name != "int8" or not config.model.use_router_bias  # RunConfig refuses the two together
    ]
    try:
        seconds = [_step_seconds(candidate, topology) for candidate in candidates]
    except UserError:  # a peak is not known
        return config
    most = (1 + _WORTH) * min(seconds)
    return next(
        candidate for candidate, each in zip(candidates, seconds, strict=True) if each <= most
    )


def _step_seconds(config: RunConfig, topology: Topology) -> float:
    return predict(
        config.model,
        layout_of_run(config),
        topology,
        sequence_length=config.batch.sequence_length,
        calibration=Calibration(),
        optimizer=config.optimizer,
    ).step_seconds


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


def _as_json(config: RunConfig) -> str:
    links = [link.model_dump(mode="json", exclude_none=True) for link in config.adapt.links]
    return json.dumps(links)
