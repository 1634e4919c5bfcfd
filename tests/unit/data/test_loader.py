import itertools
import shutil
import threading
from collections import Counter

import numpy as np
import pytest
from support.processes import PATIENCE_SECONDS

from geojax.data import Corpus, DataSettings, Loader, Prepared, Source, SourceSettings
from geojax.errors import UserError

SEQUENCE, BATCH = 32, 8


def assert_equal_batches(left, right):
    assert left.keys() == right.keys()
    for name in left:
        np.testing.assert_array_equal(left[name], right[name], err_msg=name)
        assert left[name].dtype == right[name].dtype, name


def loader_of(corpus, **changes):
    return Loader(
        corpus, **{"sequence_length": SEQUENCE, "global_batch_size": BATCH, "seed": 3, **changes}
    )


def windows_of(prepared, sequence_length=SEQUENCE):
    """Every training window as a tuple of its inputs and last target."""
    stream = prepared.stream("train")
    return [
        tuple(stream.read(start, start + sequence_length + 1).tolist())
        for start in range(0, len(stream) - sequence_length, sequence_length)
    ]


def seen_windows(batches):
    return [
        (*tokens.tolist(), int(targets[-1]))
        for batch in batches
        for tokens, targets in zip(batch["tokens"], batch["targets"], strict=True)
    ]


def test_batch_has_the_agreed_fields(corpus):
    batch = loader_of(corpus).batch(0)
    shapes = {name: (values.dtype.name, values.shape) for name, values in batch.items()}
    assert shapes == {
        "tokens": ("int32", (BATCH, SEQUENCE)),
        "targets": ("int32", (BATCH, SEQUENCE)),
        "loss_mask": ("float32", (BATCH, SEQUENCE)),
        "segment_ids": ("int32", (BATCH, SEQUENCE)),
        "positions": ("int32", (BATCH, SEQUENCE)),
        "row": ("int32", (BATCH,)),
    }
    np.testing.assert_array_equal(batch["tokens"][:, 1:], batch["targets"][:, :-1])


@pytest.mark.parametrize("start", [0, 1, 7, 1000])
def test_resume_is_exact(corpus, start):
    loader = loader_of(corpus)
    resumed = list(itertools.islice(loader_of(corpus).iterate(start * BATCH), 5))
    for offset, batch in enumerate(resumed):
        assert_equal_batches(batch, loader.batch(start + offset))


@pytest.mark.parametrize("batch_size", [2, 3, 12])
def test_another_batch_size_goes_on_with_the_next_sequence(corpus, batch_size):
    steps = 6
    batches = itertools.islice(loader_of(corpus, global_batch_size=batch_size).iterate(8), steps)
    found = seen_windows(batches)
    whole = seen_windows(loader_of(corpus).batch(step) for step in range(1, 1 + steps * 2))
    assert found == whole[: len(found)]
    assert len(found) == steps * batch_size


def test_a_far_step_is_found_at_once(corpus):
    batch = loader_of(corpus).batch(10**12)
    assert batch["tokens"].shape == (BATCH, SEQUENCE)


@pytest.mark.parametrize("processes", [2, 4, 8])
def test_shares_of_processes_make_the_global_batch(two_prepared, processes):
    corpus = Corpus(
        tuple(
            Source(name, prepared, weight)
            for name, prepared, weight in zip(["a", "b"], two_prepared, [0.3, 0.7], strict=True)
        )
    )
    whole = loader_of(corpus)
    shares = [
        loader_of(corpus, sequences=chosen)
        for chosen in np.array_split(np.arange(BATCH), processes)
    ]
    for step in [0, 5, 60]:
        parts = [share.batch(step) for share in shares]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        assert_equal_batches(joined, whole.batch(step))
    for batches in zip(*(share.validation("a") for share in [whole, *shares]), strict=True):
        joined = {name: np.concatenate([part[name] for part in batches[1:]]) for name in batches[0]}
        assert_equal_batches(joined, batches[0])


def test_sequences_may_be_scattered(corpus):
    chosen = [6, 1, 3]
    share, whole = loader_of(corpus, sequences=chosen).batch(4), loader_of(corpus).batch(4)
    assert_equal_batches(share, {name: values[chosen] for name, values in whole.items()})
    np.testing.assert_array_equal(share["row"], chosen)


def test_an_epoch_shows_every_window_once_and_the_next_in_another_order(left, corpus):
    windows = windows_of(left)
    loader = loader_of(corpus, global_batch_size=1)
    first, second = (
        seen_windows(loader.batch(step) for step in range(epoch, epoch + len(windows)))
        for epoch in [0, len(windows)]
    )
    assert Counter(first) == Counter(windows)
    assert Counter(second) == Counter(windows)
    assert first != windows
    assert first != second


