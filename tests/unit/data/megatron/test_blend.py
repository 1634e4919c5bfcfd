"""Blends of several texts, against indices that megatron-core has built."""

import json
import math

import numpy as np
import pytest
from support.indexed_files import write_indexed
from support.small_runs import REPOSITORY

from geojax.data import Corpus, DataSettings, Loader
from geojax.data.megatron import blend
from geojax.data.megatron.blend import Choices, MegatronBlend, megatron_blend
from geojax.data.megatron.sample_order import SampleOrder
from geojax.errors import UserError

GOLDEN = json.loads((REPOSITORY / "tests/data/megatron_orders.json").read_text())


def corpus_of(folder, tokenizer_file, lengths, weights):
    """A corpus of texts whose documents have these lengths."""
    draw = np.random.default_rng(2)
    sources = []
    for number, (of_text, weight) in enumerate(zip(lengths, weights, strict=True)):
        documents = [[draw.integers(2, 250, length).tolist()] for length in of_text]
        path = write_indexed(folder / f"{number}.idx", documents)
        sources.append({"name": str(number), "megatron": path, "weight": weight})
    settings = {"order": "megatron", "tokenizer": tokenizer_file, "sources": sources}
    return Corpus.open(DataSettings(**settings))


@pytest.mark.parametrize("number", range(len(GOLDEN["blends"])))
def test_blends_are_those_of_megatron_core(tmp_path, tokenizer_file, number, monkeypatch):
    monkeypatch.setattr(blend, "_STEPS", 16)
    monkeypatch.setattr(blend, "_WARM_UP", 4)
    case = GOLDEN["blends"][number]
    texts = [0, 2, 4][: len(case["weights"])]
    lengths = [GOLDEN["texts"][text]["lengths"] for text in texts]
    corpus = corpus_of(tmp_path, tokenizer_file, lengths, case["weights"])
    blended = megatron_blend(
        corpus.sources, sequence_length=8, total_sequences=case["samples"], seed=3
    )
    assert isinstance(blended, MegatronBlend)
    assert [len(order) for order in blended.orders] == case["sizes"]
    assert blended.choices.texts.tolist() == case["dataset_index"]
    found = [blended.choices.number_within(index) for index in range(len(blended))]
    assert found == case["dataset_sample_index"]
    for index in (0, len(blended) - 1):
        text, sample = case["dataset_index"][index], case["dataset_sample_index"][index]
        expected = blended.orders[text][sample].tokens
        np.testing.assert_array_equal(blended[index].tokens, expected)


@pytest.mark.parametrize("texts", [1, 2, 3, 9])
@pytest.mark.parametrize("power", [0, 1, 12])
def test_choices_computed_side_by_side_are_those_of_the_rule(texts, power, monkeypatch):
    monkeypatch.setattr(blend, "_STEPS", 32)
    monkeypatch.setattr(blend, "_LANES", 8)
    monkeypatch.setattr(blend, "_WARM_UP", 8)
    shares = np.random.default_rng(texts).random(texts) ** power
    shares /= shares.sum()
    size = 1500
    given, expected = [0] * texts, []
    for number in range(size):
        errors = [
            share * max(number, 1) - count for share, count in zip(shares, given, strict=True)
        ]
        expected.append(errors.index(max(errors)))
        given[expected[-1]] += 1
    choices = Choices(shares, size)
    assert choices.texts.tolist() == expected
    assert choices.totals.tolist() == given


def test_without_weights_every_text_is_read_once(tmp_path, tokenizer_file):
    corpus = corpus_of(tmp_path, tokenizer_file, [[30] * 10, [30] * 30], [None, None])
    options = {"sequence_length": 10, "seed": 3}
    blended = megatron_blend(corpus.sources, total_sequences=118, **options)
    assert [len(order) for order in blended.orders] == [29, 89]
    assert blended.choices.totals.tolist() == [29, 89]
    with pytest.raises(UserError, match=r"makes 118 sequences, and the run takes 119; give"):
        megatron_blend(corpus.sources, total_sequences=119, **options)


def test_a_blend_of_more_samples_than_a_text_has_is_refused(tmp_path, tokenizer_file):
    # As does megatron-core: 40 equal shares, of which the first are taken once more.
    corpus = corpus_of(tmp_path, tokenizer_file, [[8]] * 3, [1, 1, 1])
    sources = corpus.sources

    class Short(SampleOrder):
        def __len__(self):
            return 1

    order = Short("a", sources[0].text, sequence_length=7, samples=1, seed=0)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blend, "_order", lambda *arguments: order)
        with pytest.raises(UserError, match="takes 2 of its samples and makes 1"):
            megatron_blend(sources, sequence_length=7, total_sequences=6, seed=0)


def loader_of(corpus, total, **changes):
    options = {"sequence_length": 10, "global_batch_size": 4, "seed": 3, **changes}
    return Loader(corpus, total_sequences=total, **options)


@pytest.mark.parametrize("weights", [(None,), (1.0,), (0.7, 0.3)])
def test_batches_are_the_blend_cut_in_order_on_every_process(tmp_path, tokenizer_file, weights):
    corpus = corpus_of(tmp_path, tokenizer_file, [[7, 30] * 9] * len(weights), weights)
    blended = megatron_blend(corpus.sources, sequence_length=10, total_sequences=40, seed=3)
    whole = loader_of(corpus, 40)
    parts = [loader_of(corpus, 40, sequences=rows) for rows in ([0, 3], [2, 1])]
    ahead = loader_of(corpus, 40).iterate(4 * 6)
    for step in range(10):
        tokens = np.stack([blended[step * 4 + row].tokens for row in range(4)])
        np.testing.assert_array_equal(whole.batch(step)["tokens"], tokens[:, :-1])
        np.testing.assert_array_equal(parts[1].batch(step)["targets"], tokens[[2, 1], 1:])
        if step >= 6:
            np.testing.assert_array_equal(next(ahead)["tokens"], tokens[:, :-1])
    ahead.close()


def test_the_fingerprint_depends_on_the_length_of_the_run(tmp_path, tokenizer_file):
    one, other = (
        corpus_of(tmp_path, tokenizer_file, [[7, 30] * 9], [weight]) for weight in (None, 2.0)
    )
    in_geojax_order = Corpus(one.sources)
    fingerprints = [
        loader_of(one, 40).fingerprint,
        loader_of(one, 44).fingerprint,
        loader_of(other, 40).fingerprint,
        loader_of(in_geojax_order, 40).fingerprint,
    ]
    assert len(set(fingerprints)) == 4
    assert loader_of(in_geojax_order, None).fingerprint == fingerprints[3]
    assert loader_of(one, 40, global_batch_size=2).fingerprint == fingerprints[0]


def test_a_text_of_less_than_a_sample_is_refused_where_it_is_read_once(tmp_path, tokenizer_file):
    corpus = corpus_of(tmp_path, tokenizer_file, [[7], [60]], [None, None])
    with pytest.raises(UserError, match="source '0' has 7 tokens to train on, too few for a seq"):
        loader_of(corpus, 4)
    # With weights it has as many epochs as it takes.
    again = corpus_of(tmp_path, tokenizer_file, [[7], [60]], [1, 1])
    assert loader_of(again, 4).batch(0)["tokens"].shape == (4, 10)
    assert math.isclose(sum(source.weight for source in again.sources), 1)
