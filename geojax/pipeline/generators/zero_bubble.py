"""Split backwards: gradients of weights fill the gaps that the chain of dependencies leaves.

Nothing but the end of the iteration waits for the gradient of weights (W), so that W can be put
where a stage would be idle. Schedules of Qi et al., "Zero Bubble Pipeline Parallelism", 2024.
"""

from collections.abc import Callable

from geojax.pipeline.schedule import Action, Kind, Placement, Schedule


def zero_bubble_h1(stages: int, microbatches: int) -> Schedule:
    """ZB-H1: the warm-up and the memory of 1F1B; the later a stage, the more W it puts off.

    Every stage holds as many microbatches as there are stages. About a third of 1F1B's bubble:
    (p - 1)(f + b - w), where b is the gradient of the input alone (section 2.2).
    """
    return _handmade("zero_bubble_h1", stages, microbatches, lambda stage: stages - 1 - stage)


def zero_bubble_h2(stages: int, microbatches: int) -> Schedule:
    """ZB-H2: twice the warm-up, so that a stage is never idle between its first and last action.

    Every stage holds up to 2 p - 1 microbatches. Stages begin and end one after the other; the
    bubble of each is (p - 1)(f + b - 2 w), nothing where the three are equal (section 2.2).
    """
    return _handmade("zero_bubble_h2", stages, microbatches, lambda stage: 2 * (stages - 1 - stage))


def _handmade(
    name: str, stages: int, microbatches: int, warmup_of: Callable[[int], int]
) -> Schedule:
    """Run forwards first; then F B while there are forwards, and W once enough are put off."""
    orders = []
    for stage in range(stages):
        warmup = min(warmup_of(stage), microbatches)
        put_off = min(warmup_of(0) - warmup_of(stage), microbatches - warmup)
        order = [Action(Kind.FORWARD, i, stage) for i in range(warmup)]
        weights = iter(range(microbatches))
        for i in range(microbatches):
            if i + warmup < microbatches:
                order.append(Action(Kind.FORWARD, i + warmup, stage))
            order.append(Action(Kind.BACKWARD, i, stage))
            if i >= put_off:
                order.append(Action(Kind.WEIGHT, next(weights), stage))
        order += [Action(Kind.WEIGHT, i, stage) for i in weights]
        orders.append(tuple(order))
    return Schedule(name, Placement.linear(stages), microbatches, True, tuple(orders))
