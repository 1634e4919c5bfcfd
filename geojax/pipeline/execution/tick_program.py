"""The table of ticks in the form that the executor's loop reads: actions, messages and slots.

Every stage has ring buffers for values that wait:

    inputs        streams that arrived, or were embedded by all stages, and whose forward has not
                  begun
    cotangents    their gradients, and of the last chunk the streams that go into the head

What its layers hold lies in rings of its own (`geojax.pipeline.execution.ring_pool`). Slots are
assigned by coloring the intervals from the first write to the last read, which takes the fewest
possible on a stage; every stage has as many as the one that needs most.

Messages travel in *channels*, each a permutation of stages. A result that is used in the very next
tick is sent at once. A result with two ticks or more is sent during the next tick's compute, so
that transfer and compute do not wait for each other.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from geojax.pipeline.schedule import Action, Kind, TickTable

NOTHING = -1
"""The entry for no microbatch or no slot."""

# A tick has three phases in which streams are written or read: forward, backward, arrivals.
_FORWARD, _BACKWARD, _ARRIVAL = range(3)
_PHASES = 3

SCOPE_OF: Mapping[Kind, str] = {
    Kind.FORWARD: "chunk forward",
    Kind.BACKWARD: "chunk backward",
    Kind.WEIGHT: "chunk weight gradients",
}
"""The scope of the actions of each kind in a program and its profile."""

FULL_TICKS = "full ticks"
"""The scope of ticks in which no stage is idle (`TickForm.full`)."""

LONGEST_PATTERN = 128
"""In ticks. (Strict 1F1B over eleven hops of three ticks repeats every 67.)"""

_COST_OF_LOOP = 0.1
"""Cost of one more loop, as a share of the cost of an action in its body."""


@dataclasses.dataclass(frozen=True)
class Channel:
    """Messages that travel together: each stage sends at most one and gets at most one."""

    kind: Kind
    """The action that makes them: forwards make streams, backwards cotangents."""
    pairs: tuple[tuple[int, int], ...]
    """(sending stage, receiving stage)."""
    delayed: bool
    """Messages leave in the tick after the one that made them, while that is computed."""


class TickForm(NamedTuple):
    """The part of a loop's body that runs a tick."""

    kinds: tuple[Kind, ...]
    """The actions of any stage."""
    channels: tuple[int, ...]
    """The channels by which anything arrives."""
    head: bool
    """True if stages share the head of a microbatch."""
    embeds: tuple[Kind, ...] = ()
    """The passes of a microbatch's embedding that stages share."""
    full: bool = False
    """True if nothing is chosen, since no stage is idle (`TickTable.full_runs`)."""


@dataclasses.dataclass(frozen=True)
class Segment:
    """Consecutive ticks that one loop runs, its body a pattern of one or more of them.

    A strict order with hops of several ticks settles into a pattern, as F, F, B, -, B: without
    branches, loops of equal ticks would be as many as a step has microbatches.
    """

    first: int
    pattern: tuple[TickForm, ...]
    repeats: int

    @property
    def count(self) -> int:
        """The number of ticks."""
        return self.repeats * len(self.pattern)

    @property
    def end(self) -> int:
        """The tick after the last one."""
        return self.first + self.count

    def ticks(self) -> Iterator[tuple[int, TickForm]]:
        """Yield the ticks and their forms."""
        return zip(range(self.first, self.end), itertools.cycle(self.pattern), strict=False)

    def part(self, first: int, end: int) -> "Iterator[Segment]":
        """Yield segments of the ticks from `first` to before `end`: whole repeats, and the rest."""
        period = len(self.pattern)
        while first < end:
            offset = (first - self.first) % period
            if offset or end - first < period:
                forms = self.pattern[offset : offset + end - first]
                yield Segment(first, forms, 1)
                first += len(forms)
            else:
                repeats = (end - first) // period
                yield Segment(first, self.pattern, repeats)
                first += repeats * period


