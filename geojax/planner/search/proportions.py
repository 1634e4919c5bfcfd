"""Layers and sequences of each site in proportion to its speed.

    role stage    layers of a site's stages, so that the slowest stage is fastest, of no more than
                  the site has memory for
    role data     microbatches of a site, so that the slowest site is fastest; the gradient is the
                  sum over sites over the tokens of them all

Both are whole numbers, and the layers and the global batch are dealt out to the last. Sites that
are alike get as much each.
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

from geojax.pipeline.balance import balanced_layers
from geojax.planner.cost.layout import LayoutCandidate, SiteShare
from geojax.planner.search.fit import least_room, most_layers
from geojax.planner.search.request import PlanRequest
from geojax.planner.search.site_work import SiteWork, SiteWorks


def of_sites(
    layout: LayoutCandidate, parts: Sequence[int], *, unlike: bool
) -> Iterator[LayoutCandidate]:
    """Yield a layout with the part of each site, where sites differ.

    Sites of more accelerators have more stages, or more replicas. Of as many of another kind each
    may train on as many sequences, which `geojax train` runs, or on more where they are faster.

    Args:
        layout: of sites that all have the least common number of accelerators.
        parts: accelerators of each site, in least common numbers.
        unlike: accelerators of some sites are of another kind.
    """
    alike = len(set(parts)) == 1
    if alike:
        yield layout
    mesh, sequences = layout.mesh, layout.mesh.data * layout.mesh.expert
    if layout.dc.role == "stage" and not alike:
        shares = [SiteShare(part * mesh.stage, mesh.data, sequences) for part in parts]
    elif layout.dc.role == "data" and layout.dc.join == "islands" and (unlike or not alike):
        shares = [SiteShare(mesh.stage, part * mesh.data, part * sequences) for part in parts]
    else:
        return
    yield layout.with_shares(shares)


def with_batch(
    layout: LayoutCandidate, global_batch_size: int, microbatch_size: int
) -> LayoutCandidate | None:
    """Return a layout with the microbatches of a global batch; None: it does not divide.

    Args:
        layout: its mesh, and the parts of its sites.
        global_batch_size: sequences of a step.
        microbatch_size: sequences of a microbatch on one data-parallel rank.
    """
    if layout.site_shares is not None and layout.dc.role == "data":
        return _with_sequences(layout, global_batch_size, microbatch_size, [1.0] * layout.mesh.dc)
    microbatches, rest = divmod(global_batch_size, layout.data_ranks * microbatch_size)
    if rest or not microbatches:
        return None
    sized = layout.with_microbatches(microbatches, microbatch_size)
    if layout.site_shares is None:
        return sized
    # All sites train on all sequences.
    return sized.with_shares(
        [dataclasses.replace(share, sequences=global_batch_size) for share in layout.site_shares]
    )


def in_proportion(
    request: PlanRequest, layout: LayoutCandidate, works: SiteWorks
) -> LayoutCandidate | None:
    """Deal out a layout's layers or sequences in proportion to the speeds of its sites.

    Args:
        request: what is asked for.
        layout: one that fits, if the sites get as much as they have room for.
        works: the work in each site.

    Returns:
        The layout with the layers of each chunk, where the sites' stages differ in speed or memory,
        or with the sequences of each site where it leaves them open. None: it does not fit so, or
        its layers were not measured.
    """
    own = works.of(layout)
    if own is None:
        return None
    if layout.dc.role == "stage":
        return _with_layers(request, layout, own)
    if layout.site_shares is not None:
        layers = request.model.num_stacked_layers
        seconds = [work.of_model(layers) for work in own]
        total = layout.batch.global_batch_size
        made = _with_sequences(layout, total, layout.microbatch_size, seconds)
        assert made is not None, "a batch that was dealt out before, if by other times"
        assert made.site_shares is not None
        alike = len(set(made.site_shares)) == 1
        return made.with_shares(None) if alike else made
    return layout


def _with_sequences(
    layout: LayoutCandidate, total: int, microbatch_size: int, seconds: Sequence[float]
) -> LayoutCandidate | None:
    """Deal out sequences to sites that take so many seconds for a microbatch."""
    assert layout.site_shares is not None
    ranks = layout.mesh.expert * microbatch_size
    units = tuple(share.data * ranks for share in layout.site_shares)
    counts = dealt_out(total, units, tuple(seconds))
    if counts is None:
        return None
    shares = [
        dataclasses.replace(share, sequences=count * unit)
        for share, count, unit in zip(layout.site_shares, counts, units, strict=True)
    ]
    return (
        layout.with_shares(shares)
        .changed(mesh={"data": shares[0].data})
        .with_microbatches(counts[0], microbatch_size)
    )


def _with_layers(
    request: PlanRequest, layout: LayoutCandidate, works: Sequence[SiteWork]
) -> LayoutCandidate | None:
    """Deal out layers to chunks; None: the sites have no room for them."""
    if len(set(works)) == 1 and not request.has_unlike_accelerators:
        return layout
    sites = layout.site_of_chunks
    balanced = functools.partial(
        balanced_layers,
        [1.0] * request.model.num_stacked_layers,
        len(sites),
        before=works[sites[0]].first / works[sites[0]].layer,
        after=works[sites[-1]].last / works[sites[-1]].layer,
        speeds=[1 / works[site].layer for site in sites],
    )
    made = layout.changed(pipeline={"layers": balanced()})
    if least_room(request, made).fits:
        return made
    most = most_layers(request, layout)
    room = [most[site] for site in sites]
    if min(room) == 0 or sum(room) < request.model.num_stacked_layers:
        return None
    return layout.changed(pipeline={"layers": balanced(most=room)})


@functools.lru_cache(maxsize=4096)
def dealt_out(
    total: int, units: tuple[int, ...], seconds: tuple[float, ...]
) -> tuple[int, ...] | None:
    """Deal out a total in counts of each site's unit, so that the slowest site is fastest.

    The time that a site is allowed grows from that of a total that could be split anywhere. Within
    it each site has a most; the total is dealt out once the units above it can be taken back.

    Args:
        total: what is dealt out.
        units: what each site takes at a time.
        seconds: the time of a unit in each site.

    Returns:
        The count of each site, at least 1; of equals, those with the least sum of squared times.
        None: no such counts make the total.
    """
    if total % math.gcd(*units) or total < sum(units):
        return None
    ideal = total / sum(unit / time for unit, time in zip(units, seconds, strict=True))
    most = [max(1, math.floor(ideal / time)) for time in seconds]
    highest = [total // unit for unit in units]
    while True:
        above = sum(count * unit for count, unit in zip(most, units, strict=True)) - total
        found = [
            tuple(count - back for count, back in zip(most, taken, strict=True))
            for taken in _change(above, units)
            if all(back < count for count, back in zip(most, taken, strict=True))
        ]
        if found:
            return min(found, key=lambda counts: _squares(counts, seconds))
        slower = [site for site, count in enumerate(most) if count < highest[site]]
        if not slower:
            return None
        # All sites that take as long go on together, so that their order does not matter.
        allowed = min((most[site] + 1) * seconds[site] for site in slower)
        for site in slower:
            most[site] += (most[site] + 1) * seconds[site] <= allowed


def _squares(counts: Sequence[int], seconds: Sequence[float]) -> float:
    return sum((count * time) ** 2 for count, time in zip(counts, seconds, strict=True))


def _change(amount: int, units: tuple[int, ...]) -> list[tuple[int, ...]]:
    """List the counts of each unit that sum to an amount."""
    if amount < 0:
        return []
    *others, last = units
    found = []
    for counts in itertools.product(*(range(amount // unit + 1) for unit in others)):
        rest = amount - sum(count * unit for count, unit in zip(counts, others, strict=True))
        if rest >= 0 and rest % last == 0:
            found.append((*counts, rest // last))
    return found
