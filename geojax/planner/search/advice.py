"""The answer to a request that no layout meets: what binds, and the nearest request that works."""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Iterator

from geojax.accelerators import CATALOG
from geojax.errors import UserError
from geojax.planner.cost.layout import Layout
from geojax.planner.search.fit import fitting, memory_of, shardings
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.space import meshes, shapes
from geojax.quantities import quantity
from geojax.topology import Topology

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
        return (
            f"no mesh of {request.site.accelerators} {request.accelerator.name} in a site can hold "
            f"the model: {names} do not divide; a power of two in each site would"
        )
    least = _least_memory(request)
    if least is None:
        return _other_batches(request, found)
    needed, layout = least
    use = memory_of(request, layout).largest
    return (
        f"no layout fits: the least that one needs on a device is {quantity(needed, 'B')}, most of "
        f"it {use} ({layout}), and {quantity(request.usable_bytes, 'B')} of each "
        f"{request.accelerator.name} are usable; {_what_would_fit(request)}"
    )


def fits(request: PlanRequest) -> bool:
    """Return True if some layout of a request fits."""
    refused: Counter[str] = Counter()
    return any(True for shape in shapes(request, refused) for _ in fitting(request, shape, refused))


def _least_memory(request: PlanRequest) -> tuple[float, Layout] | None:
    """Return the layout that needs least memory, and its bytes; None: no batch divides."""
    thriftiest = (
        dataclasses.replace(shardings(shape)[-1], remat=request.remats[-1])
        for shape in shapes(request, Counter())
    )
    of_each = ((memory_of(request, layout).bytes, layout) for layout in thriftiest)
    return min(of_each, key=lambda pair: pair[0], default=None)


def _other_batches(request: PlanRequest, found: list[Layout]) -> str:
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


def _what_would_fit(request: PlanRequest) -> str:
    """Name the smallest changes of the request, one at a time, with which a layout fits."""
    searches: tuple[Callable[[PlanRequest], Iterator[tuple[str, PlanRequest]]], ...] = (
        _other_accelerators,
        _more_hosts,
        _shorter_sequences,
    )
    named = (
        next((name for name, other in each(request) if _works(other)), None) for each in searches
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


def _other_accelerators(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    own = request.accelerator.memory_bytes or math.inf
    larger = (each for each in CATALOG.values() if (each.memory_bytes or 0) > own)
    for accelerator in sorted(larger, key=lambda each: each.memory_bytes or 0):
        topology = _with_sites(request.topology, accelerator=accelerator)
        yield accelerator.name, dataclasses.replace(request, topology=topology, memory_bytes=None)


def _more_hosts(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for doubling in range(1, MOST_DOUBLINGS + 1):
        hosts = request.site.hosts * 2**doubling
        other = dataclasses.replace(request, topology=_with_sites(request.topology, hosts=hosts))
        yield f"{hosts} hosts in each site", other


def _shorter_sequences(request: PlanRequest) -> Iterator[tuple[str, PlanRequest]]:
    for halving in range(1, MOST_DOUBLINGS + 1):
        length = request.sequence_length // 2**halving
        if length:
            yield f"sequence_length {length}", dataclasses.replace(request, sequence_length=length)


def _with_sites(topology: Topology, **changes: object) -> Topology:
    sites = tuple(site.model_copy(update=changes) for site in topology.sites)
    return topology.model_copy(update={"sites": sites})
