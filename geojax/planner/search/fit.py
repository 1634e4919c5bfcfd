"""The ZeRO stage, the remat and the early sums with which a layout fits into memory.

Each way saves memory and costs time: remat computes again, and a higher ZeRO stage sends more. The
cheapest step of each way that fits is kept, and dearer steps are not tried. A layout fits if every
site has room for it, each with its own accelerators.
"""

import bisect
import operator
from collections import Counter
from collections.abc import Iterator
from typing import Literal, NamedTuple

from geojax.planner.cost.head_forms import with_shared_vocabulary
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.cost.memory import layout_memory
from geojax.planner.memory_phases import StepMemory
from geojax.planner.search.request import PlanRequest
from geojax.topology import Site


class Room(NamedTuple):
    """The memory of a layout on the accelerators of one site, beside what they have."""

    site: Site
    memory: StepMemory
    usable_bytes: float

    @property
    def fits(self) -> bool:
        """True if it is no more than they have."""
        return self.memory.bytes <= self.usable_bytes

    @property
    def share(self) -> float:
        """Memory by what they have; 0 where that is not known."""
        return self.memory.bytes / self.usable_bytes


class Fitting(NamedTuple):
    """A layout that fits, and its memory in the site where it leaves least."""

    layout: LayoutCandidate
    memory: StepMemory


def fitting(
    request: PlanRequest, shape: LayoutCandidate, refused: Counter[str]
) -> Iterator[Fitting]:
    """Yield the layouts of a shape that fit into the memory of an accelerator.

    Args:
        request: what is asked for.
        shape: mesh, microbatches and schedule.
        refused: counts the layouts that do not fit.
    """
    least = len(request.remats)
    for sharded in shardings(shape):
        for number, remat in enumerate(request.remats):
            if number >= least:
                break  # a lower ZeRO stage fits with as little to compute again
            layout = sharded.changed(remat=remat)
            room = least_room(request, layout)
            shared = layout if room.fits else with_shared_vocabulary(request.model, layout)
            if shared is not layout and (of_shared := least_room(request, shared)).fits:
                layout, room = shared, of_shared
            if not room.fits and not fits_in_parts(request, layout):
                refused["memory"] += 1
                continue
            yield Fitting(layout, room.memory)
            if layout.communication.overlap_grad_reduce is not True:
                least = number  # others may still gain by what they send early
            break


def rooms(request: PlanRequest, layout: LayoutCandidate) -> list[Room]:
    """Estimate the memory of a layout in each site, or in the fullest of sites that are alike."""
    if layout.site_shares is None and not request.has_unlike_accelerators:
        return [_room(request, layout, 0, None)]
    most = _most_layers_held(layout)
    return [_room(request, layout, site, most[site]) for site in range(request.sites)]


def least_room(request: PlanRequest, layout: LayoutCandidate) -> Room:
    """Return the memory in the site where a layout leaves least."""
    return max(rooms(request, layout), key=lambda room: (room.share, room.memory.bytes))


def fits_in_parts(request: PlanRequest, layout: LayoutCandidate) -> bool:
    """Return True if unlike sites have room for all layers, each for as many as it can hold."""
    if layout.dc.role == "data" or not request.has_unlike_accelerators:
        return False
    if not all(_room(request, layout, site, 1).fits for site in range(request.sites)):
        return False
    most = most_layers(request, layout)
    return sum(most[site] for site in layout.site_of_chunks) >= request.model.num_stacked_layers


def least_room_in_parts(request: PlanRequest, layout: LayoutCandidate) -> Room:
    """Return the memory in the site where a layout leaves least, the layers dealt out by memory."""
    if layout.dc.role == "data" or not request.has_unlike_accelerators:
        return least_room(request, layout)
    layers, sites = request.model.num_stacked_layers, layout.site_of_chunks
    chunks = [sites.count(site) for site in range(request.sites)]
    by_share = sorted(
        (
            _room(request, layout, site, count)
            for site in range(request.sites)
            for count in range(1, layers + 1)
        ),
        key=lambda room: room.share,
    )
    held = dict.fromkeys(request.topology.site_names, 0)
    for room in by_share:
        held[room.site.name] += 1
        if all(held.values()) and sum(map(operator.mul, chunks, held.values())) >= layers:
            return room
    raise AssertionError("a site with all layers has them all")


def most_layers(request: PlanRequest, layout: LayoutCandidate) -> tuple[int, ...]:
    """Return the most layers of a chunk that each site has room for; 0: not for one."""

    def most(site: int) -> int:
        layers = range(1, request.model.num_stacked_layers + 1)
        return bisect.bisect_right(
            layers, False, key=lambda count: not _room(request, layout, site, count).fits
        )

    return tuple(map(most, range(request.sites)))


def _most_layers_held(layout: LayoutCandidate) -> list[int | None]:
    """Return the most layers of a chunk in each site; None where no chunk has been given any."""
    if layout.pipeline.layers is None or layout.dc.role == "data":
        return [None] * layout.mesh.dc
    most: list[int | None] = [0] * layout.mesh.dc
    for site, count in zip(layout.site_of_chunks, layout.pipeline.layers, strict=True):
        most[site] = max(most[site] or 0, count)
    return most


def _room(request: PlanRequest, layout: LayoutCandidate, number: int, layers: int | None) -> Room:
    """Return the memory in a site if each of its chunks has so many layers; None: as they have."""
    site, own = request.topology.sites[number], layout.of_site(number)
    if layers is not None:
        chunks = own.pipeline_stages * own.pipeline.virtual_stages
        own = own.changed(pipeline={"layers": (layers,) * chunks})
    if number and layout.dc.role == "stage" and layout.pipeline.schedule == "1f1b":
        later = layout.pipeline_stages - sum(layout.stages_per_site[:number])
        # A stage holds a microbatch less than the one before, or two where no limit is given.
        most = later if layout.pipeline.memory_limit == layout.pipeline_stages else 2 * later - 1
        own = own.changed(
            pipeline={"memory_limit": min(layout.pipeline.memory_limit or most, most)}
        )
    usable = request.usable_bytes_in(site)
    memory = layout_memory(
        request.model,
        own,
        device_bytes=site.accelerator.memory_bytes or usable,
        optimizer=request.optimizer,
    )
    return Room(site, memory, usable)


def shardings(shape: LayoutCandidate) -> list[LayoutCandidate]:
    """List the ways to shard the state of a shape, those that send least first."""
    early: tuple[bool | Literal["auto"], ...] = ("auto",)
    stages: tuple[Literal[0, 1, 2, 3], ...] = (1,)
    if shape.pipeline_stages == 1:
        stages = (1, 2, 3)
        if shape.mesh.dc > 1 and shape.dc.role == "data":
            early = (True, False)
    return [
        shape.changed(zero={"stage": stage}, communication={"overlap_grad_reduce": overlap})
        for stage in stages
        for overlap in early
    ]