def test_seed_decides_the_order_and_only_that(left, corpus):
    windows = Counter(windows_of(left))
    orders = []
    for seed in [3, 4]:
        loader = loader_of(corpus, global_batch_size=1, seed=seed)
        orders.append(seen_windows(loader.batch(step) for step in range(windows.total())))
        assert Counter(orders[-1]) == windows
    assert orders[0] != orders[1]
    # The order of an epoch of one seed is not that of the next epoch of its neighbor.
    loader = loader_of(corpus, global_batch_size=1, seed=3)
    second = seen_windows(loader.batch(windows.total() + step) for step in range(windows.total()))
    assert second != orders[1]


@pytest.mark.parametrize("weights", [(1.0, 1.0), (0.3, 0.7), (0.02, 0.98), (0.0, 1.0)])
def test_blend_keeps_its_proportions_at_every_length(two_prepared, weights):
    settings = DataSettings(
        sources=tuple(
            SourceSettings(name=name, prepared=prepared.folder, weight=weight)
            for name, prepared, weight in zip("ab", two_prepared, weights, strict=True)
        )
    )
    loader = loader_of(Corpus.open(settings))
    # Where a window of one source occurs in the other as well the count would be ambiguous.
    left, right = (set(windows_of(prepared)) for prepared in two_prepared)
    assert not left & right
    from_left = [window in left for window in seen_windows(map(loader.batch, range(125)))]
    share = weights[0] / sum(weights)
    for count in [10, 100, 1000]:
        assert sum(from_left[:count]) == pytest.approx(share * count, abs=1 + 0.01 * count * share)


def test_weights_follow_the_tokens_when_none_is_given(two_prepared):
    settings = DataSettings(
        sources=tuple(
            SourceSettings(name=name, prepared=prepared.folder)
            for name, prepared in zip("ab", two_prepared, strict=True)
        )
    )
    tokens = [len(prepared.stream("train")) for prepared in two_prepared]
    weights = [source.weight for source in Corpus.open(settings).sources]
    assert weights == pytest.approx([count / sum(tokens) for count in tokens])


def test_segments_positions_and_mask_against_a_slow_walk(left, corpus):
    tokenizer = left.tokenizer
    boundaries = 0
    for step in range(20):
        batch = loader_of(corpus).batch(step)
        for row in range(BATCH):
            segment, position = 1, 0
            for column in range(SEQUENCE):
                if batch["tokens"][row, column] == tokenizer.bos_id and column > 0:
                    segment, position, boundaries = segment + 1, 0, boundaries + 1
                assert batch["segment_ids"][row, column] == segment
                assert batch["positions"][row, column] == position
                crosses = batch["targets"][row, column] == tokenizer.bos_id
                assert batch["loss_mask"][row, column] == (0.0 if crosses else 1.0)
                assert crosses == (batch["tokens"][row, column] == tokenizer.eos_id)
                position += 1
    assert boundaries > 50


@pytest.mark.parametrize("global_batch_size", [1, 3, 8])
def test_validation_counts_every_target_once_whatever_the_batch(left, corpus, global_batch_size):
    stream = left.stream("validation")
    everything = stream.read(0, len(stream))
    expected = everything[1:][everything[1:] != left.tokenizer.bos_id]
    loader = loader_of(corpus, global_batch_size=global_batch_size, validation_sequences=10_000)
    batches = list(loader.validation("left"))
    targets = np.concatenate(
        [batch["targets"][batch["loss_mask"] == 1].ravel() for batch in batches]
    )
    np.testing.assert_array_equal(targets, expected)
    for batch in batches:
        assert batch["tokens"].shape == (global_batch_size, SEQUENCE)
        np.testing.assert_array_equal(batch["loss_mask"][batch["segment_ids"] == 0], 0)
        np.testing.assert_array_equal(batch["row"], np.arange(global_batch_size))
    for first, second in zip(batches, loader.validation("left"), strict=True):
        assert_equal_batches(first, second)


