"""Pipeline schedules as plain data: what every stage does, in which order.

The model's layers are cut into *chunks*, numbered in the model's order; a `Placement` says which
stage holds which. A stage works through its list of `Action`s. The walker of the schedule decides
when an action begins: the simulator, a loop of ticks (`TickTable`), a host.

    1f1b, 2 stages, 3 microbatches
    stage 0    F0 F1 B0 F2 B1 B2
    stage 1    F0 B0 F1 B1 F2 B2
"""

import collections
import dataclasses
import enum
import functools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np


class Kind(enum.Enum):
    """A kind of work of a stage on a microbatch."""

    FORWARD = "F"
    BACKWARD = "B"
    """The gradient of the chunk's input; where the backward is not split, of its weights too."""
    WEIGHT = "W"
    """The gradient of the chunk's weights, where the backward is split."""

    # Actions are keys by the hundred thousand, and the hash of an enum's name takes most of that.
    __hash__ = object.__hash__


KIND_RANK = {kind: rank for rank, kind in enumerate(Kind)}
"""The order in which a chunk needs its actions of one microbatch."""


class Action(NamedTuple):
    """One piece of work of a stage."""

    kind: Kind
    microbatch: int
    chunk: int
    """In the model's order, over all stages."""

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}.{self.chunk}"


@dataclasses.dataclass(frozen=True)
class Placement:
    """The stage of each chunk."""

    stages: int
    stage_of: tuple[int, ...]
    """The stage of each chunk."""

    def __post_init__(self) -> None:
        assert set(self.stage_of) == set(range(self.stages)), "every stage holds a chunk"

    @classmethod
    def linear(cls, stages: int) -> "Placement":
        """One chunk a stage."""
        return cls(stages, tuple(range(stages)))

    @classmethod
    def interleaved(cls, stages_per_site: Sequence[int], chunks_per_stage: int) -> "Placement":
        """Chunks dealt out in turn to the stages of a site, site after site.

        The model runs through all chunks of a site before it crosses to the next one: every cut is
        crossed once, in one direction. Two sites of two stages, two chunks a stage:

            chunk  0 1 2 3 4 5 6 7
            stage  0 1 0 1 2 3 2 3
        """
        stage_of: list[int] = []
        first = 0
        for count in stages_per_site:
            stage_of += list(range(first, first + count)) * chunks_per_stage
            first += count
        return cls(first, tuple(stage_of))

    @classmethod
    def vee(cls, stages: int) -> "Placement":
        """Two chunks a stage, down and up again: the first stage holds the first and the last."""
        down = tuple(range(stages))
        return cls(stages, down + down[::-1])

    @property
    def chunks(self) -> int:
        """The number of chunks, of all stages."""
        return len(self.stage_of)

    def chunks_of(self, stage: int) -> tuple[int, ...]:
        """Return the chunks that a stage holds, in the model's order."""
        return tuple(chunk for chunk, holder in enumerate(self.stage_of) if holder == stage)

    @property
    def number_on_stage(self) -> tuple[int, ...]:
        """The number of each chunk among those of its stage."""
        before: collections.Counter[int] = collections.Counter()
        numbers = []
        for stage in self.stage_of:
            numbers.append(before[stage])
            before[stage] += 1
        return tuple(numbers)

    @property
    def chunks_per_stage(self) -> int:
        """The most that any stage holds."""
        return max(len(self.chunks_of(stage)) for stage in range(self.stages))


class LayerBytes(NamedTuple):
    """The bytes that a layer holds of a microbatch, or a chunk of all of its layers."""

    before_backward: int
    """The residuals of the forward."""
    in_backward: int
    """The residuals and, where the backward is split, what its first half makes for the second."""
    after_backward: int
    """The values that wait for the gradients of the weights, which may be more than the residuals;
    0 where the backward is not split."""

    @property
    def without_split(self) -> "LayerBytes":
        """The bytes if the backward were not split."""
        return LayerBytes(self.before_backward, self.before_backward, 0)

    def times(self, layers: int) -> "LayerBytes":
        """Return the bytes of so many layers."""
        return LayerBytes(*(layers * each for each in self))


