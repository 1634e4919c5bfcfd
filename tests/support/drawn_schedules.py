"""Schedules drawn at random."""

from geojax.pipeline.rules import requirement
from geojax.pipeline.schedule import Action, Placement, Schedule


def drawn_schedule(draw):
    """A valid schedule: any placement, any order that the requirements allow."""
    stages, microbatches = draw.randint(2, 4), draw.randint(1, 6)
    stage_of = [*range(stages), *draw.choices(range(stages), k=draw.randint(0, 3))]
    draw.shuffle(stage_of)
    placement = Placement(stages, tuple(stage_of))
    schedule = Schedule("drawn", placement, microbatches, draw.random() < 0.3, ((),) * stages)
    orders = [[] for _ in range(stages)]
    done = set()
    waiting = [
        Action(kind, microbatch, chunk)
        for kind in schedule.kinds
        for microbatch in range(microbatches)
        for chunk in range(placement.chunks)
    ]
    while waiting:
        ready = [each for each in waiting if requirement(schedule, each) in done | {None}]
        action = draw.choice(ready)
        waiting.remove(action)
        done.add(action)
        orders[stage_of[action.chunk]].append(action)
    return Schedule(
        "drawn", placement, microbatches, schedule.split_backward, tuple(map(tuple, orders))
    )
