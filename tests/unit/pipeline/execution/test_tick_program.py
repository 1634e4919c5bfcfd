"""Tables of ticks as the executor reads them, played through with labels instead of tensors.

Every stage's rings hold labels that say what lies in a slot; each action looks whether it finds
there what was made for it, in random pipelines of every placement.
"""

import collections
import dataclasses
import itertools

import hypothesis
import numpy as np
import pytest
from hypothesis import strategies as st

from geojax.errors import UserError
from geojax.pipeline import (
    SCHEDULES,
    Costs,
    Hop,
    Kind,
    Placement,
    best_tick_table,
    tick_table,
)
from geojax.pipeline.execution.ring_pool import RingLeaf, RingPool, RingRows
from geojax.pipeline.execution.tick_program import NOTHING, TickProgram, repetitions
from geojax.pipeline.generators.paired import paired_interleaved
from geojax.pipeline.ticks import Packing, in_ticks

GARBAGE = "garbage"
FORWARD, BACKWARD, WEIGHT, ARRIVAL = range(4)
SOME = hypothesis.settings(max_examples=60, derandomize=True)


@st.composite
def tables(draw):
    """A table of any schedule, with hops of one to four ticks between any two stages, or with those
    that suit hops of so many forwards."""
    name = draw(st.sampled_from(tuple(SCHEDULES)))
    stages = draw(st.integers(1, 6))
    microbatches = draw(st.integers(1, 12))
    placement = Placement.linear(stages)
    if name == "zbv":
        placement = Placement.vee(stages)
    elif name == "interleaved":
        of_sites = [draw(st.integers(1, 3))] * draw(st.integers(1, 3))
        placement = Placement.interleaved(of_sites, draw(st.integers(1, 3)))
        microbatches *= of_sites[0]
    hops = [
        1 if before == behind else draw(st.integers(1, 4))
        for before, behind in itertools.pairwise(placement.stage_of)
    ]
    limit = draw(st.none() | st.integers(1, 8)) if name.startswith("latency_hiding") else None
    try:
        if draw(st.booleans()):
            across = tuple(Hop(ticks - 1.0, 0.0, "cut" if ticks > 1 else None) for ticks in hops)
            costs = dataclasses.replace(Costs.uniform(placement.chunks, 1.0, 0.7, 0.8), hops=across)
            return best_tick_table(name, placement, microbatches, costs, limit)
        return tick_table(name, placement, microbatches, hops, limit)
    except UserError:
        hypothesis.reject()


@st.composite
def programs(draw):
    table = draw(tables())
    forms = [{"branch_free": False}]
    if not table.schedule.split_backward:
        forms += [{"branch_free": True}, {"branch_free": False, "joint": True}]
    return TickProgram.of(table, **draw(st.sampled_from(forms)))


@st.composite
def pools(draw):
    """A program, the rings of its layers' values, and the layers of each chunk."""
    program = draw(programs())
    schedule = program.ticks.schedule
    last = st.sampled_from(schedule.kinds[1:])
    ring = st.integers(0, 1)
    count = draw(st.integers(1, 3))
    leaves = [(draw(ring), Kind.FORWARD, draw(last)) for _ in range(count)]
    if schedule.split_backward:
        stash = st.integers(1, 2)
        leaves += [(draw(ring), Kind.BACKWARD, Kind.WEIGHT) for _ in range(draw(stash))]
    layers = tuple(draw(st.integers(1, 3)) for _ in range(schedule.placement.chunks))
    numbered = (RingLeaf(ring, column, *life) for column, (ring, *life) in enumerate(leaves))
    return program, RingPool((None, None), tuple(numbered)), layers


class Ring:
    """The slots of one ring on one stage, and from when to when each label was needed."""

    def __init__(self, slots):
        self._slots = [GARBAGE] * slots
        self._written = [None] * slots
        self._needed = collections.defaultdict(list)

    def write(self, slot, label, moment):
        assert slot != NOTHING, f"no slot for {label}"
        self._slots[slot], self._written[slot] = label, (moment, label)
        self._needed[moment, label].append(moment)

    def read(self, slot, label, moment):
        assert slot != NOTHING, f"no slot to find {label} in"
        assert self._slots[slot] == label, f"{self._slots[slot]} where {label} should be"
        self._needed[self._written[slot]].append(moment)

    @property
    def largest_overlap(self):
        """The most labels that were needed at one moment."""
        events = collections.Counter()
        for moments in self._needed.values():
            events[min(moments), 0] += 1
            events[max(moments), 1] -= 1
        return max(itertools.accumulate(events[key] for key in sorted(events)), default=0)