class MemoryLimit(NamedTuple):
    """The most bytes that the layers of any stage may hold for microbatches; one chunk a stage."""

    limit: int
    """In bytes."""
    layers_per_chunk: tuple[int, ...]
    layer: LayerBytes
    """The bytes of a layer and a microbatch."""

    @classmethod
    def of_microbatches(cls, limit: int, stages: int) -> "MemoryLimit":
        """Return a limit of so many microbatches, which stay until their last action."""
        return cls(limit, (1,) * stages, LayerBytes(1, 1, 1))

    def held(self, *, split_backward: bool) -> list[LayerBytes]:
        """Return the bytes that each stage holds of a microbatch."""
        layer = self.layer if split_backward else self.layer.without_split
        return [layer.times(layers) for layers in self.layers_per_chunk]

    def most_in_flight(self, *, split_backward: bool) -> list[int]:
        """Return for each stage the most microbatches that fit between forward and backward."""
        return [
            max(
                0,
                1
                + (self.limit - max(each.before_backward, each.in_backward))
                // max(1, each.before_backward),
            )
            for each in self.held(split_backward=split_backward)
        ]

    def room_for(self, in_flight: Sequence[int], *, split_backward: bool) -> list[int]:
        """Return for each stage the bytes of so many microbatches, all where one more is too much.

        What is left may then hold what waits for the gradients of weights.
        """
        rooms = []
        for count, (before, within, _) in zip(
            in_flight, self.held(split_backward=split_backward), strict=True
        ):
            needed = (count - 1) * before + max(before, within)
            rooms.append(self.limit if needed + before > self.limit else needed)
        return rooms

    def allows(self, schedule: "Schedule") -> bool:
        """Tell whether a schedule keeps within the limit on every stage."""
        layer = self.layer if schedule.split_backward else self.layer.without_split
        return max(schedule.most_held(self.layers_per_chunk, layer)) <= self.limit


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A pipeline schedule: for each stage the order in which it works.

    Example:
        >>> from geojax.pipeline import one_forward_one_backward, validate
        >>> schedule = one_forward_one_backward(2, 3)  # stages, microbatches
        >>> " ".join(f"{action.kind.value}{action.microbatch}" for action in schedule.orders[0])
        'F0 F1 B0 F2 B1 B2'
        >>> validate(schedule)  # raises ScheduleError if an invariant does not hold
        >>> schedule.in_flight  # microbatches whose residuals each stage holds at most
        (2, 1)
    """

    name: str
    placement: Placement
    microbatches: int
    split_backward: bool
    """The gradients of weights are actions of their own."""
    orders: tuple[tuple[Action, ...], ...]
    """For each stage."""

    @property
    def kinds(self) -> tuple[Kind, ...]:
        """The kinds of action that every microbatch needs in every chunk, in order."""
        kinds = tuple(Kind)
        return kinds if self.split_backward else kinds[:2]

    @property
    def in_flight(self) -> tuple[int, ...]:
        """For each stage the most (microbatch, chunk) pairs whose residuals it holds at a time.

        They are held from the beginning of the forward to the end of the backward, or of the
        gradient of the weights where that is an action of its own. (`most_held` counts bytes: then
        what waits between these two is not what waited before.)
        """
        last = self.kinds[-1]
        peaks = []
        for order in self.orders:
            held = peak = 0
            for action in order:
                if action.kind is Kind.FORWARD:
                    held += 1
                    peak = max(peak, held)
                elif action.kind is last:
                    held -= 1
            peaks.append(peak)
        return tuple(peaks)

    def most_held(self, layers_per_chunk: Sequence[int], layer: LayerBytes) -> tuple[int, ...]:
        """Return for each stage the most bytes that its layers hold at a time.

        Args:
            layers_per_chunk: in the model's order.
            layer: the bytes of a layer and a microbatch.
        """
        peaks = []
        for order in self.orders:
            held = peak = 0
            for kind, _, chunk in order:
                before, within, after = layer.times(layers_per_chunk[chunk])
                if kind is Kind.FORWARD:
                    held += before
                    peak = max(peak, held)
                elif kind is Kind.BACKWARD:
                    peak = max(peak, held - before + within)
                    held += after - before
                else:
                    held -= after
            peaks.append(peak)
        return tuple(peaks)

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Every action with its stage."""
        for stage, order in enumerate(self.orders):
            for action in order:
                yield stage, action


