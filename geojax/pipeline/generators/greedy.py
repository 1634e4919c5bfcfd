"""Orders that come out of a simulation in which every stage does the best thing at hand."""

import heapq
from collections.abc import Sequence

from geojax.pipeline.schedule import Action, Kind, Placement, Schedule
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.simulator import Links


def greedy(
    microbatches: int,
    costs: Costs,
    limits: Sequence[int],
    *,
    patience: float = 0.0,
    split_backward: bool = False,
) -> Schedule:
    """Backward if one is there, else forward if memory allows, else the gradient of weights.

    One chunk a stage. `limits` has for each stage the most microbatches that it may hold. A stage
    leaves a forward for a backward that is on its way and arrives within `patience` times the
    forward's length.
    """
    stages = len(costs.forward)
    assert len(limits) == stages, "one limit a stage"
    assert min(limits) >= 1, "a stage holds one microbatch at least"
    last = stages - 1
    together = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)]
    backward_seconds = costs.backward if split_backward else tuple(together)
    same = 1e-9 * max(f + b for f, b in zip(costs.forward, together, strict=True))
    forward_at: list[list[float]] = [[] for _ in range(stages)]
    backward_at: list[list[float]] = [[] for _ in range(stages)]
    forward_at[0] = [0.0] * microbatches
    done = {kind: [0] * stages for kind in Kind}
    orders: list[list[Action]] = [[] for _ in range(stages)]
    running: list[Action | None] = [None] * stages
    links = Links(costs)
    events: list[tuple[float, int, bool]] = [(0.0, 0, False)]  # when, stage, whether it ends a run

    def send(kind: Kind, stage: int, now: float) -> None:
        """Hand over what a stage made; the stage that can use it looks at it when it is there."""
        if kind is Kind.FORWARD and stage == last:
            backward_at[stage].append(now)
            return
        target = stage + 1 if kind is Kind.FORWARD else stage - 1
        if target < 0:
            return
        hop = costs.hops[min(stage, target)]
        sent = now + hop.transfer
        if hop.link is not None:
            sent = links.send(hop.link, stage < target, now, hop.transfer)[1]
        arrivals = forward_at if kind is Kind.FORWARD else backward_at
        arrivals[target].append(sent + hop.latency)
        heapq.heappush(events, (sent + hop.latency, target, False))

    def choose(stage: int, now: float) -> Kind | None:
        forwards, backwards = done[Kind.FORWARD][stage], done[Kind.BACKWARD][stage]
        coming = backward_at[stage]
        if backwards < len(coming) and coming[backwards] <= now + same:
            return Kind.BACKWARD
        weights = done[Kind.WEIGHT][stage] if split_backward else backwards
        if (
            forwards < len(forward_at[stage])
            and forward_at[stage][forwards] <= now + same
            and forwards - weights < limits[stage]
        ):
            soon = now + patience * costs.forward[stage] - same
            if not (backwards < len(coming) and coming[backwards] < soon):
                return Kind.FORWARD
        return Kind.WEIGHT if weights < backwards else None

    while events:
        now = events[0][0]
        looking = set()
        while events and events[0][0] <= now + same:
            _, stage, ends = heapq.heappop(events)
            if ends:
                action = running[stage]
                assert action is not None, "only a busy stage ends a run"
                running[stage] = None
                if action.kind is not Kind.WEIGHT:
                    send(action.kind, stage, now)
            looking.add(stage)
        for stage in looking:
            if running[stage] is not None:
                continue
            kind = choose(stage, now)
            if kind is None:
                continue
            action = Action(kind, done[kind][stage], stage)
            done[kind][stage] += 1
            orders[stage].append(action)
            running[stage] = action
            if kind is Kind.FORWARD:
                seconds = costs.forward[stage]
            elif kind is Kind.BACKWARD:
                seconds = backward_seconds[stage]
            else:
                seconds = costs.weight[stage]
            heapq.heappush(events, (now + seconds, stage, True))
    return Schedule(
        "greedy",
        Placement.linear(stages),
        microbatches,
        split_backward,
        tuple(tuple(order) for order in orders),
    )