class Replay:
    """A program walked as the executor walks it."""

    def __init__(self, program, pool, layers_per_chunk):
        self.program, self.pool, self.layers_per_chunk = program, pool, layers_per_chunk
        self.rows = RingRows.of(program, pool, layers_per_chunk)
        self.placement = program.ticks.schedule.placement
        stages = range(self.placement.stages)
        counts = {**program.slots, **dict(enumerate(self.rows.counts))}
        self.rings = [{name: Ring(slots) for name, slots in counts.items()} for _ in stages]
        self.made = [{"F": GARBAGE, "B": GARBAGE} for _ in stages]
        # The chunk whose weights a tick holds, beginning with the stage's first.
        self.held = [dict.fromkeys((Kind.FORWARD, Kind.BACKWARD), 0) for _ in self.made]
        self.done = set()

    def run(self):
        for segment in self.program.segments:
            for tick, form in segment.ticks():
                self._tick(form, tick)
        return self

    def _tick(self, form, tick):
        before = [dict(made) for made in self.made]
        for stage in range(self.placement.stages):
            tick_row = {name: int(column[tick, stage]) for name, column in self._columns()}
            for kind in sorted(form.kinds, key=self._is_written_last):
                written = 4 * tick + (2 if self._is_written_last(kind) else 0)
                if tick_row[f"{kind.value}.microbatch"] != NOTHING:
                    getattr(self, f"_{kind.name.lower()}")(stage, tick_row, 4 * tick)
                    microbatch, moment = tick_row[f"{kind.value}.microbatch"], 4 * tick
                    chunk = self.placement.chunks_of(stage)[tick_row[f"{kind.value}.chunk"]]
                    moment = max(written, moment + list(Kind).index(kind))
                    if self.program.joint:
                        assert self.held[stage][kind] == tick_row[f"{kind.value}.chunk"]
                    self._layers(stage, tick, kind, microbatch, chunk, moment)
                    continue
                if kind is not Kind.WEIGHT:
                    self.made[stage][kind.value] = GARBAGE
                if kind is Kind.FORWARD and (self.program.branch_free or self.rows.behind):
                    chunk = self.placement.chunks_of(stage)[0]
                    self._layers(stage, tick, kind, GARBAGE, chunk, written)
            if self.program.joint:
                for kind in self.held[stage]:
                    self.held[stage][kind] = tick_row[f"{kind.value}.following"]
        for number in form.channels:
            channel = self.program.channels[number]
            for source, target in channel.pairs:
                label = (before if channel.delayed else self.made)[source][channel.kind.value]
                slot = int(self.program.columns[f"channel.{number}"][tick, target])
                if slot != NOTHING:
                    ring = "inputs" if channel.kind is Kind.FORWARD else "cotangents"
                    self.rings[target][ring].write(slot, label, 4 * tick + ARRIVAL)

    def _is_written_last(self, kind):
        return self.rows.behind and kind is Kind.FORWARD

    def _layers(self, stage, tick, kind, microbatch, chunk, moment):
        """Reads what an action needs of each layer, and then writes what it makes."""
        leaves = [*enumerate(self.pool.leaves)]
        kinds = list(Kind)
        rank = kinds.index(kind)
        reads = [each for each in leaves if kinds.index(each[1].first) < rank]
        writes = [each for each in leaves if each[1].first is kind]
        for layer in range(self.layers_per_chunk[chunk]):
            for number, leaf in reads + writes:
                ring = self.rings[stage][leaf.ring]
                row = int(self.rows.of_kind[kind][tick, stage, layer, number])
                label = (microbatch, chunk, layer, number)
                if (number, leaf) in writes:
                    label = (GARBAGE, tick, number, layer) if microbatch == GARBAGE else label
                    ring.write(row, label, moment)
                elif rank <= kinds.index(leaf.last):
                    ring.read(row, label, moment)

    def _columns(self):
        return self.program.columns.items()

    def _work(self, stage, tick_row, kind):
        """The microbatch and the chunk of an action, counted off as done."""
        microbatch = tick_row[f"{kind}.microbatch"]
        chunk = self.placement.chunks_of(stage)[tick_row[f"{kind}.chunk"]]
        assert bool(tick_row[f"{kind}.first"]) == (chunk == 0)
        assert bool(tick_row[f"{kind}.last"]) == (chunk == self.placement.chunks - 1)
        assert (kind, microbatch, chunk) not in self.done
        self.done.add((kind, microbatch, chunk))
        return microbatch, chunk

    def _holds(self, stage, chunk):
        return 0 <= chunk < self.placement.chunks and self.placement.stage_of[chunk] == stage

    def _forward(self, stage, tick_row, moment):
        moment += FORWARD
        microbatch, chunk = self._work(stage, tick_row, "F")
        rings, stream = self.rings[stage], ("stream", microbatch, chunk)
        if chunk > 0:
            rings["inputs"].read(tick_row["F.input"], ("stream", microbatch, chunk - 1), moment)
        if chunk == self.placement.chunks - 1:
            rings["cotangents"].write(tick_row["F.output"], stream, moment)
        elif self._holds(stage, chunk + 1):
            rings["inputs"].write(tick_row["F.output"], stream, moment)
        self.made[stage]["F"] = stream

    def _backward(self, stage, tick_row, moment):
        moment += BACKWARD
        microbatch, chunk = self._work(stage, tick_row, "B")
        rings, cotangent = self.rings[stage], ("cotangent", microbatch, chunk)
        above = ("cotangent", microbatch, chunk + 1)
        if chunk == self.placement.chunks - 1:
            above = ("stream", microbatch, chunk)
        rings["cotangents"].read(tick_row["B.input"], above, moment)
        if self._holds(stage, chunk - 1):
            rings["cotangents"].write(tick_row["B.output"], cotangent, moment)
        self.made[stage]["B"] = cotangent

    def _weight(self, stage, tick_row, moment):
        self._work(stage, tick_row, "W")


