"""The answer to a request that no layout meets: what binds, and the nearest request that works."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator

from geojax.accelerators import CATALOG, Accelerator
from geojax.errors import UserError
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.search.fit import (
    Room,
    fits_in_parts,
    least_room,
    least_room_in_parts,
    shardings,
)
from geojax.planner.search.request import PlanRequest, are_alike
from geojax.planner.search.space import meshes, shapes
from geojax.quantities import quantity
from geojax.topology import Site, Topology

MOST_DOUBLINGS = 6
"""Most times that hosts are doubled, or a sequence is halved, in search of a request that works."""


def why_none(request: PlanRequest) -> str:
    """Say which constraint leaves no layout for a request, and what would leave one.

    Args:
        request: one for which `search` finds nothing.
    """
    refused: Counter[str] = Counter()
    found = list(meshes(request, refused))
    if not found:
        names = ", ".join(name for name, _ in refused.most_common())
        sites = dict.fromkeys(
            f"{s.accelerators} {s.accelerator.name}" for s in request.topology.sites
        )
        return (
            f"no mesh of {' and '.join(sites)} in a site can hold the model: {names} do not "
            "divide; a power of two in each site would"
        )
    least = _least_memory(request)
    if least is None:
        return _other_batches(request, found)
    room, layout = least
    where = "" if are_alike(request.topology) else f" of site '{room.site.name}'"
    return (
        f"no layout fits: the least that one needs on a device{where} is "
        f"{quantity(room.memory.bytes, 'B')}, most of it {room.memory.largest} ({layout}). "
        f"{quantity(room.usable_bytes, 'B')} of each {room.site.accelerator.name} are usable; "
        f"{_what_would_fit(request, room.site)}"
    )


def what_would_run(topology: Topology) -> str:
    """Name what would let `geojax train` run a plan whose sites differ."""
    sizes = {(site.hosts, site.accelerators_per_host) for site in topology.sites}
    if len(sizes) == 1:
        return "more --rows might"
    if len({each for _, each in sizes}) == 1:
        fewest = min(hosts for hosts, _ in sizes)
        return f"{fewest} hosts in each site (hosts: {fewest}) would work"
    largest = max(topology.sites, key=lambda site: site.accelerators)
    return f"hosts of one size, or '{largest.name}' alone, would work"


def fits(request: PlanRequest) -> bool:
    """Return True if some layout of a request fits."""
    return any(_fits(request, layout) for layout in _thriftiest(request))


def _thriftiest(request: PlanRequest) -> Iterator[LayoutCandidate]:
    """Yield each shape with the ZeRO stage and the remat that take least memory."""
    for shape in shapes(request, Counter()):
        yield shardings(shape)[-1].changed(remat=request.remats[-1])


def _fits(request: PlanRequest, layout: LayoutCandidate) -> bool:
    return least_room(request, layout).fits or fits_in_parts(request, layout)


def _least_memory(request: PlanRequest) -> tuple[Room, LayoutCandidate] | None:
    """Return the layout that comes nearest to fitting, where it fits least; None: no batch divides.

    Unlike sites are given the layers that take as much of the memory of each.
    """
    nearest: tuple[Room, LayoutCandidate] | None = None
    for layout in _thriftiest(request):
        share = math.inf if nearest is None else nearest[0].share
        less = dataclasses.replace(request, memory_factor=request.memory_factor * share)
        if _fits(less, layout):
            room = least_room_in_parts(request, layout)
            nearest = (room, layout) if room.share < share else nearest
    return nearest


def _other_batches(request: PlanRequest, found: list[LayoutCandidate]) -> str:
    ranks = sorted({mesh.data_ranks for mesh in found})
    batch = request.global_batch_size
    near = sorted(
        {size for n in ranks for size in (batch // n * n, -(-batch // n) * n) if size},
        key=lambda size: (abs(size - batch), size),
    )
    working = (size for size in near if fits(dataclasses.replace(request, global_batch_size=size)))
    nearest = next(working, None)
    shown = ", ".join(map(str, ranks[:4])) + (" ..." if len(ranks) > 4 else "")
    line = (
        f"a global batch of {batch} does not divide over the data-parallel ranks of any mesh of "
        f"{request.topology.accelerators} accelerators ({shown}); "
    )
    if nearest is None:
        return line + "no other batch near it fits into memory either"
    return line + f"{nearest} would"


def _what_would_fit(request: PlanRequest, tightest: Site) -> str:
    """Name the smallest changes of the request, one at a time, with which a layout fits.

    Args:
        request: what is asked for.
        tightest: site where the layout that comes nearest does not fit.
    """
    searches: tuple[Callable[[PlanRequest, Site], Iterator[tuple[str, PlanRequest]]], ...] = (
        _other_accelerators,
        _more_hosts,
        _shorter_sequences,
    )
    named = (
        next((name for name, other in each(request, tightest) if _works(other)), None)
        for each in searches
    )
    would = [name for name in named if name is not None]
    if not would:
        return "a smaller model would be needed"
    return f"{' or '.join(would)} would work"


def _works(request: PlanRequest) -> bool:
    try:
        return fits(request)
    except UserError:
        return False


def _other_accelerators(request: PlanRequest, tightest: Site) -> Iterator[tuple[str, PlanRequest]]:
    """Yield the request with accelerators of more memory in the sites that have those."""
    own = tightest.accelerator
    where = f" in {_listed(request, own)}" if len(request.kinds) > 1 else ""
    larger = (
        each
        for each in CATALOG.values()
        if (each.memory_bytes or 0) > (own.memory_bytes or math.inf)
    )
    for accelerator in sorted(larger, key=lambda each: each.memory_bytes or 0):
        topology = _with_sites(
            request.topology, lambda site: site.accelerator == own, accelerator=accelerator
        )
        name = accelerator.name + where
        yield name, dataclasses.replace(request, topology=topology, memory_bytes=None)


def _more_hosts(request: PlanRequest, tightest: Site) -> Iterator[tuple[str, PlanRequest]]:
    """Yield the request with more hosts: in the tightest site, or in all where they are alike."""
    alike = are_alike(request.topology)
    for doubling in range(1, MOST_DOUBLINGS + 1):
        hosts = tightest.hosts * 2**doubling
        topology = _with_sites(
            request.topology, lambda site: alike or site.name == tightest.name, hosts=hosts
        )
        where = "each site" if alike else f"'{tightest.name}'"
        yield f"{hosts} hosts in {where}", dataclasses.replace(request, topology=topology)


def _shorter_sequences(request: PlanRequest, _: Site) -> Iterator[tuple[str, PlanRequest]]:
    for halving in range(1, MOST_DOUBLINGS + 1):
        length = request.sequence_length // 2**halving
        if length:
            yield f"sequence_length {length}", dataclasses.replace(request, sequence_length=length)


def _listed(request: PlanRequest, accelerator: Accelerator) -> str:
    """Name the sites that have an accelerator."""
    sites = request.topology.sites
    return " and ".join(f"'{site.name}'" for site in sites if site.accelerator == accelerator)


def _with_sites(topology: Topology, changed: Callable[[Site], bool], **changes: object) -> Topology:
    sites = tuple(
        site.model_copy(update=changes) if changed(site) else site for site in topology.sites
    )
    return topology.model_copy(update={"sites": sites})
