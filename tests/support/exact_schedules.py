"""The least iteration time of a small pipeline, by constraint programming (OR-tools CP-SAT)."""

import itertools
from typing import NamedTuple

from geojax.pipeline import Costs, Hop


class Exact(NamedTuple):
    """What the solver knows when it stops."""

    seconds: float
    """Of its best schedule."""
    bound: float
    """No schedule is faster; the same where the solver has proven its best."""


def drawn_small_pipeline(generator):
    """Microbatches, costs in whole seconds, a limit, and if the backward may be split."""
    stages, microbatches = generator.randint(2, 4), generator.randint(2, 8)
    even = generator.random() < 0.4

    def times():
        drawn = [generator.randint(1, 6) for _ in range(stages)]
        return (drawn[0],) * stages if even else tuple(drawn)

    hops = tuple(
        Hop(
            generator.choice([0, 0, generator.randint(1, 20)]),
            generator.choice([0, 0, generator.randint(1, 8)]),
            generator.choice([None, f"cut {boundary}"]),
        )
        for boundary in range(stages - 1)
    )
    costs = Costs(times(), times(), times(), hops, half_duplex=generator.random() < 0.1)
    return microbatches, costs, generator.randint(1, stages + 3), generator.random() < 0.5


def least_iteration(microbatches, costs, limit, *, split_backward, effort=2.0):
    """The fastest schedule of one chunk a stage, with costs in whole numbers.

    All microbatches are alike, so that a fastest schedule exists in which each kind of action runs
    by microbatch on every stage: of any other one, sort the starts of each action. With a limit, a
    stage may then begin a forward when the microbatch that is so many before has left it.

    `effort` is in the solver's own seconds, which are the same on every machine.
    """
    from ortools.sat.python import cp_model

    stages = len(costs.forward)
    durations = [costs.forward, costs.backward, costs.weight]
    if not split_backward:
        together = [b + w for b, w in zip(costs.backward, costs.weight, strict=True)]
        durations = [costs.forward, together]
    horizon = microbatches * sum(map(sum, durations)) + 2 * microbatches * sum(
        hop.seconds for hop in costs.hops
    )
    model = cp_model.CpModel()
    start, end = {}, {}
    for stage in range(stages):
        intervals = []
        for kind, i in itertools.product(range(len(durations)), range(microbatches)):
            begin = model.new_int_var(0, int(horizon), "")
            length = int(durations[kind][stage])
            intervals.append(model.new_fixed_size_interval_var(begin, length, ""))
            start[kind, i, stage], end[kind, i, stage] = begin, begin + length
            if i:
                model.add(begin >= end[kind, i - 1, stage])
        model.add_no_overlap(intervals)
    links = {}

    def send(made, needed, hop, towards_later):
        """Demand that a message leaves after `made` and is there before `needed`."""
        leaves = made
        if hop.link is not None and hop.transfer:
            leaves = model.new_int_var(0, int(horizon), "")
            model.add(leaves >= made)
            direction = (hop.link, towards_later or costs.half_duplex)
            sending = model.new_fixed_size_interval_var(leaves, int(hop.transfer), "")
            links.setdefault(direction, []).append(sending)
        model.add(needed >= leaves + int(hop.seconds))

    for i, stage in itertools.product(range(microbatches), range(stages)):
        if stage:
            hop = costs.hops[stage - 1]
            send(end[0, i, stage - 1], start[0, i, stage], hop, True)
            send(end[1, i, stage], start[1, i, stage - 1], hop, False)
        if split_backward:
            model.add(start[2, i, stage] >= end[1, i, stage])
        if i >= limit:
            model.add(start[0, i, stage] >= end[len(durations) - 1, i - limit, stage])
    for i in range(microbatches):
        model.add(start[1, i, stages - 1] >= end[0, i, stages - 1])
    for sending in links.values():
        model.add_no_overlap(sending)
    makespan = model.new_int_var(0, int(horizon), "")
    for kind, stage in itertools.product(range(len(durations)), range(stages)):
        model.add(makespan >= end[kind, microbatches - 1, stage])
    model.minimize(makespan)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = effort
    status = solver.solve(model)
    assert status in (cp_model.OPTIMAL, cp_model.FEASIBLE), "some schedule exists"
    return Exact(solver.objective_value, solver.best_objective_bound)