@SOME
@hypothesis.given(pools())
def test_every_action_finds_what_was_made_for_it_in_the_fewest_slots(drawn):
    program, *_ = drawn
    replay = Replay(*drawn).run()
    schedule = program.ticks.schedule
    assert len(replay.done) == sum(map(len, schedule.orders))
    for name, slots in {**program.slots, **dict(enumerate(replay.rows.counts))}.items():
        assert slots == max(rings[name].largest_overlap for rings in replay.rings), name


@pytest.mark.parametrize("hop", [1, 2])
@pytest.mark.parametrize("turn", [0, 1])
def test_a_forward_takes_the_rows_of_its_ticks_backward_if_that_reads_nothing_it_leaves(turn, hop):
    hops, chunks = (hop,), Placement.linear(2)
    order = paired_interleaved(chunks, 8, hops, turn=turn)
    table = in_ticks(order, hops, hops, Packing.TOGETHER)
    program = TickProgram.of(table, branch_free=False, joint=True)
    pool = RingPool((None,), (RingLeaf(0, 0, Kind.FORWARD, Kind.BACKWARD),))
    replay = Replay(program, pool, (1, 1)).run()
    assert replay.rows.behind == bool(turn)
    assert not Replay(program, pool, (1, 2)).run().rows.behind, "a chunk's rows are all written"
    forwards, backwards = (replay.rows.of_kind[Kind(kind)][:, 0, 0, 0] for kind in "FB")
    both = (program.columns["joint"] == 1)[:, 0]
    assert both.any()
    assert (forwards[both] == backwards[both]).any() == bool(turn)


@SOME
@hypothesis.given(programs())
def test_channels_are_permutations_that_carry_every_hop(program):
    carried = collections.Counter()
    for channel in program.channels:
        for ends in zip(*channel.pairs, strict=True):
            assert len(set(ends)) == len(channel.pairs), "one message for each stage, and from each"
        carried.update((channel.kind, channel.delayed, pair) for pair in channel.pairs)
    assert set(carried.values()) <= {1}
    stage_of = program.ticks.schedule.placement.stage_of
    hops = set()
    table = program.ticks
    for before, behind, ticks, back in zip(
        stage_of[:-1], stage_of[1:], table.hop_ticks, table.return_ticks, strict=True
    ):
        if before != behind:
            hops.add((Kind.FORWARD, ticks > 1, (before, behind)))
            hops.add((Kind.BACKWARD, back > 1, (behind, before)))
    assert set(carried) == hops


