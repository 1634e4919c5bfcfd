"""The weights of a stage's chunks that come while the stages compute with the chunks before.

    ticks      chunk 0 alone   | chunk 1 too     | chunk 2 too     | all of them
    gathered   chunk 1         | chunk 2         | chunk 3         |

Equally many ticks are beside each gather, so that one loop holds all of them.
"""

from typing import Any, Protocol

import jax

from geojax.models.declaration import Parameters
from geojax.pipeline.schedule import TickTable


class LateChunks(Protocol):
    """Gathers the weights of one chunk after the other. A stage's chunks are numbered from 0."""

    @property
    def window(self) -> int:
        """Ticks beside which the next chunk comes."""

    def take(self, chunk: jax.Array) -> Any:
        """Copy this rank's shards of a chunk: a pytree of arrays."""

    def gather(self, taken: Any) -> Any:
        """Gather them: a pytree of arrays."""

    def put(self, layers: Parameters, chunk: jax.Array, gathered: Any) -> Parameters:
        """Put a chunk's weights among those of the stage's layers, in place."""


def ticks_between_chunks(table: TickTable) -> int:
    """Return the most ticks that may pass before the next chunk of a stage is there.

    Chunk k is there before tick k times as many, and no stage needs it earlier. 0: a stage has one
    chunk, or needs two at once.
    """
    number_on_stage = table.schedule.placement.number_on_stage
    first_use: dict[int, int] = {}
    for tick, _, action in table.actions():
        number = number_on_stage[action.chunk]
        first_use[number] = min(first_use.get(number, tick), tick)
    return min((tick // number for number, tick in first_use.items() if number), default=0)
