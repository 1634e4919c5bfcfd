"""Parts of a stage's gradients that are whole while others still go backwards.

A stage's chunks are numbered in the model's order, and go backwards in the opposite one. In a
pipeline of p stages with v chunks each, chunk c is whole c p ticks before the end, and the head's
gradients are before all of them:

    interleaved, 2 stages, 2 chunks each: the last backwards, as microbatch.chunk
    stage 0           1.1       0.0       1.0
    stage 1      1.1       0.0       1.0
                 head  chunk 1             the rest

A part is ready in one tick on all stages, since they run one program. Later stages could send
sooner, but the first one ends last, has the least time to send, and loses nothing.
"""

from typing import Literal

from geojax.pipeline.schedule import Kind, TickTable

Part = int | Literal["head"]
"""The head; or the layers of a chunk, by its number on its stage."""


def ready_parts(table: TickTable) -> dict[Part, int]:
    """Return for each part the tick after which it is whole on all stages, in order of these ticks.

    Parts that are whole only when the pipeline is done are left out: nothing is computed beside
    them. A chunk's gradients are whole after its last backward, or the last gradient of its weights
    where that is an action of its own.
    """
    placement, last_kind = table.schedule.placement, table.schedule.kinds[-1]
    number_on_stage = placement.number_on_stage
    ready: dict[Part, int] = {}
    for tick, _, action in table.actions():
        if action.kind is Kind.BACKWARD and action.chunk == placement.chunks - 1:
            ready["head"] = max(ready.get("head", 0), tick)
        if action.kind is last_kind:
            number = number_on_stage[action.chunk]
            ready[number] = max(ready.get(number, 0), tick)
    early = [part for part, tick in ready.items() if tick < table.ticks - 1]
    return {part: ready[part] for part in sorted(early, key=ready.__getitem__)}