@dataclasses.dataclass(frozen=True, eq=False)
class TickProgram:
    """The input of a loop over ticks."""

    ticks: TickTable
    branch_free: bool
    """Stages without work compute on whatever lies in a slot that they may overwrite."""
    joint: bool
    """A forward and a backward of one stage in one tick, neither of which reads what the other
    makes, are one branch: each computes while the other's messages travel."""
    shares_head: bool
    """Stages share the head of a microbatch, in the tick of the last chunk's backward: before all
    else; between forwards and backwards, none of them joint, if microbatches turn in one tick
    (`TickTable.turns_later`)."""
    shares_embedding: bool
    """Stages share the embedding of a microbatch: before its first forward in the same tick, and
    in the tick behind its last backward; of the last tick, behind all."""
    columns: Mapping[str, np.ndarray]
    """int32 [ticks, stages] each; `NOTHING` where there is none. For each kind k of action:
    `k.microbatch`; `k.chunk` (its number on the stage); `k.input` (the slot that it reads);
    `k.output` (the slot on the same stage that its result goes to, of the next chunk or of the
    head), `k.first` and `k.last` (1 where it is the model's first or last chunk). And
    `channel.N`: the slot of what arrives; with `joint` also `joint`: 1 where a stage has both, and
    `k.following`: the chunk of the next action behind the tick, and after the last one its own.
    With `shares_head` also, the same on all stages, `head.microbatch`, and `head.of_forward` for a
    loop of forwards alone; and `head.slot`: where the last stage has the stream and gets its
    cotangent. With `shares_embedding`, the same on all stages, `embedding.F` and
    `embedding.B`: the microbatch; and `embedding.slot`: where the first stage reads it.
    """
    channels: tuple[Channel, ...]
    segments: tuple[Segment, ...]
    slots: Mapping[str, int]
    """The number of slots of each ring."""

    def holds_chunks(self, layers_per_chunk: Sequence[int]) -> bool:
        """Return True if a stage runs copies of its chunks, one in each direction.

        It has several, of one layer each, and residuals are written behind the branches.
        """
        several = self.ticks.schedule.placement.chunks_per_stage > 1
        return self.writes_behind(layers_per_chunk) and several and set(layers_per_chunk) == {1}

    def writes_behind(self, layers_per_chunk: Sequence[int]) -> bool:
        """Return True if a tick writes its residuals when all its branches have ended."""
        return self.joint and self.ticks.turns_later and len(set(layers_per_chunk)) == 1

    @classmethod
    def of(
        cls,
        ticks: TickTable,
        *,
        branch_free: bool,
        joint: bool = False,
        shares_head: bool = False,
        shares_embedding: bool = False,
    ) -> "TickProgram":
        """Make the program of a table; without branches, its backwards must not be split.

        With branches and whole backwards it may be `joint`.
        """
        assert not (joint and (branch_free or ticks.schedule.split_backward)), (
            "a forward and a whole backward are one branch"
        )
        assert not (branch_free and ticks.schedule.split_backward), (
            "a split backward must have branches: its ticks have three units"
        )
        return _Builder(ticks, branch_free, joint, shares_head, shares_embedding).build()

    def of_table(self, ticks: TickTable) -> "TickProgram":
        """Make the program of the same form of another table."""
        return TickProgram.of(
            ticks,
            branch_free=self.branch_free,
            joint=self.joint,
            shares_head=self.shares_head,
            shares_embedding=self.shares_embedding,
        )


