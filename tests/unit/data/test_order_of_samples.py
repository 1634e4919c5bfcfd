"""The order of samples over packing, mixing, batch ramps, changes of layout and resumes.

The n-th sequence of a run is drawn once, from one undisturbed process. A disturbed run is then
drawn: its batches grow, it stops after any step, and goes on with other processes, another ramp or
another number of devices. Each of its processes reads its share with a loader of its own.
"""

import itertools
import json
import random
from collections import Counter
from typing import NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.chats import write_tokenizer

from geojax.data import Corpus, Loader, Prepared, PrepareSettings, PrepareSource, Source, prepare
from geojax.data.batch_ramp import BatchRamp
from geojax.data.windows import SequenceWindows, collate

WORDS = ("one", "two", "three", "user", "assistant")


def words(draw, most):
    return " ".join(draw.choice(WORDS) for _ in range(draw.randrange(1, most)))


def write_documents(path, draw, count):
    lines = [{"text": f"{number} {words(draw, 12)}"} for number in range(count)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def write_talks(path, draw, count):
    talks = [
        [
            {"role": "user", "content": f"{number} {words(draw, 6)}"},
            {"role": "assistant", "content": words(draw, 6)},
        ]
        for number in range(count)
    ]
    path.write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
    return str(path)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    """Two sources of plain documents and one of marked conversations."""
    base, draw = tmp_path_factory.mktemp("order"), random.Random(5)
    tokenizer = write_tokenizer(base) / "tokenizer.json"
    sources = [
        PrepareSource(name=name, files=(write_documents(base / f"{name}.jsonl", draw, count),))
        for name, count in (("long", 300), ("short", 60))
    ]
    talks = PrepareSource(
        name="talks", files=(write_talks(base / "talks.jsonl", draw, 40),), format="chat"
    )
    settings = PrepareSettings(
        output=base / "prepared", sources=(*sources, talks), tokenizer=tokenizer
    )
    folders = prepare(settings)
    assert [folder.manifest.splits["train"].documents for folder in folders] == [300, 60, 40]
    return folders


class Part(NamedTuple):
    """Steps of a run on one layout, between a start and a stop."""

    ramp: BatchRamp
    shards: list[list[int]]
    """Shards of the batch that the devices of each process hold; several may hold the same."""
    steps: int

    def sequences(self, process):
        """The sequences of a full batch that a process needs."""
        count = 1 + max(itertools.chain(*self.shards))
        size = self.ramp.full // count
        return [
            sequence
            for shard in self.shards[process]
            for sequence in range(shard * size, (shard + 1) * size)
        ]


@st.composite
def parts(draw):
    """Any ramp, on data-parallel ranks dealt to any processes of any sites."""
    ranks, rows = draw(st.integers(1, 4)), draw(st.integers(1, 2))
    start, increment, increments = (draw(st.integers(1, most)) for most in (2, 2, 3))
    increments *= draw(st.booleans())
    share = ranks * rows
    start, increment = start * share, increment * share
    ramp = BatchRamp(start + increments * increment, start, increment, draw(st.integers(1, 60)))
    # Contiguous ranks to each process, and perhaps further processes with other stages of them.
    cuts = sorted(draw(st.sets(st.integers(1, ranks - 1)))) if ranks > 1 else []
    shards = [list(range(*pair)) for pair in itertools.pairwise([0, *cuts, ranks])]
    again = draw(st.lists(st.sampled_from(shards), max_size=2))
    return Part(ramp, draw(st.permutations([*shards, *again])), draw(st.integers(1, 5)))


def key(batch, place):
    return tuple((name, batch[name][place].tobytes()) for name in sorted(batch) if name != "row")


def loader_of(corpus, length, ramp, sequences=None):
    return Loader(
        corpus,
        sequence_length=length,
        global_batch_size=ramp.full,
        sequences=sequences,
        ramp=ramp,
        seed=9,
        threads=1,
        prefetch=2,
    )


def steps_of(corpus, length, part, consumed):
    """The sequences of each step of a part, by their index in the batch, over all processes."""
    steps = [{} for _ in range(part.steps)]
    for process in range(len(part.shards)):
        loader = loader_of(corpus, length, part.ramp, part.sequences(process))
        batches = loader.iterate(consumed)
        for step, batch in zip(steps, batches, strict=False):
            for place, row in enumerate(batch["row"].tolist()):
                # Processes that hold the same sequence have read the same.
                assert step.setdefault(row, key(batch, place)) == key(batch, place)
        batches.close()
    return steps


@settings(max_examples=20)
@given(
    chosen=st.sets(st.integers(0, 2), min_size=1),
    weights=st.lists(st.sampled_from([0.2, 0.5, 1.0, 3.0]), min_size=3, max_size=3),
    length=st.integers(4, 16),
    run=st.lists(parts(), min_size=1, max_size=3),
)
def test_every_sample_comes_once_in_the_order_of_one_process(
    prepared: list[Prepared], chosen, weights, length, run
):
    corpus = Corpus(
        tuple(Source(prepared[n].folder.name, prepared[n], weights[n]) for n in sorted(chosen))
    )
    seen, consumed = [], 0
    for part in run:
        for step in steps_of(corpus, length, part, consumed):
            size = part.ramp.size_at(consumed)
            assert sorted(step) == list(range(size)), "a batch is whole, and of the ramp's size"
            seen += [step[row] for row in range(size)]
            consumed += size
    undisturbed = loader_of(corpus, length, BatchRamp.constant(1))
    batches = undisturbed.iterate()
    expected = [key(batch, 0) for batch in itertools.islice(batches, consumed)]
    batches.close()
    assert seen == expected
    assert_epochs(corpus, length, seen)


def assert_epochs(corpus, length, seen):
    """Check that each epoch of a source, and the one under way, has each of its windows once."""
    windows = {}
    for source in corpus.sources:
        of_source = SequenceWindows(source.text, "train", length)
        batches = (collate([of_source[n]], np.zeros(1, np.int32)) for n in range(len(of_source)))
        windows[source.name] = Counter(key(batch, 0) for batch in batches)
    shared = Counter(itertools.chain(*windows.values()))
    for own in windows.values():
        if any(shared[window] > 1 for window in own):
            continue  # another source has the same words
        of_source = [window for window in seen if window in own]
        for first in range(0, len(of_source), own.total()):
            epoch = Counter(of_source[first : first + own.total()])
            assert epoch <= own
            assert epoch == own or epoch.total() < own.total()
