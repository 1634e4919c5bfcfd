"""Choices that are tried of the fastest layouts alone, each by itself while the others are kept.

order      every schedule that the mesh can have, with the most microbatches in flight that fit
sums       compression of gradients, and state sharded over sites
gathers    ZeRO 3 that keeps gathered weights; attention over `context` by another method
islands    layers of a bucket, and more remat for more microbatches at once
"""

import bisect
import contextlib
from collections.abc import Callable, Iterator
from typing import get_args

from geojax.errors import UserError
from geojax.models.parallel.limits import check_parallelism
from geojax.models.parallel.parallelism import ContextMethod
from geojax.optim.registry import optimizer_entry
from geojax.pipeline.registry import SCHEDULES
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.space import MOST_SCHEDULED, Order, divisors

BEND_IN_TICKS = ("1f1b", "geopipe", "latency_hiding", "latency_hiding_split")
"""Schedules of one program that hold fewer microbatches where a limit says so."""

BEND_BY_EVENTS = ("latency_hiding", "latency_hiding_split")
"""The same of islands."""

Fits = Callable[[LayoutCandidate], bool]
"""Tells whether a layout fits into the memory of every site."""


def variations(
    request: PlanRequest, layout: LayoutCandidate, fits: Fits
) -> Iterator[LayoutCandidate]:
    """Yield the layouts that differ from one in a choice of this module's docstring.

    Args:
        request: what is asked for.
        layout: a fast layout.
        fits: tells which layouts to yield.
    """
    tried = {layout}
    for other in _differing(request, layout, fits):
        if other not in tried and fits(other):
            tried.add(other)
            yield other


def _differing(
    request: PlanRequest, layout: LayoutCandidate, fits: Fits
) -> Iterator[LayoutCandidate]:
    if layout.pipeline_stages > 1:
        yield from _orders(request, layout, fits)
    if layout.mesh.dc > 1 and layout.dc.role == "data":
        yield from _sums(request, layout)
    if layout.zero.stage == 3:
        yield layout.changed(zero={"reshard_after_forward": False})
    if layout.mesh.context > 1:
        yield from _context_methods(request, layout)
    if layout.dc.join == "islands" and layout.dc.role == "data":
        yield from _of_islands(request, layout)


def _orders(request: PlanRequest, layout: LayoutCandidate, fits: Fits) -> Iterator[LayoutCandidate]:
    bend = BEND_IN_TICKS if layout.dc.join == "one_program" else BEND_BY_EVENTS
    for name, entry in SCHEDULES.items():
        virtual = entry.virtual_stages
        if virtual is None:  # all numbers of chunks are in the search itself
            continue
        chunks = layout.pipeline_stages * virtual
        if chunks > request.model.num_stacked_layers:
            continue
        if chunks * layout.batch.microbatches > MOST_SCHEDULED:
            continue
        layers = layout.pipeline.layers if virtual == layout.pipeline.virtual_stages else None
        order = Order(name, virtual)
        plain = layout.changed(pipeline=order._asdict() | {"layers": layers})
        if name not in bend:
            yield plain
            continue
        limits = {
            min(layout.pipeline_stages, layout.batch.microbatches),
            most_in_flight(plain, fits),
        }
        for limit in sorted(limits - {0}):
            yield plain.changed(pipeline={"memory_limit": limit})


def most_in_flight(layout: LayoutCandidate, fits: Fits) -> int:
    """Return the most microbatches that stages can hold in flight, of a schedule that bends."""

    def is_too_much(limit: int) -> bool:
        return not fits(layout.changed(pipeline={"memory_limit": limit}))

    return bisect.bisect_left(range(1, layout.batch.microbatches + 1), True, key=is_too_much)


def _sums(request: PlanRequest, layout: LayoutCandidate) -> Iterator[LayoutCandidate]:
    for compression in request.compressions:
        yield layout.changed(communication={"gradient_compression": compression})
    if can_shard_across_sites(request) and layout.dc.join == "one_program":
        yield layout.changed(
            communication={"gradient_compression": "none"}, zero={"across_sites": True}
        )


def can_shard_across_sites(request: PlanRequest) -> bool:
    """Return True if state may be sharded over sites: by an optimizer whose statistics stay in one,
    with gradients that are not compressed."""
    names = request.optimizer.optimizers
    alone = all(optimizer_entry(name).statistics == "none" for name in names)
    return alone and "none" in request.compressions


def _context_methods(request: PlanRequest, layout: LayoutCandidate) -> Iterator[LayoutCandidate]:
    for method in get_args(ContextMethod):
        other = layout.changed(parallelism={"context_method": method})
        with contextlib.suppress(UserError):
            check_parallelism(request.model, other.model_parallelism, request.sequence_length)
            yield other


def _of_islands(request: PlanRequest, layout: LayoutCandidate) -> Iterator[LayoutCandidate]:
    for together in divisors(request.model.num_stacked_layers):
        yield layout.changed(communication={"bucket_layers": together})
    for remat in request.remats:
        yield layout.changed(remat=remat)
