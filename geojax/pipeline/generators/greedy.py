"""Orders that come out of a simulation in which every stage does the best thing at hand."""

import dataclasses
import heapq
import itertools
import math
import operator
from collections.abc import Sequence

from geojax.pipeline.schedule import Action, Kind, LayerBytes, Placement, Schedule
from geojax.pipeline.simulation.bounds import round_trip
from geojax.pipeline.simulation.costs import Costs
from geojax.pipeline.simulation.simulator import Links

_KINDS = tuple(Kind)
_FORWARD, _BACKWARD, _WEIGHT = range(3)
_IDLE = -1

BACKWARD_FIRST = (Kind.BACKWARD, Kind.FORWARD, Kind.WEIGHT)
"""The preference of `greedy` that frees memory soonest."""
FORWARD_FIRST = (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT)
"""The preference that gives the stages behind work soonest."""


@dataclasses.dataclass(frozen=True)
class GreedyOrder:
    """An order of one chunk a stage in which every kind of action runs by microbatch."""

    kinds: tuple[bytes, ...]
    """For each stage the index in `Kind` of each action."""
    seconds: float
    """The seconds of the iteration, as `iteration_seconds` times the schedule."""
    split_backward: bool

    def schedule(self) -> Schedule:
        """Return the order as a schedule."""
        microbatches = self.kinds[0].count(_FORWARD)
        orders = []
        for stage, kinds in enumerate(self.kinds):
            actions = [
                map(Action, itertools.repeat(kind), range(microbatches), itertools.repeat(stage))
                for kind in _KINDS
            ]
            orders.append(tuple([next(actions[kind]) for kind in kinds]))
        placement = Placement.linear(len(self.kinds))
        return Schedule("greedy", placement, microbatches, self.split_backward, tuple(orders))


def greedy(
    microbatches: int,
    costs: Costs,
    held: Sequence[LayerBytes],
    limits: Sequence[int],
    *,
    preference: Sequence[Kind] = BACKWARD_FIRST,
    patience: float = 0.0,
    split_backward: bool = False,
    give_up_at: float = math.inf,
) -> GreedyOrder | None:
    """Run on each stage the most preferred kind of action that is there and that memory allows.

    One chunk a stage. `held` has for each stage what it holds of a microbatch, `limits` the most
    that it may hold in all. A stage leaves an action for one that it prefers if that is on its way
    and arrives within `patience` times the length of the action. Without `split_backward` there are
    no gradients of weights.

    None: the iteration would take `give_up_at` seconds or longer. Two lower bounds tell: the work
    that is left on the first stage, and its limit of microbatches. With a limit of n, forward i + n
    begins no sooner than a round trip through all stages after forward i.
    """
    stages = len(costs.forward)
    assert len(limits) == stages, "one limit a stage"
    need = [max(before, within) for before, within, _ in held]
    assert all(map(operator.le, need, limits)), "a stage holds one microbatch at least"
    last = stages - 1
    durations = costs.durations(split_backward=split_backward)
    work = list(map(sum, zip(*durations, strict=True)))
    same = 1e-9 * max(work)
    before, within, after = zip(*held, strict=True)
    residence = round_trip(costs, split_backward=split_backward)
    if after[0] < before[0]:
        residence -= durations[2][0]  # its backward makes room
    most = limits[0] // before[0]
    forward_at: list[list[float]] = [[] for _ in range(stages)]
    backward_at: list[list[float]] = [[] for _ in range(stages)]
    forward_at[0] = [0.0] * microbatches
    forwards, backwards, weights = [0] * stages, [0] * stages, [0] * stages
    taken = [0] * stages
    kinds = [bytearray() for _ in range(stages)]
    running = [_IDLE] * stages
    free_at = [0.0] * stages
    order = [_KINDS.index(kind) for kind in preference if split_backward or kind is not Kind.WEIGHT]
    links = Links(costs)
    events = [(0.0, 0)]  # when to look at which stage: its action ends, or a message is there
    push, pop = heapq.heappush, heapq.heappop
    never = math.inf
    seconds = 0.0

    while events:
        now = events[0][0]
        horizon = now + same
        looking = []
        # What ends at the same time is handed over before anybody chooses.
        while events and events[0][0] <= horizon:
            at, stage = pop(events)
            kind = running[stage]
            if kind == _IDLE:
                looking.append(stage)
                continue
            if free_at[stage] != at:
                continue  # a message for a stage that is busy: it looks when it is free
            running[stage] = _IDLE
            seconds = at
            looking.append(stage)
            if kind == _WEIGHT:
                continue
            if kind == _FORWARD:
                target, arrivals = stage + 1, forward_at
                if stage == last:
                    backward_at[stage].append(at)
                    continue
            else:
                target, arrivals = stage - 1, backward_at
                if target < 0:
                    continue
            hop = costs.hops[min(stage, target)]
            sent = at + hop.transfer
            if hop.link is not None:
                sent = links.send(hop.link, stage < target, at, hop.transfer)[1]
            arrival = sent + hop.latency
            arrivals[target].append(arrival)
            if running[target] == _IDLE:
                push(events, (arrival, target))
        for stage in looking:
            if running[stage] != _IDLE:
                continue
            done, there = backwards[stage], backward_at[stage]
            next_backward = never
            # Room for the second half: until there is some, the halves that wait are worked off.
            if done < len(there) and taken[stage] - before[stage] + within[stage] <= limits[stage]:
                next_backward = there[done]
            made, there = forwards[stage], forward_at[stage]
            next_forward = never
            if made < len(there) and taken[stage] + need[stage] <= limits[stage]:
                next_forward = there[made]
            next_weight = now if split_backward and weights[stage] < done else never
            ready = next_forward, next_backward, next_weight
            soonest = never
            for kind in order:
                at = ready[kind]
                if at <= horizon:
                    if soonest >= now + patience * durations[kind][stage] - same:
                        break
                elif at < soonest:
                    soonest = at
            else:
                if soonest < never:
                    push(events, (soonest, stage))
                continue
            begin = free_at[stage]
            if kind == _FORWARD:
                begin = max(begin, next_forward)
                forwards[stage] = made + 1
                taken[stage] += before[stage]
                if stage == 0 and give_up_at < never:
                    left = microbatches - made - 1
                    rounds = begin + (left // most + 1) * residence
                    busy = begin + (left + 1) * work[0] + (made - done) * durations[1][0]
                    if max(rounds, busy) >= give_up_at:
                        return None
            elif kind == _BACKWARD:
                begin = max(begin, next_backward)
                backwards[stage] = done + 1
                taken[stage] += after[stage] - before[stage]
            else:
                weights[stage] += 1
                taken[stage] -= after[stage]
            running[stage] = kind
            kinds[stage].append(kind)
            free_at[stage] = end = begin + durations[kind][stage]
            push(events, (end, stage))
    return GreedyOrder(tuple(map(bytes, kinds)), seconds, split_backward)