def test_validation_reads_no_more_sequences_than_asked_and_spreads_them(left, corpus):
    batches = list(loader_of(corpus, validation_sequences=5).validation("left"))
    assert len(batches) == 1
    full = batches[0]["segment_ids"].any(axis=1)
    np.testing.assert_array_equal(full, [True] * 5 + [False] * 3)
    stream = left.stream("validation")
    windows = -(-(len(stream) - 1) // SEQUENCE)
    for row in range(5):
        start = row * windows // 5 * SEQUENCE
        np.testing.assert_array_equal(
            batches[0]["tokens"][row], stream.read(start, start + SEQUENCE)
        )


def test_a_sequence_longer_than_the_validation_set_is_padded(left, corpus):
    tokens = len(left.stream("validation"))
    loader = loader_of(corpus, sequence_length=tokens + 10, global_batch_size=1)
    (batch,) = loader.validation("left")
    assert batch["segment_ids"][0, : tokens - 1].all()
    assert not batch["segment_ids"][0, tokens - 1 :].any()


def test_an_unknown_validation_set_is_refused(corpus):
    with pytest.raises(UserError, match="no validation set is called 'middle'; there are: left"):
        next(loader_of(corpus).validation("middle"))


def test_a_sequence_longer_than_the_corpus_is_refused(corpus):
    with pytest.raises(UserError, match=r"source 'left' has .* tokens .* sequence of 1000000"):
        loader_of(corpus, sequence_length=1_000_000)


def test_a_vocabulary_smaller_than_the_tokenizers_is_refused(corpus):
    needed = corpus.tokenizer.vocabulary_size
    loader_of(corpus, vocab_size=needed)
    with pytest.raises(UserError, match=f"vocabulary of {needed - 1} is smaller .* {needed}"):
        loader_of(corpus, vocab_size=needed - 1)


def test_damaged_tokens_are_refused_also_by_the_threads_that_read_ahead(left, tmp_path):
    folder = tmp_path / "left"
    shutil.copytree(left.folder, folder)
    shard = np.load(folder / "train-00000.npy", mmap_mode="r+")
    shard[:] = 65535
    shard.flush()
    settings = DataSettings(sources=(SourceSettings(name="left", prepared=folder),))
    loader = loader_of(Corpus.open(settings))
    with pytest.raises(UserError, match=r"train-00000.npy: holds token 65,535 at position \d"):
        next(loader.iterate())


def test_closing_the_iterator_stops_its_threads(corpus):
    before = set(threading.enumerate())
    batches = loader_of(corpus, threads=3).iterate()
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    for thread in started:
        thread.join(timeout=PATIENCE_SECONDS)
        assert not thread.is_alive()


def test_fingerprint_tells_what_changes_the_batches(two_prepared, corpus):
    _, right = two_prepared
    other = Corpus((Source("left", right, 1.0),))
    same, *different = [
        loader_of(corpus, sequences=[2]),
        loader_of(corpus, seed=4),
        loader_of(corpus, sequence_length=16),
        loader_of(other),
    ]
    assert same.fingerprint == loader_of(corpus).fingerprint
    assert same.fingerprint == loader_of(corpus, global_batch_size=4).fingerprint
    assert len({loader.fingerprint for loader in [same, *different]}) == 4


def test_a_source_of_one_window_repeats_it(left: Prepared, corpus):
    sequence = len(left.stream("train")) - 1
    loader = loader_of(corpus, sequence_length=sequence, global_batch_size=2)
    batch = loader.batch(3)
    np.testing.assert_array_equal(batch["tokens"][0], batch["tokens"][1])


@pytest.mark.parametrize("sequences", [None, [6, 1, 3]])
def test_origins_tell_where_the_sequences_of_a_batch_lie(two_prepared, sequences):
    left, right = two_prepared
    loader = loader_of(
        Corpus((Source("a", left, 0.3), Source("b", right, 0.7))), sequences=sequences
    )
    prepared = {"a": left, "b": right}
    for step in [0, 7, 10**6]:
        origins = loader.origins(loader.ramp.consumed_after(step))
        rows = range(BATCH) if sequences is None else sequences
        assert [origin.number for origin in origins] == [step * BATCH + row for row in rows]
        for origin, tokens in zip(origins, loader.batch(step)["tokens"], strict=True):
            stream = prepared[origin.source].stream("train")
            np.testing.assert_array_equal(
                tokens, stream.read(origin.start, origin.start + SEQUENCE)
            )


@pytest.mark.parametrize(
    "steps", [[3], [3, 4, 5], [3, 7], [5, 5]], ids=["one", "in turn", "a jump", "twice"]
)
@pytest.mark.parametrize("start", [0, 1], ids=["there", "elsewhere"])
def test_what_is_read_ahead_changes_no_batch(corpus, steps, start):
    loader = loader_of(corpus)
    for step in steps:
        loader.read_ahead(step * BATCH)
    begin = steps[-1] + 2 * start
    batches = list(itertools.islice(loader.iterate(begin * BATCH), 3))
    for number, batch in enumerate(batches):
        assert_equal_batches(batch, loader.batch(begin + number))


def test_reading_ahead_batch_by_batch_starts_no_other_threads(corpus, monkeypatch):
    loader, reads = loader_of(corpus), []
    read = loader._read
    monkeypatch.setattr(loader, "_read", lambda consumed: reads.append(consumed) or read(consumed))
    for step in range(3, 7):
        loader.read_ahead(step * BATCH)
    assert_equal_batches(next(loader.iterate(6 * BATCH)), loader.batch(6))
    assert reads == [3 * BATCH]
