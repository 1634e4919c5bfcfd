"""Layouts of one mesh that take less memory than a given one, by the choices of the search."""

from collections.abc import Iterator

from geojax.models import AnyModel
from geojax.planner.cost.layout import LayoutCandidate
from geojax.planner.search.fit import shardings
from geojax.planner.search.request import REMATS
from geojax.planner.search.space import divisors, orders


def on_same_mesh(model: AnyModel, layout: LayoutCandidate) -> Iterator[LayoutCandidate]:
    """Yield the layouts of the same mesh and batch that may hold less.

    They have as many microbatches or more, as much remat and as high a ZeRO stage or more, and any
    schedule that the search tries.

    Args:
        model: the model.
        layout: the layout as it is.
    """
    least = REMATS.index(layout.remat)
    for shape in _shapes(model, layout):
        for sharded in dict.fromkeys(
            each.changed(communication=dict(layout.communication)) for each in shardings(shape)
        ):
            if sharded.zero.stage < layout.zero.stage:
                continue
            for remat in REMATS[least:]:
                yield sharded.changed(remat=remat)


def _shapes(model: AnyModel, layout: LayoutCandidate) -> Iterator[LayoutCandidate]:
    """Yield the layout with its microbatches, schedule and sharding of the sequence varied."""
    whole = layout.batch.microbatches * layout.microbatch_size
    shards = (layout.parallelism.sequence, True) if layout.mesh.tensor > 1 else (False,)
    for sequence in dict.fromkeys(shards):
        start = layout.changed(parallelism={"sequence": sequence})
        for size in reversed(divisors(layout.microbatch_size)):
            sized = start.with_microbatches(whole // size, size)
            yield sized
            if layout.pipeline_stages == 1:
                continue
            for order in orders(sized, model.num_stacked_layers):
                other = sized.changed(pipeline=order._asdict())
                if other.pipeline != sized.pipeline:
                    yield other.changed(pipeline={"layers": None})