@SOME
@hypothesis.given(programs())
def test_segments_follow_one_another_and_say_what_happens_in_them(program):
    firsts = [segment.first for segment in program.segments]
    ends = [segment.first + segment.count for segment in program.segments]
    assert [*firsts, program.ticks.ticks] == [0, *ends]
    if not (program.branch_free or program.joint):
        assert len(program.segments) == 1
    for segment in program.segments:
        period = len(segment.pattern)
        for offset, form in enumerate(segment.pattern):
            ticks = slice(segment.first + offset, segment.end, period)
            for kind in program.ticks.schedule.kinds:
                busy = (program.columns[f"{kind.value}.microbatch"][ticks] != NOTHING).any(axis=1)
                assert busy.any() == (kind in form.kinds)
                assert not program.branch_free or len(set(busy.tolist())) == 1
            for number in range(len(program.channels)):
                used = (program.columns[f"channel.{number}"][ticks] != NOTHING).any()
                assert used == (number in form.channels)


@pytest.mark.parametrize("hop", [1, 2, 3, 5])
@pytest.mark.parametrize("schedule", ["1f1b", "geopipe"])
def test_more_microbatches_take_no_more_code(schedule, hop):
    def actions(microbatches):
        table = tick_table(schedule, Placement.linear(4), microbatches, (1, hop, 1))
        segments = TickProgram.of(table, branch_free=True).segments
        return sum(len(form.kinds) for segment in segments for form in segment.pattern)

    assert actions(96) == actions(48)


def test_repetitions_are_found_and_hold_the_whole_table():
    ticks = [(True, False)] * 3 + [(True, True), (False, False)] * 5 + [(False, True)]
    assert repetitions(ticks) == [(0, 1, 3), (3, 2, 5), (13, 1, 1)]


@pytest.mark.parametrize("hops", [(1,), (1, 3, 1), (2, 2)])
def test_without_branches_forwards_come_first_then_both_then_backwards(hops):
    microbatches, way = 5, sum(hops)
    table = tick_table("branch_free", Placement.linear(len(hops) + 1), microbatches, hops)
    program = TickProgram.of(table, branch_free=True)
    found = [
        (form.kinds, segment.repeats) for segment in program.segments for form in segment.pattern
    ]
    forward, backward = (Kind.FORWARD,), (Kind.BACKWARD,)
    assert found == [(forward, way), (forward + backward, microbatches), (backward, way)]
    # Of each stage: the microbatches between its forward and its backward, both included.
    in_flight = [min(microbatches, 1 + 2 * sum(hops[stage:])) for stage in range(len(hops) + 1)]
    pool = RingPool((None,), (RingLeaf(0, 0, Kind.FORWARD, Kind.BACKWARD),))
    assert RingRows.of(program, pool, (1,) * table.schedule.placement.chunks).counts[0] >= max(
        in_flight
    )


def test_columns_cannot_be_changed():
    table = tick_table("1f1b", Placement.linear(2), 3, (1,))
    program = TickProgram.of(table, branch_free=False)
    for column in program.columns.values():
        assert column.dtype == np.int32
        with pytest.raises(ValueError, match="read-only"):
            column[0, 0] = 0


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved"])
def test_passes_are_joint_unless_the_backward_reads_what_the_forward_makes(schedule):
    placement = Placement(2, (0, 1, 0, 1)) if schedule == "interleaved" else Placement.linear(2)
    table = tick_table(schedule, placement, 4, (1,) * (placement.chunks - 1))
    program = TickProgram.of(table, branch_free=False, joint=True)
    actions = collections.defaultdict(dict)
    for tick, stage, action in table.actions():
        actions[tick, stage][action.kind] = action
    both = {place: own for place, own in actions.items() if len(own) == 2}
    assert both
    joint = program.columns["joint"]
    for place, own in both.items():
        forward, backward = own[Kind.FORWARD], own[Kind.BACKWARD]
        last = placement.chunks - 1
        same = forward.microbatch == backward.microbatch and forward.chunk == last
        assert joint[place] == (not (same and backward.chunk == last))
    assert joint.sum() <= len(both)
    assert (joint == 1).any()


