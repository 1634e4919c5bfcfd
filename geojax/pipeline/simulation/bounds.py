"""Lower bounds of the iteration time, for those who leave out what cannot be best."""

import itertools

from geojax.pipeline.simulation.costs import Costs


def least_seconds(
    microbatches: int, costs: Costs, limit: int | None = None, *, split_backward: bool = False
) -> float:
    """Return the seconds below which no schedule of one chunk a stage can come.

    The first forward reaches a stage through all stages before it; then the stage works on every
    microbatch; where the backward is not split, the last one then goes back through these stages.
    For equal stages that is (m + p - 1)(f + b) + 2 sum H, and if the backward is split
    m (f + b + w) + (p - 1) f + sum H. With a limit, only so many microbatches are on their round
    trip at a time (Little's law).

    Args:
        microbatches: of an iteration.
        costs: of one chunk a stage.
        limit: the most microbatches that the first stage may hold; None: any number.
        split_backward: the gradients of weights are actions of their own.
    """
    hops = [0.0, *(hop.seconds for hop in costs.hops)]
    forward, backward, weight = costs.durations(split_backward=split_backward)
    work = list(map(sum, zip(forward, backward, weight, strict=True)))
    there = [0.0, *itertools.accumulate(map(sum, zip(forward, hops[1:], strict=False)))]
    back = [0.0, *itertools.accumulate(map(sum, zip(backward, hops[1:], strict=False)))]
    bounds = [
        before + microbatches * own + (0.0 if split_backward else after)
        for before, own, after in zip(there, work, back, strict=True)
    ]
    if limit is not None:
        bounds.append(-(-microbatches // limit) * round_trip(costs, split_backward=split_backward))
    return max(bounds)


def round_trip(costs: Costs, *, split_backward: bool = False) -> float:
    """Return the least seconds for which the first stage of linear stages holds a microbatch."""
    forward, backward, weight = costs.durations(split_backward=split_backward)
    return sum(forward) + sum(backward) + weight[0] + 2 * sum(hop.seconds for hop in costs.hops)