@dataclasses.dataclass(frozen=True)
class TickTable:
    """A schedule whose stages work in lock-step: the tick in which each action runs.

    In one tick a stage runs at most one action of each kind: first the forward, then the backward,
    then the weights' gradient. A backward may follow its own forward in the same tick. The next
    chunk can use a result of tick t `hop_ticks` later, and the chunk before it `return_ticks`
    later. With one tick the message travels between two ticks; with two or more it travels while
    ticks are computed.
    """

    schedule: Schedule
    hop_ticks: tuple[int, ...]
    """Ticks to chunk c+1 from chunk c, at least 1; 1 where both are on the same stage."""
    return_ticks: tuple[int, ...]
    """The same from chunk c+1 back to chunk c."""
    starts: tuple[tuple[int, ...], ...]
    """For each stage, the tick of each action of its order; never falling."""

    def ticks_of_hop(self, kind: Kind, chunk: int) -> int:
        """Return the ticks between `chunk` and its successor for a message of that kind."""
        return (self.hop_ticks if kind is Kind.FORWARD else self.return_ticks)[chunk]

    @property
    def ticks(self) -> int:
        """The number of ticks."""
        return 1 + max(order[-1] for order in self.starts)

    @functools.cached_property
    def last_chunk_ticks(self) -> np.ndarray:
        """[microbatches, 2]: the ticks of the last chunk's forward and backward."""
        last = self.schedule.placement.chunks - 1
        ticks = np.empty((self.schedule.microbatches, 2), int)
        for tick, _, (kind, microbatch, chunk) in self.actions():
            if chunk == last and kind is not Kind.WEIGHT:
                ticks[microbatch, KIND_RANK[kind]] = tick
        return ticks

    @property
    def turns_later(self) -> bool:
        """True if no microbatch goes forwards and backwards through the last chunk in one tick."""
        return bool((self.last_chunk_ticks[:, 0] < self.last_chunk_ticks[:, 1]).all())

    def full_runs(self, *, shares_head: bool) -> tuple[tuple[int, int], ...]:
        """Return the longest runs of ticks in which no stage is idle.

        One is `full_run`. In the other one all stages have a backward alone.

        Returns:
            Of each run the first tick, and the one behind the last; none that is empty.
        """
        forwards, backwards = self._passes
        alone = _longest_run(backwards.all(axis=1) & ~forwards.any(axis=1))
        runs = (self.full_run(shares_head=shares_head), alone)
        return tuple((first, end) for first, end in runs if first < end)

    def full_run(self, *, shares_head: bool) -> tuple[int, int]:
        """Return the longest run of ticks in which no stage is idle, forwards or backwards.

        Every stage has a forward and a backward that does not read what the forward makes. If
        stages share a head, it may not lie between the two.

        Returns:
            The first tick, and the one behind the last; the same if there is none.
        """
        forwards, backwards = self._passes
        both = forwards.all(axis=1) & backwards.all(axis=1)
        made, read = self.last_chunk_ticks.T
        both[read[made == read]] = False
        if shares_head and not self.turns_later:
            both[read] = False
        return _longest_run(both)

    @property
    def _passes(self) -> tuple[np.ndarray, np.ndarray]:
        """Return where a stage goes forwards, and where backwards: [ticks, stages] each."""
        passes = np.zeros((len(KIND_RANK), self.ticks, len(self.starts)), bool)
        tick, stage, kind, _ = self.by_tick.T
        passes[kind, tick, stage] = True
        return passes[KIND_RANK[Kind.FORWARD]], passes[KIND_RANK[Kind.BACKWARD]]

    @functools.cached_property
    def by_tick(self) -> np.ndarray:
        """[actions, 4]: tick, stage, rank of the kind and chunk of every action, tick by tick.

        Of one tick in the order of the stages, and of one stage in its own.
        """
        found = [
            (tick, stage, KIND_RANK[action.kind], action.chunk)
            for tick, stage, action in self.actions()
        ]
        made = np.array(found)
        return made[np.argsort(made[:, 0], kind="stable")]

    def actions(self) -> Iterator[tuple[int, int, Action]]:
        """Every action with its tick and stage."""
        for stage, (order, starts) in enumerate(
            zip(self.schedule.orders, self.starts, strict=True)
        ):
            for action, tick in zip(order, starts, strict=True):
                yield tick, stage, action


def _longest_run(flags: np.ndarray) -> tuple[int, int]:
    """Return where the longest run of true values begins and ends; the same if none is true."""
    edges = np.flatnonzero(np.diff(np.concatenate(([0], flags.astype(int), [0])))).reshape(-1, 2)
    if not len(edges):
        return 0, 0
    first, end = edges[np.argmax(edges[:, 1] - edges[:, 0])].tolist()
    return first, end