@pytest.mark.parametrize("turn", [0, 1])
def test_a_shared_head_is_in_the_ticks_of_the_last_backwards_on_all_stages(turn):
    placement = Placement.interleaved([2], 2)
    hops = (1,) * (placement.chunks - 1)
    order = paired_interleaved(placement, 4, hops, turn=turn)
    table = in_ticks(order, hops, hops, Packing.TOGETHER)
    assert table.turns_later == bool(turn)
    program = TickProgram.of(table, branch_free=False, joint=True, shares_head=True)
    columns, last = program.columns, placement.stage_of[-1]
    heads = columns["head.microbatch"]
    assert (heads == heads[:, :1]).all(), "stages take one branch"
    ends = table.last_chunk_ticks
    assert [heads[tick, 0] for tick in ends[:, 1]] == list(range(4))
    assert [columns["head.of_forward"][tick, 0] for tick in ends[:, 0]] == list(range(4))
    assert (heads != NOTHING).sum() == 2 * 4
    slots = columns["head.slot"]
    assert (slots[ends[:, 1], last] == columns["B.input"][ends[:, 1], last]).all()
    assert (slots != NOTHING).sum() == 4
    joint = columns["joint"][ends[:, 1]]
    assert joint.any() == bool(turn), "a head between the passes parts them"


def test_a_shared_embedding_is_in_the_ticks_of_the_first_chunk_on_all_stages():
    placement = Placement.interleaved([2], 2)
    table = tick_table("interleaved", placement, 4, (1,) * (placement.chunks - 1))
    program = TickProgram.of(
        table, branch_free=False, joint=True, shares_head=True, shares_embedding=True
    )
    columns, first = program.columns, placement.stage_of[0]
    for kind, later in (("F", 0), ("B", 1)):
        embeds = columns[f"embedding.{kind}"]
        assert (embeds == embeds[:, :1]).all(), "stages take one branch"
        ticks = np.flatnonzero(columns[f"{kind}.first"][:, first] == 1)[: 4 - later]
        assert (embeds[ticks + later, 0] == columns[f"{kind}.microbatch"][ticks, first]).all()
        assert (embeds[:, 0] != NOTHING).sum() == 4 - later
    assert columns["B.first"][-1, first] == 1, "of the last one the program knows"
    slots, forwards = columns["embedding.slot"], columns["F.first"] == 1
    assert ((slots != NOTHING) == forwards).all(), "the first stage keeps what it reads"
    assert (slots[forwards] == columns["F.input"][forwards]).all()
    for segment in program.segments:
        for tick, form in segment.ticks():
            kinds = {Kind.FORWARD: "F", Kind.BACKWARD: "B"}
            for kind, name in kinds.items():
                embeds = columns[f"embedding.{name}"][tick, 0] != NOTHING
                assert not embeds or kind in form.embeds


def test_ticks_in_which_no_stage_is_idle_are_loops_of_their_own():
    placement = Placement.interleaved([3], 2)
    hops = (1,) * (placement.chunks - 1)
    table = in_ticks(paired_interleaved(placement, 9, hops, turn=1), hops, hops, Packing.TOGETHER)
    program = TickProgram.of(table, branch_free=False, joint=True)
    forms = [form for segment in program.segments for form in segment.pattern]
    forward, backward = (Kind.FORWARD,), (Kind.BACKWARD,)
    both = forward + backward
    assert [form.kinds for form in forms] == [forward, both, both, both, backward, backward]
    assert [form.full for form in forms] == [False, False, True, False, True, False]
    run, last = program.segments[2], program.segments[4]
    everywhere = (program.columns["joint"] == 1).all(axis=1)
    assert everywhere[run.first : run.end].all()
    assert not everywhere[run.first - 1]
    assert not everywhere[run.end]
    assert run.count == 2 * 9 - 2 * 3 - 2, "all but the forwards before the first backward"
    backwards = (program.columns["B.microbatch"] != NOTHING).all(axis=1)
    assert backwards[last.first : last.end].all()
    assert not backwards[last.end]


def test_ticks_are_not_full_where_heads_part_the_passes():
    table = tick_table("1f1b", Placement.linear(2), 4, (1,))
    assert not table.turns_later
    program = TickProgram.of(table, branch_free=False, joint=True, shares_head=True)
    assert not any(
        form.full and Kind.FORWARD in form.kinds
        for segment in program.segments
        for form in segment.pattern
    )
