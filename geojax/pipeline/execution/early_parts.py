"""Parts of a pipeline's gradients that travel beside ticks, in one trace of the program.

A part that is whole is summed in the site when the part before it has arrived, and crosses to the
other sites: two sums over the sites do not travel at once. The stages wait for the sum in the site,
or it is beside the ticks that follow, and the part crosses when the next one is whole:

    ticks               | chunk 3 is whole | chunk 2 is whole | chunk 1 is whole
    between sites       |  3               |  2               |  1
    or, in the site     |  3               |  2               |  1
        between sites   |                  |  3               |  2                 1
"""

import functools
from collections.abc import Mapping
from typing import Any, Protocol, TypeVar

import jax

from geojax.collectives import after, barrier, token_of
from geojax.collectives.order import held_until
from geojax.pipeline.execution.ready_parts import Part
from geojax.pipeline.execution.stage_weights import StageWeights

State = TypeVar("State")


class EarlyReduction(Protocol):
    """A reduction of parts of the gradients between the loops over ticks."""

    @property
    def parts(self) -> Mapping[Part, int]:
        """The tick after which each part is whole on all stages."""

    @property
    def overlaps_scatter(self) -> bool:
        """True if a part is summed in the site beside ticks."""

    def take(self, part: Part, sums: StageWeights) -> Any:
        """Copy a part: a pytree of arrays."""

    def start(self, part: Part, taken: Any) -> Any:
        """Sum it in the site, ready to be sent: a pytree of arrays."""

    def exchange(self, started: Any) -> Any:
        """Send it to the other sites, beside a loop: a pytree of arrays."""


class EarlyParts:
    """The parts on their way. Barriers leave a compiler one order."""

    def __init__(self, early: EarlyReduction, end: int):
        """Say when each part of a program of `end` ticks travels."""
        self._early = early
        self._started: dict[Part, Any] = {}
        self._exchanged: dict[Part, Any] = {}
        self._end = end
        self._whole = {part: tick + 1 for part, tick in early.parts.items()}
        """The tick before which each part is whole."""
        self._crosses = dict(self._whole)
        """The tick before which each part crosses."""
        if early.overlaps_scatter:
            following = [*self._whole.values(), end][1:]
            self._crosses = dict(zip(self._whole, following, strict=True))

    @property
    def boundaries(self) -> list[int]:
        """The ticks before which something begins to travel."""
        return sorted({*self._whole.values(), *self._crosses.values()})

    def at(
        self, tick: int, state: State, sums: StageWeights, token: jax.Array
    ) -> tuple[State, jax.Array]:
        """Send what begins to travel before a tick, when all that it waits for is there.

        Args:
            tick: one of `boundaries`.
            state: what the ticks that follow read.
            sums: the gradients so far.
            token: a result of the ticks before.

        Returns:
            `state`, and the token of the ticks that follow.
        """
        whole = [part for part, at in self._whole.items() if at == tick]
        # What follows the ticks waits for what travels beside them. XLA for GPUs would otherwise
        # send that behind the ticks, beside other messages: it takes a sum in the site, of far
        # more bytes, for long enough to hide what crosses a slow link.
        behind = token_of((list(self._exchanged.values())[-1:], token))
        if not self._early.overlaps_scatter:
            sums = held_until(sums, behind)
        taken = {part: self._early.take(part, after(sums, token)) for part in whole}
        sent = []
        for part in [part for part, at in self._crosses.items() if at == tick]:
            if part in taken:  # nothing is beside its sum in the site
                self._started[part] = self._early.start(part, taken.pop(part))
            started = after(self._started.pop(part), token)
            if self._early.overlaps_scatter:
                started = held_until(started, behind)
            before = (started, list(self._exchanged.values()), list(taken.values()), state)
            started, arrived, copied, state = barrier(before)
            self._exchanged = dict(zip(self._exchanged, arrived, strict=True))
            taken = dict(zip(taken, copied, strict=True))
            self._exchanged[part] = self._early.exchange(started)
            sent.append(self._exchanged[part])
        copied, state = barrier((list(taken.values()), state)) if taken else ([], state)
        for part, own in zip(taken, copied, strict=True):
            self._started[part] = self._early.start(part, own)
            sent.append(self._started[part])
        leaves = [leaf for leaf in jax.tree.leaves(sent) if leaf.size]
        return state, functools.reduce(after, leaves, token)

    def finish(self, state: State) -> tuple[Mapping[Part, Any], State]:
        """Return all parts, to be gathered behind the ticks, and the state.

        The last one may cross while the gradients that are no part are summed in the site.
        """
        if self._exchanged and self._end not in self._crosses.values():
            arrived, state = barrier((list(self._exchanged.values()), state))
            self._exchanged = dict(zip(self._exchanged, arrived, strict=True))
        return self._exchanged, state
