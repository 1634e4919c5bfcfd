"""Layers of each stage, dealt out as evenly as can be, embedding and head counted."""

from collections.abc import Sequence

import numpy as np

from geojax.errors import UserError

_MOST_CUTS = 2**24
"""Most stages * layers^2, of which each takes 16 bytes."""


def balanced_layers(
    layer_costs: Sequence[float],
    stages: int,
    *,
    before: float = 0.0,
    after: float = 0.0,
    speeds: Sequence[float] | None = None,
    most: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Return the layers of each stage, in the model's order, for the fastest slowest stage.

    Of all such cuts it is the one with the least sum of squared stage times, so that no stage is
    filled up for nothing. Of several such cuts it is the one with fewer layers on earlier stages,
    which hold more microbatches in flight. Dynamic programming over (stages, layers), O(stages *
    layers^2).

    Args:
        layer_costs: the time (or work) of each layer, in the model's order.
        stages: how many contiguous groups to make, each of at least one layer.
        before: the time of what the first stage does besides its layers (the embedding).
        after: the time of what the last stage does besides its layers (final norm, head, loss).
        speeds: how fast each stage works, relative to one another; default: all alike.
        most: layers that each stage has memory for; default: all of them.

    Raises:
        UserError: there are fewer layers than stages, or far too many of both, or more than the
            stages have memory for.
    """
    layers = len(layer_costs)
    if not 1 <= stages <= layers:
        raise UserError(
            f"{layers} layers cannot be cut into {stages} stages of at least one layer each; "
            f"1 to {layers} stages can be"
        )
    if stages * layers**2 > _MOST_CUTS:
        raise UserError(
            f"pipeline: {layers} layers in {stages} chunks have too many cuts to compare; give the "
            "layers of each chunk as pipeline.layers"
        )
    room = [layers] * stages if most is None else most
    assert len(room) == stages, "as many layers at most for each stage"
    if min(room) < 1 or sum(room) < layers:
        shown = ", ".join(map(str, room))
        raise UserError(
            f"{layers} layers do not fit into stages with room for {shown} layers; each stage "
            "needs memory for one layer, and all stages together for all layers"
        )
    pace = np.ones(stages) if speeds is None else np.asarray(speeds, float)
    assert len(pace) == stages, "one speed for each stage"
    until = np.concatenate([[0.0], np.cumsum(layer_costs)])
    work = until[None, :] - until[:, None]  # [first layer, end]: of the layers first ... end - 1
    first, end = np.indices(work.shape)

    def stage_times(stage: int) -> np.ndarray:
        extra = before * (stage == 0) + after * (stage == stages - 1)
        # Sums that differ by rounding alone must tie, or noise would choose between equal cuts.
        holds = (end > first) & (end - first <= room[stage])
        return np.where(holds, np.round((work + extra) / pace[stage] / scale, 12), np.inf)

    scale = float(until[-1] + before + after) / float(np.min(pace)) or 1.0
    times = [stage_times(stage) for stage in range(stages)]
    slowest = np.where(np.arange(layers + 1) == 0, 0.0, np.inf)  # by the number of layers placed
    for time in times:
        slowest = np.maximum(slowest[:, None], time).min(axis=0)
    squares = np.where(np.arange(layers + 1) == 0, 0.0, np.inf)
    starts = []  # of each stage, where it begins if it ends before a given layer
    for time in times:
        total = np.round(squares[:, None] + np.where(time <= slowest[-1], time**2, np.inf), 12)
        starts.append(total.argmin(axis=0))  # the first of equals: the stage takes the most layers
        squares = total.min(axis=0)
    counts, stop = [], layers
    for start in reversed(starts):
        counts.append(int(stop - start[stop]))
        stop = start[stop]
    return tuple(reversed(counts))
