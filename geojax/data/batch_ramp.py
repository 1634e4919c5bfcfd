"""Sizes of the global batch: one for a whole run, or a ramp that grows to it.

The rule is the one of Megatron-LM's --rampup-batch-size START INCREMENT SEQUENCES:

    size of a step = start + increment * floor(consumed / (sequences / increments)), at most full

The size is a function of the sequences that earlier steps consumed. A run that resumes therefore
needs no other state, and every sequence of the data comes once, whatever the ramp was before.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple


class BatchPhase(NamedTuple):
    """Steps in a row whose batches have one size."""

    size: int
    """Sequences of each of their batches."""

    first: int
    """Sequences that were consumed before the first of these steps."""

    steps: int | None = None
    """Number of the steps; None: they do not end."""


@dataclasses.dataclass(frozen=True)
class BatchRamp:
    """Sequences in the global batch of each step."""

    full: int
    """Sequences of a batch at the end of the ramp."""

    start: int
    """Sequences of the first batch; `full` where the batch does not grow."""

    increment: int = 1
    """Sequences by which the batch grows at a time; a whole number of them leads to `full`."""

    sequences: int = 1
    """Sequences in which the batch grows, in equal shares for each increment."""

    def __post_init__(self) -> None:
        assert 0 < self.start <= self.full, "a batch grows"
        assert min(self.increment, self.sequences) > 0, "a ramp has a slope"
        assert (self.full - self.start) % self.increment == 0, "increments are whole"

    @classmethod
    def constant(cls, size: int) -> "BatchRamp":
        """Return the sizes of a run whose batches all have `size` sequences."""
        return cls(size, size)

    @property
    def increments(self) -> int:
        """Number of increments from the first size to the last one."""
        return (self.full - self.start) // self.increment

    @property
    def smaller(self) -> tuple[int, ...]:
        """The sizes before the full one, ascending; () where the batch does not grow."""
        return tuple(range(self.start, self.full, self.increment))

    def size_at(self, consumed: int) -> int:
        """Return the sequences of the batch that follows `consumed` ones."""
        grown = min(self.increments, consumed * self.increments // self.sequences)
        return self.start + grown * self.increment

    def phases(self, consumed: int = 0) -> Iterator[BatchPhase]:
        """Yield the phases of a run that goes on behind `consumed` sequences; the last is endless.

        A batch that begins before an increment is due keeps its size to its end.
        """
        while (size := self.size_at(consumed)) < self.full:
            grown = (size - self.start) // self.increment
            due = -(-(grown + 1) * self.sequences // self.increments)
            steps = -(-(due - consumed) // size)
            yield BatchPhase(size, consumed, steps)
            consumed += steps * size
        yield BatchPhase(self.full, consumed)

    def consumed_after(self, steps: int, consumed: int = 0) -> int:
        """Return the sequences consumed when `steps` steps have followed `consumed` sequences.

        From scratch this is the number of the first sequence of step `steps`, counted from 0.
        """
        for phase in self.phases(consumed):
            if phase.steps is None or steps <= phase.steps:
                return phase.first + steps * phase.size
            steps -= phase.steps
        raise AssertionError("the last phase is endless")

    def step_of(self, sequence: int) -> int:
        """Return the step, counted from 0, whose batch has `sequence` in a run from scratch."""
        step = 0
        for phase in self.phases():
            of_phase = (sequence - phase.first) // phase.size
            if phase.steps is None or of_phase < phase.steps:
                return step + of_phase
            step += phase.steps
        raise AssertionError("the last phase is endless")

    def share(self, size: int, of_full: Sequence[int]) -> list[int]:
        """List the sequences of a batch of `size` that lie where `of_full` lie in a full one.

        Devices share a batch evenly and in order, so that a process which needs `of_full` of the
        full batch needs these of a smaller one.
        """
        if size == self.full:
            return list(of_full)
        needed = set(of_full)
        return [index for index in range(size) if index * self.full // size in needed]
