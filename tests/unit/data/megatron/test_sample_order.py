"""Orders of single texts, against indices that megatron-core has built."""

import json

import numpy as np
import pytest
from support.indexed_files import write_indexed
from support.small_runs import REPOSITORY

from geojax.data.megatron import sample_order
from geojax.data.megatron.megatron_text import MegatronText
from geojax.data.megatron.sample_order import SampleOrder
from geojax.data.packing import pack
from geojax.errors import UserError

GOLDEN = json.loads((REPOSITORY / "tests/data/megatron_orders.json").read_text())


def written(path, lengths):
    """Documents of these lengths of random tokens, and their file."""
    draw = np.random.default_rng(1)
    documents = [draw.integers(2, 250, length).tolist() for length in lengths]
    return documents, write_indexed(path, [[document] for document in documents])


@pytest.mark.parametrize("number", range(len(GOLDEN["texts"])))
def test_samples_are_those_of_megatron_core(tmp_path, tokenizer_file, number, monkeypatch):
    monkeypatch.setattr(sample_order, "_BLOCK", 4)
    case = GOLDEN["texts"][number]
    documents, path = written(tmp_path / "a.idx", case["lengths"])
    order = SampleOrder(
        "a",
        MegatronText(path, tokenizer_file, case["split"]),
        sequence_length=case["sequence_length"],
        samples=case["samples"],
        seed=case["seed"],
    )
    assert order.documents.tolist() == case["document_index"]
    assert order.samples.tolist() == case["shuffle_index"]
    assert len(order) == len(case["sample_index"]) - 1
    for index, place in enumerate(case["shuffle_index"]):
        (first, offset), (last, end) = case["sample_index"][place : place + 2]
        expected = []
        for document in range(first, last + 1):
            tokens = documents[case["document_index"][document]]
            start = offset if document == first else 0
            expected += tokens[start : end + 1 if document == last else None]
        sample = order[index]
        assert sample.tokens.tolist() == expected
        assert len(expected) == case["sequence_length"] + 1


def test_empty_documents_and_ends_within_a_sample(tmp_path, tokenizer_file):
    lengths = [0, 3, 0, 0, 5, 1, 0, 9, 0]
    documents, path = written(tmp_path / "a.idx", lengths)
    order = SampleOrder(
        "a", MegatronText(path, tokenizer_file), sequence_length=4, samples=20, seed=2
    )
    tokens = [token for number in order.documents for token in documents[number]]
    firsts = np.cumsum([0, *(lengths[number] for number in order.documents)])
    for index in range(len(order)):
        sample, start = order[index], int(order.samples[index]) * 4
        assert sample.tokens.tolist() == tokens[start : start + 5]
        begins = [position in firsts for position in range(start, start + 5)]
        assert sample.begins.tolist() == begins
        batch = pack(type(sample)(*(values[None] for values in sample)))
        np.testing.assert_array_equal(batch["loss_mask"][0], ~sample.begins[1:])
        assert (batch["positions"][0] == 0).sum() == batch["segment_ids"].max()


def test_less_than_most_of_the_last_epoch_is_shuffled_apart(tmp_path, tokenizer_file):
    _, path = written(tmp_path / "a.idx", [10] * 10)
    text = MegatronText(path, tokenizer_file)
    for samples, is_apart in ((25, True), (26, False)):
        order = SampleOrder("a", text, sequence_length=10, samples=samples, seed=0)
        last = set(order.documents[-10:].tolist())
        assert (len(last) == 10 and set(order.samples[:19].tolist()) == set(range(19))) == is_apart


def test_a_text_without_training_tokens_is_refused(tmp_path, tokenizer_file):
    _, path = written(tmp_path / "a.idx", [3, 3])
    with pytest.raises(UserError, match=r"a.idx: has no tokens to train on; another split"):
        SampleOrder(
            "a", MegatronText(path, tokenizer_file, "0,1"), sequence_length=2, samples=1, seed=0
        )
