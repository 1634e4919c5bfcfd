"""ZB-V: two chunks a stage in a V, split backwards, at the memory of 1F1B."""

from geojax.pipeline.schedule import Action, Kind, Placement, Schedule


def zbv(stages: int, microbatches: int) -> Schedule:
    """ZB-V (Qi et al., "Pipeline Parallelism with Controllable Memory", 2024).

    The first stage holds the first and the last chunk, so that a microbatch's backward begins where
    its forward did, on all stages at about the same time. Every stage holds up to 2 p chunks of
    microbatches, as much as p microbatches. With forward, backward and weights equally long there
    is no bubble but that of the first forward's way through the stages.
    """
    placement = Placement.vee(stages)
    orders = []
    for stage in range(stages):
        down, up = placement.chunks_of(stage)
        writer = _Writer(microbatches)
        writer.run(Kind.FORWARD, down, 2 * (stages - stage) - 1)
        for _ in range(stage):
            writer.run(Kind.FORWARD, up)
            writer.run(Kind.FORWARD, down)
        for _ in range(stages - stage):
            writer.run(Kind.FORWARD, up)
            writer.run(Kind.BACKWARD, up)
            writer.run(Kind.WEIGHT, up)
        while writer.has_left(Kind.FORWARD, down) or writer.has_left(Kind.FORWARD, up):
            writer.run(Kind.FORWARD, down)
            for kind in (Kind.BACKWARD, Kind.WEIGHT):
                writer.run(kind, down)
            for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.WEIGHT):
                writer.run(kind, up)
        for _ in range(stage):
            writer.run(Kind.BACKWARD, down)
            writer.run(Kind.BACKWARD, up)
        while writer.has_left(Kind.BACKWARD, down) or writer.has_left(Kind.BACKWARD, up):
            writer.run(Kind.BACKWARD, up)
            writer.run(Kind.BACKWARD, down)
            writer.run(Kind.WEIGHT, down)
        writer.run(Kind.WEIGHT, up, microbatches)
        writer.run(Kind.WEIGHT, down, microbatches)
        orders.append(tuple(writer.order))
    return Schedule("zbv", placement, microbatches, True, tuple(orders))


class _Writer:
    """Writes down a stage's order, each kind and chunk microbatch after microbatch."""

    def __init__(self, microbatches: int) -> None:
        self.order: list[Action] = []
        self._microbatches = microbatches
        self._done: dict[tuple[Kind, int], int] = {}

    def has_left(self, kind: Kind, chunk: int) -> bool:
        """Tell whether a microbatch still needs an action of that kind."""
        return self._done.get((kind, chunk), 0) < self._microbatches

    def run(self, kind: Kind, chunk: int, times: int = 1) -> None:
        """Add the next microbatches; nothing where none is left or their input is missing."""
        for _ in range(times):
            done = self._done.get((kind, chunk), 0)
            if kind is Kind.WEIGHT and done == self._done.get((Kind.BACKWARD, chunk), 0):
                return
            if done == self._microbatches:
                return
            self.order.append(Action(kind, done, chunk))
            self._done[kind, chunk] = done + 1
