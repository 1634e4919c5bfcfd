"""Agreement of all processes on the links between sites that have changed."""

import json
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np
from jax.sharding import Mesh

from geojax.islands.exchange import Exchange
from geojax.runtime import barrier
from geojax.runtime.agreement import value_of_first
from geojax.topology import Topology
from geojax.train.links.deviations import RATE_TOLERANCE, LinkFigures, LinkRequest
from geojax.train.links.link_meter import LinkMeter

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


class AgreementOfOneProgram:
    """Agreement on links that all devices time together; process 0 knows the round trips.

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


class AgreementOfIslands:
    """Agreement of sites that each time the links on their own messages.

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
            for sender, of_site in zip(self._names, of_sites.values(), strict=True)
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
