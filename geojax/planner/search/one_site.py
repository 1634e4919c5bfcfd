"""Efficiency of a layout beside one site that holds all accelerators."""

from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.prediction import Prediction
from geojax.planner.search.sensitivity import LayoutTimer
from geojax.topology import Site, Topology


def one_site_efficiency(layout: LayoutCandidate, topology: Topology, timer: LayoutTimer) -> float:
    """Return the step of one site with the FLOP/s of all sites, by the step of a layout.

    That site trains as fast as the sum of what the accelerators of each site do where all sites are
    like theirs and links take no time. Where sites are alike, it is the layout's step without what
    the links expose of it.

    Args:
        layout: how the sites train.
        topology: the sites.
        timer: predicts the step of a layout.
    """
    rate = 0.0
    for number, share in enumerate(_shares(layout)):
        own, like = layout, topology
        if _are_unlike(topology):
            own = layout.of_site(number).changed(pipeline={"layers": None})
            like = _all_like(topology, topology.sites[number])
        alone = timer(own, like)
        rate += share / (alone.step_seconds - _exposed_between_sites(alone))
    return 1 / rate / timer(layout, topology).step_seconds


def _shares(layout: LayoutCandidate) -> list[float]:
    """Return each site's share of the accelerators, with role data of the sequences."""
    sizes = list(layout.devices_per_site)
    if layout.site_shares is not None and layout.dc.role == "data":
        sizes = [share.sequences for share in layout.site_shares]
    return [size / sum(sizes) for size in sizes]


def _are_unlike(topology: Topology) -> bool:
    first, *others = (_unnamed(site) for site in topology.sites)
    return any(site != first for site in others)


def _unnamed(site: Site) -> Site:
    return site.model_copy(update={"name": "", "processes": ()})


def _all_like(topology: Topology, one: Site) -> Topology:
    sites = tuple(one.model_copy(update={"name": site.name}) for site in topology.sites)
    return topology.model_copy(update={"sites": sites})


def _exposed_between_sites(prediction: Prediction) -> float:
    return sum(term.exposed_seconds for term in prediction.terms if term.network == "between_sites")