class _Builder:
    def __init__(
        self,
        ticks: TickTable,
        branch_free: bool,
        joint: bool,
        shares_head: bool,
        shares_embedding: bool,
    ):
        self._table, self._branch_free, self._joint = ticks, branch_free, joint
        self._shares_head, self._shares_embedding = shares_head, shares_embedding
        schedule = ticks.schedule
        self._placement = schedule.placement
        self._stage_of = self._placement.stage_of
        self._number_on_stage = self._placement.number_on_stage
        self._tick = {action: tick for tick, _, action in ticks.actions()}
        self._kinds = schedule.kinds
        shape = (ticks.ticks, self._placement.stages)
        fields = ("microbatch", "chunk", "input", "output", "first", "last")
        names = [f"{kind.value}.{field}" for kind in self._kinds for field in fields]
        self._columns = {name: np.full(shape, NOTHING, np.int32) for name in names}
        self._channels = _channels(ticks)

    def build(self) -> TickProgram:
        for tick, stage, action in self._table.actions():
            self._describe(tick, stage, action)
        slots = {
            "inputs": self._assign_slots(self._inputs()),
            "cotangents": self._assign_slots(self._cotangents()),
        }
        if self._shares_head:
            self._describe_heads()
        if self._shares_embedding:
            self._describe_embeddings()
        if self._joint:
            self._columns["joint"] = self._independent().astype(np.int32)
            for kind in self._kinds:
                self._columns[f"{kind.value}.following"] = _following(
                    self._columns[f"{kind.value}.chunk"]
                )
        segments = self._segments()
        return TickProgram(
            self._table,
            self._branch_free,
            self._joint,
            self._shares_head,
            self._shares_embedding,
            {name: _read_only(column) for name, column in self._columns.items()},
            self._channels,
            segments,
            slots,
        )

    def _independent(self) -> np.ndarray:
        """Return where a stage has a forward, and a backward that does not read what that makes."""
        columns = self._columns
        both = (columns["F.microbatch"] != NOTHING) & (columns["B.microbatch"] != NOTHING)
        output = columns.get("F.output", np.full_like(columns["F.last"], NOTHING))
        reads = (columns["F.last"] == 1) & (output == columns["B.input"])
        if self._shares_head and not self._table.turns_later:
            reads |= columns["head.microbatch"] != NOTHING
        return both & ~reads

    def _describe_heads(self) -> None:
        last, columns = self._stage_of[-1], self._columns
        columns["head.microbatch"] = self._on_all_stages("B.last", last)
        columns["head.of_forward"] = self._on_all_stages("F.last", last)
        is_last = columns["B.last"] == 1
        columns["head.slot"] = np.where(is_last, columns["B.input"], NOTHING)

    def _describe_embeddings(self) -> None:
        first, columns = self._stage_of[0], self._columns
        columns["embedding.F"] = self._on_all_stages("F.first", first)
        behind = self._on_all_stages("B.first", first)[:-1]
        columns["embedding.B"] = np.pad(behind, [(1, 0), (0, 0)], constant_values=NOTHING)

    def _on_all_stages(self, runs: str, stage: int) -> np.ndarray:
        """Return the microbatch of the ticks whose column `runs` is 1 on a stage, on all stages."""
        kind = runs.partition(".")[0]
        does = self._columns[runs][:, stage] == 1
        microbatch = np.where(does, self._columns[f"{kind}.microbatch"][:, stage], NOTHING)
        return np.tile(microbatch[:, None], self._placement.stages)

    def _describe(self, tick: int, stage: int, action: Action) -> None:
        kind, last = action.kind.value, self._placement.chunks - 1
        self._columns[f"{kind}.microbatch"][tick, stage] = action.microbatch
        self._columns[f"{kind}.chunk"][tick, stage] = self._number_on_stage[action.chunk]
        self._columns[f"{kind}.first"][tick, stage] = action.chunk == 0
        self._columns[f"{kind}.last"][tick, stage] = action.chunk == last

    def _hops(self, kind: Kind) -> Iterable[tuple[Action, Action]]:
        """Yield each action of a kind and the one that reads its result."""
        chunks = self._placement.chunks
        for microbatch, chunk in itertools.product(
            range(self._table.schedule.microbatches), range(chunks - 1)
        ):
            pair = (Action(kind, microbatch, chunk), Action(kind, microbatch, chunk + 1))
            yield pair if kind is Kind.FORWARD else pair[::-1]

    def _arrivals(self, kind: Kind) -> "Iterable[_Interval]":
        """Yield the intervals of the results of one chunk for the next, on the stage that reads."""
        phase = _FORWARD if kind is Kind.FORWARD else _BACKWARD
        for made, read in self._hops(kind):
            source, target = self._stage_of[made.chunk], self._stage_of[read.chunk]
            end = self._at(read, phase)
            reads = (f"{kind.value}.input", self._tick[read])
            if source == target:
                writes = (f"{kind.value}.output", self._tick[made])
                yield _Interval(target, self._at(made, phase), end, (writes, reads))
                continue
            number = self._channel_of(kind, source, target, made, read)
            arrival = self._tick[made] + self._channels[number].delayed
            writes = (f"channel.{number}", arrival)
            yield _Interval(target, _PHASES * arrival + _ARRIVAL, end, (writes, reads))

    def _inputs(self) -> "Iterable[_Interval]":
        yield from self._arrivals(Kind.FORWARD)
        if not self._shares_embedding:
            return
        for microbatch in range(self._table.schedule.microbatches):
            action = Action(Kind.FORWARD, microbatch, 0)
            tick, at = self._tick[action], self._at(action, _FORWARD)
            entries = (("embedding.slot", tick), ("F.input", tick))
            yield _Interval(self._stage_of[0], at, at, entries)

    def _cotangents(self) -> "Iterable[_Interval]":
        yield from self._arrivals(Kind.BACKWARD)
        last = self._placement.chunks - 1
        for microbatch in range(self._table.schedule.microbatches):
            made, read = (Action(kind, microbatch, last) for kind in self._kinds[:2])
            entries = (("F.output", self._tick[made]), ("B.input", self._tick[read]))
            start, end = self._at(made, _FORWARD), self._at(read, _BACKWARD)
            yield _Interval(self._stage_of[last], start, end, entries)

    def _at(self, action: Action, phase: int) -> int:
        return _PHASES * self._tick[action] + phase

    def _channel_of(self, kind: Kind, source: int, target: int, made: Action, read: Action) -> int:
        pair = (source, target)
        delayed = self._table.ticks_of_hop(kind, min(made.chunk, read.chunk)) > 1
        for number, channel in enumerate(self._channels):
            if (channel.kind, channel.delayed) == (kind, delayed) and pair in channel.pairs:
                return number
        raise AssertionError(f"no channel for {made}")

    def _assign_slots(self, intervals: "Iterable[_Interval]") -> int:
        """Assign slots to all intervals, write them into the columns, and return their number."""
        most = 0
        by_stage: dict[int, list[_Interval]] = {}
        for interval in intervals:
            by_stage.setdefault(interval.stage, []).append(interval)
        for stage, members in by_stage.items():
            count = 0
            free: list[int] = []
            busy: list[tuple[int, int]] = []
            for interval in sorted(members, key=lambda each: (each.start, each.end)):
                while busy and busy[0][0] < interval.start:
                    heapq.heappush(free, heapq.heappop(busy)[1])
                if not free:
                    free.append(count)
                    count += 1
                slot = heapq.heappop(free)
                heapq.heappush(busy, (interval.end, slot))
                for name, tick in interval.entries:
                    if name not in self._columns:
                        self._columns[name] = np.full_like(self._columns["F.microbatch"], NOTHING)
                    self._columns[name][tick, stage] = slot
            most = max(most, count)
        return most

    def _segments(self) -> tuple[Segment, ...]:
        busy = {
            kind: (self._columns[f"{kind.value}.microbatch"] != NOTHING).any(axis=1)
            for kind in self._kinds
        }
        arrives = np.zeros((self._table.ticks, len(self._channels)), bool)
        for kind in self._kinds[:2]:
            for made, read in self._hops(kind):
                source, target = self._stage_of[made.chunk], self._stage_of[read.chunk]
                if source != target:
                    number = self._channel_of(kind, source, target, made, read)
                    arrives[self._tick[made] + self._channels[number].delayed, number] = True
        heads = np.zeros(self._table.ticks, bool)
        if self._shares_head:
            heads = self._columns["head.microbatch"][:, 0] != NOTHING
        passes = self._kinds[:2]
        embeds = np.zeros((self._table.ticks, len(passes)), bool)
        if self._shares_embedding:
            names = ("embedding.F", "embedding.B")
            embeds = np.stack([self._columns[name][:, 0] != NOTHING for name in names], axis=1)
        does = np.stack([*(busy[kind] for kind in self._kinds), heads, *embeds.T], axis=1)

        def form(ticks: slice) -> TickForm:
            *runs, head, forward, backward = does[ticks].any(axis=0).tolist()
            kinds = tuple(itertools.compress(self._kinds, runs))
            channels = np.flatnonzero(arrives[ticks].any(axis=0))
            embeds = tuple(itertools.compress(passes, (forward, backward)))
            return TickForm(kinds, tuple(channels.tolist()), head, embeds)

        if self._joint:
            return self._phases(busy, form)
        if not self._branch_free:  # idle stages cost nothing: one loop
            return (Segment(0, (form(slice(None)),), len(does)),)
        return tuple(
            Segment(
                first,
                tuple(
                    form(slice(first + offset, first + repeats * period, period))
                    for offset in range(period)
                ),
                repeats,
            )
            for first, period, repeats in repetitions([tuple(row) for row in does.tolist()])
        )

    def _phases(
        self, busy: Mapping[Kind, np.ndarray], form: Callable[[slice], TickForm]
    ) -> tuple[Segment, ...]:
        """Cut the ticks where the first backward is, behind the last forward, and at both ends of
        runs in which no stage is idle.

        Nothing is chosen in these, so that a compiler orders all that a tick sends and computes. At
        both ends of the table a loop holds the code of one kind.
        """
        runs = self._table.full_runs(shares_head=self._shares_head)
        first_backward = int(np.argmax(busy[Kind.BACKWARD]))
        behind_forwards = int(np.flatnonzero(busy[Kind.FORWARD])[-1]) + 1
        cuts = {0, first_backward, behind_forwards, self._table.ticks, *itertools.chain(*runs)}

        def segment(first: int, end: int) -> Segment:
            ticks = form(slice(first, end))._replace(full=(first, end) in runs)
            return Segment(first, (ticks,), end - first)

        return tuple(itertools.starmap(segment, itertools.pairwise(sorted(cuts))))


def repetitions(ticks: Sequence[tuple[bool, ...]]) -> list[tuple[int, int, int]]:
    """Cut a table into repeated patterns, so that the patterns hold few actions in all.

    Args:
        ticks: the kinds of action that each tick has, and whether it has a shared head.

    Returns:
        (first tick, ticks of the pattern, repeats) of each cut.
    """
    if not ticks:
        return []
    _, codes = np.unique(np.array(ticks), axis=0, return_inverse=True)
    longest = min(LONGEST_PATTERN, len(ticks))
    periods = np.arange(1, longest + 1)
    rows = [_equal_later(codes.ravel(), each) // each + 1 for each in range(1, longest + 1)]
    most = np.stack(rows)
    before = np.concatenate(([0], np.cumsum(np.array(ticks).sum(axis=1))))
    # The least cost of all ticks from t on, and the cut at t that has it.
    costs = np.zeros(len(ticks) + longest + 1)
    costs[len(ticks) + 1 :] = np.inf
    best: list[tuple[float, int, int]] = [(0.0, 0, 0)] * len(ticks)
    for tick in range(len(ticks) - 1, -1, -1):
        ends = tick + periods
        actions = _COST_OF_LOOP + (before[np.minimum(ends, len(ticks))] - before[tick])
        found = []
        for times in (np.ones_like(periods), most[:, tick]):
            cost = actions + costs[tick + periods * times]
            least = int(np.argmin(cost))
            found.append((float(cost[least]), least + 1, int(times[least])))
        best[tick] = min(found)
        costs[tick] = best[tick][0]
    cuts, tick = [], 0
    while tick < len(ticks):
        _, period, repeats = best[tick]
        cuts.append((tick, period, repeats))
        tick += period * repeats
    return cuts


def _equal_later(codes: np.ndarray, period: int) -> np.ndarray:
    """Count for each tick how many from it on equal the ones `period` later, without a break."""
    equal = np.zeros(len(codes), bool)
    equal[: len(codes) - period] = codes[:-period] == codes[period:]
    ticks = np.arange(len(codes))
    breaks = np.where(equal, len(codes), ticks)
    return np.minimum.accumulate(breaks[::-1])[::-1] - ticks


@dataclasses.dataclass(frozen=True)
class _Interval:
    """A value that lies in a slot from one moment to another, both included."""

    stage: int
    start: int
    end: int
    entries: tuple[tuple[str, int], ...]
    """(column, tick) of the entries that name the slot."""


def _channels(table: TickTable) -> tuple[Channel, ...]:
    """Find few permutations, greedily, that carry all hops."""
    stage_of = table.schedule.placement.stage_of
    channels: list[tuple[Kind, bool, list[tuple[int, int]]]] = []
    for kind in (Kind.FORWARD, Kind.BACKWARD):
        for chunk, (before, following) in enumerate(itertools.pairwise(stage_of)):
            if before == following:
                continue
            pair = (before, following) if kind is Kind.FORWARD else (following, before)
            delayed = table.ticks_of_hop(kind, chunk) > 1
            for own_kind, own_delayed, pairs in channels:
                fits = all(pair[0] != a and pair[1] != b for a, b in pairs)
                if (own_kind, own_delayed) == (kind, delayed) and (fits or pair in pairs):
                    if pair not in pairs:
                        pairs.append(pair)
                    break
            else:
                channels.append((kind, delayed, [pair]))
    return tuple(Channel(kind, tuple(pairs), delayed) for kind, delayed, pairs in channels)


def _following(chunks: np.ndarray) -> np.ndarray:
    """Return for each tick of `chunks` [ticks, stages] the next entry behind it, or the last."""
    following = np.empty_like(chunks)
    for stage, column in enumerate(chunks.T):
        ticks = np.flatnonzero(column != NOTHING)
        behind = np.searchsorted(ticks, np.arange(len(column)), side="right")
        following[:, stage] = column[ticks[np.minimum(behind, len(ticks) - 1)]]
    return following


def _read_only(column: np.ndarray) -> np.ndarray:
    column.flags.writeable = False
    return column
